"""Random decoders of transformers, converted to a native checkpoint and back: equal logits, weights and settings."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.huggingface.models import hf_config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with biases of attention": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases, yarn": ("Qwen3", {"attention_bias": True, "rope_parameters": YARN}),
    "qwen3 experts": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3 experts, not normalized": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "olmo2": ("Olmo2", {}),
    "olmo2 with biases": ("Olmo2", {"attention_bias": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
}


def convert(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["convert", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def saved(folder, name: str):
    """A random model of a case, saved as users have it; norms and biases are not ones and zeros."""
    kind, own = CASES[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **own})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.2 if parameter.dim() == 1 else 0.1))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_decoder_to_native_and_back_computes_the_same(tmp_path, name):
    model = saved(tmp_path / "theirs", name)
    output = convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    assert "logits of input and output differ by at most" in output
    convert(str(tmp_path / "native"), str(tmp_path / "back"), "--to", "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(again) is type(model)
    ids = torch.arange(40)[None] % 96
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_info_names_what_a_model_has_that_others_of_its_family_have_not(tmp_path):
    saved(tmp_path / "theirs", "qwen3")
    convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    assert "differs by  qk_norm head" in CliRunner().invoke(app, ["info", str(tmp_path / "native")]).output


@pytest.mark.parametrize("name", CASES)
def test_configuration_written_without_its_source_computes_the_same(tmp_path, name):
    """The configuration is then computed from the manifest alone."""
    model = saved(tmp_path / "theirs", name)
    convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    manifest = tmp_path / "native" / "manifest.json"
    stated = json.loads(manifest.read_text())["model"]
    config = hf_config(stated, "float32", 2)
    kind = type(model.config)(**{key: value for key, value in config.items() if key != "architectures"})
    other = type(model)(kind).eval()
    other.load_state_dict(model.state_dict())
    ids = torch.arange(40)[None] % 96
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)
