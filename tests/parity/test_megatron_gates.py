"""Gates and softmaxes of Megatron-LM alone: the reference model of ``dynmo-ckpt`` has the trainer's logits."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.registry import family_of_manifest
from tests.parity.reference_models import check_logits, save_native
from tests.parity.test_shared_experts import COMMON

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
    return family, save_native(family, tmp_path / "native"), tmp_path / "native"


def test_reference_model_equals_the_trainer(saved):
    check_logits(*saved)
    assert family_of_manifest(saved[0].manifest()).manifest() == saved[0].manifest()


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_formats_without_the_function_refuse_it(saved, tmp_path, form):
    done = CliRunner().invoke(app, ["convert", str(saved[2]), str(tmp_path / "out"), "--to", form])
    assert done.exit_code != 0
    assert not (tmp_path / "out").exists()
    assert any(word in str(done.exception) for word in ("activation", "swiglu", "softmax_off_by_one"))
