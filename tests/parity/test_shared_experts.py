"""Shared experts: the trainer's layers and the reference model of ``dynmo-ckpt`` compute the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.native.checkpoint import open_native
from dynmo_ckpt.operations.reference_model import model_logits
from dynmo_train.models.gpt import Gpt, GptShape
from dynmo_train.models.llama import Llama, LlamaShape
from dynmo_train.models.moe_shape import MoeShape
from tests.parity.item_stream import build_all, parameters, run
from tests.unit.dynmo_ckpt import native_checkpoints

COMMON = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "vocab_size": 50,
    "padded_vocab_size": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
}
EXPERTS = MoeShape(num_experts=4, top_k=2, shared_ffn_size=20, shared_gate=True)
FAMILIES = {
    "gpt": Gpt(GptShape(**COMMON, moe=EXPERTS)),
    "llama": Llama(LlamaShape(**COMMON, num_key_value_heads=2, head_dim=4, moe=EXPERTS)),
}


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path):
    """A family, its modules, and the folder of its checkpoint."""
    family = FAMILIES[request.param]
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


def test_export_to_hugging_face_is_refused(saved, tmp_path):
    done = CliRunner().invoke(app, ["convert", str(saved[2]), str(tmp_path / "hf"), "--to", "hf"])
    assert "experts; use --to native" in str(done.exception)
    assert not (tmp_path / "hf").exists()
