"""dynmo-ckpt on quantized weights and adapters: conversions, logits, info and verify."""

import json

import numpy as np
import pytest

from tests.unit.dynmo_ckpt.small_llama import quantize_fp8, save_adapter, small_llama

pytestmark = pytest.mark.complete

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize("options", [[], ["--tp", "2"]])
def test_a_float8_llama_is_converted_in_every_direction(tmp_path, ckpt, options):
    expected = quantize_fp8(small_llama(tmp_path / "in"))
    ckpt("convert", tmp_path / "in", tmp_path / "native", "--to", "native", *options)
    ckpt("convert", tmp_path / "native", tmp_path / "out", "--to", "hf")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {name for name in expected if not name.endswith("scale_inv")}
    assert all(torch.equal(found[name], expected[name].float()) for name in found)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_logits_of_quantized_input_are_compared(tmp_path, ckpt):
    quantize_fp8(small_llama(tmp_path / "in"))
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "hf", "--check-logits")
    assert "quantized weights (fp8) are dequantized" in result.stderr
    assert "logits of input and output differ by at most" in result.stderr


def test_info_and_verify_open_quantized_weights(tmp_path, ckpt):
    quantize_fp8(small_llama(tmp_path / "in"))
    assert "model.safetensors" in ckpt("info", tmp_path / "in", "--format", "json").stdout
    assert "ok (full)" in ckpt("verify", tmp_path / "in").stdout


def test_convert_merges_and_compares_logits(tmp_path, ckpt):
    base, adapter = small_llama(tmp_path / "base"), save_adapter(tmp_path)
    result = ckpt("convert", base, tmp_path / "out", "--to", "hf", "--adapter", adapter, "--check-logits")
    assert "logits of input and output differ by at most" in result.stderr
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    plain = safetensors.load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    # Rank 2, alpha 4: 2 times a product of ones, which is 2 everywhere.
    np.testing.assert_allclose(found[name].numpy(), plain[name].numpy() + 4, rtol=0, atol=1e-6)


@pytest.mark.parametrize("own", [None, "{{ base }}", "{{ adapter }}"])
def test_chat_template_of_an_adapter_is_not_lost_silently(tmp_path, ckpt, own):
    """peft's trainers save the tokenizer with which an adapter was trained next to it."""
    base, adapter = small_llama(tmp_path / "base"), save_adapter(tmp_path)
    (base / "chat_template.jinja").write_text("{{ base }}")
    if own is not None:
        (adapter / "chat_template.jinja").write_text(own)
    result = ckpt("convert", base, tmp_path / "out", "--to", "hf", "--adapter", adapter)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ base }}"
    assert ("chat_template.jinja differ from those of the base" in result.stderr) == (own == "{{ adapter }}")
    ckpt("convert", base, tmp_path / "other", "--to", "hf", "--adapter", adapter, "--tokenizer", adapter)
    copied = tmp_path / "other" / "chat_template.jinja"
    assert (copied.read_text() if copied.exists() else None) == own
