"""dynmo-ckpt convert --sparse-format: logits, conversions back, and refusals."""

import json

import pytest

from tests.unit.dynmo_ckpt.small_llama import prune, small_llama

pytestmark = pytest.mark.complete

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
LAYOUTS = ("sparse-24-bitmask", "sparse-bitmask")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pruned_llama_is_converted_and_back(tmp_path, ckpt, layout):
    plain = prune(small_llama(tmp_path / "in"), layout)
    result = ckpt("convert", tmp_path / "in", tmp_path / "sparse", "--to", "hf", "--sparse-format", layout)
    # transformers computes the input, and numpy the compressed weights.
    assert "logits of input and output differ by at most" in result.stderr
    assert "sparse_weights: 14" in result.stdout + result.stderr
    files = [directory / "model.safetensors" for directory in (tmp_path / "in", tmp_path / "sparse")]
    assert files[1].stat().st_size < 0.8 * files[0].stat().st_size
    back = ckpt("convert", tmp_path / "sparse", tmp_path / "back", "--to", "hf", "--check-logits")
    assert f"14 sparse weights ({layout}) are decompressed" in back.stderr
    found = safetensors.load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert "ok (full)" in ckpt("verify", tmp_path / "sparse").stdout


def test_weights_that_do_not_fit_are_refused(tmp_path, ckpt):
    prune(small_llama(tmp_path / "in"), "sparse-bitmask")
    refused = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "hf", "--sparse-format", LAYOUTS[0], code=5)
    assert "self_attn.q_proj.weight" in refused.stderr
    assert "use sparse-bitmask" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_other_formats_have_no_sparse_layout(tmp_path, ckpt):
    small_llama(tmp_path / "in")
    refused = ckpt(
        "convert", tmp_path / "in", tmp_path / "out", "--to", "native", "--sparse-format", LAYOUTS[1], code=2
    )
    assert "--sparse-format: a layout of --to hf only, not of native" in refused.stderr
