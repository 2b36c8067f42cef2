"""Shared experts: the trainer's layers and the reference model of ``dynmo-ckpt`` compute the same logits."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.families.llama import Llama, LlamaShape
from tests.parity.reference_models import check_logits, save_native

pytestmark = pytest.mark.complete

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
    return family, save_native(family, tmp_path / "native"), tmp_path / "native"


def test_reference_model_equals_the_trainer(saved):
    check_logits(*saved)


def test_export_to_hugging_face_is_refused(saved, tmp_path):
    done = CliRunner().invoke(app, ["convert", str(saved[2]), str(tmp_path / "hf"), "--to", "hf"])
    assert "experts; use --to native" in str(done.exception)
    assert not (tmp_path / "hf").exists()
