"""Gates and softmaxes of Megatron-LM alone: the reference model of ``dynmo-ckpt`` has the trainer's logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.native.checkpoint import open_native
from dynmo_ckpt.operations.reference_model import model_logits
from dynmo_train.models.llama import Llama, LlamaShape
from dynmo_train.models.registry import family_of_manifest
from tests.parity.item_stream import build_all, parameters, run
from tests.parity.test_shared_experts import COMMON
from tests.unit.dynmo_ckpt import native_checkpoints

SHAPES = {
    "quick_geglu": {"activation": "quick_geglu", "swiglu_offset": 0.0},
    "quick_geglu with an offset": {"activation": "quick_geglu"},
    "clamped swiglu": {"activation": "clamped_swiglu", "swiglu_alpha": 1.0, "swiglu_limit": 0.3, "swiglu_offset": 0.0},
    "off by one": {"softmax_off_by_one": True},
}


@pytest.fixture(params=SHAPES)
def saved(request, tmp_path):
    """A model, its modules, and the folder of its checkpoint."""
    family = Llama(LlamaShape(**COMMON, num_key_value_heads=2, head_dim=4, **SHAPES[request.param]))
    modules = build_all(family)
    m = family.manifest()
    native_checkpoints.save(
        tmp_path / "native",
        {name: p.detach().numpy() for name, p in parameters(modules).items() if name not in family.ties},
        m,
        partition=native_checkpoints.even_stages(m, 1),
    )
    return family, modules, tmp_path / "native"


def test_reference_model_equals_the_trainer(saved):
    family, modules, folder = saved
    tokens = np.random.default_rng(1).integers(0, 50, (2, 12))
    ids = torch.from_numpy(tokens[:1])
    with torch.no_grad():
        for module in modules.values():
            module.eval()
        values = run(family, modules, {"ids": ids, "labels": ids})
        expected = modules["head"].logits(values["before.hidden"])[0]
    step = next(folder.glob("**/manifest.json")).parent
    logits, _ = model_logits(open_native(step), tokens)
    np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=1e-4)
    assert family_of_manifest(family.manifest()).manifest() == family.manifest()


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_formats_without_the_function_refuse_it(saved, tmp_path, form):
    done = CliRunner().invoke(app, ["convert", str(saved[2]), str(tmp_path / "out"), "--to", form])
    assert done.exit_code != 0
    assert not (tmp_path / "out").exists()
    assert any(word in str(done.exception) for word in ("activation", "swiglu", "softmax_off_by_one"))
