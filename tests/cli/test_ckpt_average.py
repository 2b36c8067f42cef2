"""dynmo-ckpt average: means and moving averages of checkpoints, equal to sums of their state dicts."""

import json
import shutil

import numpy as np
import pytest

from dynmo_ckpt.operations.average import _compared
from tests.unit.dynmo_ckpt import native_checkpoints
from tests.unit.dynmo_ckpt.small_llama import small_llama

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def noisy(base, directory, seed, dtype=None):
    """A copy of a directory whose weights have other values; returns the state dict."""
    shutil.copytree(base, directory)
    torch.manual_seed(seed)
    stored = safetensors.load_file(base / "model.safetensors")
    tensors = {name: tensor + torch.randn_like(tensor) / 4 for name, tensor in stored.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


def mean(states, shares):
    total = {
        name: sum(share * state[name].double() for share, state in zip(shares, states, strict=True))
        for name in states[0]
    }
    return {name: value.to(states[0][name].dtype) for name, value in total.items()}


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ([], (1 / 3, 1 / 3, 1 / 3)),
        (["--weights", "1,0,3"], (0.25, 0.0, 0.75)),
        (["--ema", "0.9"], (0.81, 0.09, 0.1)),
    ],
)
def test_average_equals_the_weighted_sum(tmp_path, ckpt, options, shares):
    base = small_llama(tmp_path / "base")
    states = [noisy(base, tmp_path / f"in{seed}", seed) for seed in range(3)]
    inputs = [tmp_path / f"in{seed}" for seed in range(3)]
    ckpt("average", *inputs, "--output", tmp_path / "out", "--to", "hf", *options)
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    expected = mean(states, shares)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-7, atol=0, msg=name)
    recorded = json.loads((tmp_path / "out" / "conversion.json").read_text())["decisions"]["averaged"]
    assert [each["weight"] for each in recorded] == pytest.approx(shares)


def test_moving_average_is_that_of_its_recursion(tmp_path, ckpt):
    base = small_llama(tmp_path / "base")
    states = [noisy(base, tmp_path / f"in{seed}", seed) for seed in range(4)]
    ckpt("average", *(tmp_path / f"in{seed}" for seed in range(4)), "-o", tmp_path / "out", "--to", "hf", "--ema", 0.7)
    moving = {name: value.double() for name, value in states[0].items()}
    for state in states[1:]:
        moving = {name: 0.7 * value + 0.3 * state[name].double() for name, value in moving.items()}
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    for name, value in moving.items():
        torch.testing.assert_close(found[name], value.float(), rtol=2e-7, atol=0, msg=name)


def test_sums_of_bfloat16_are_rounded_once(tmp_path, ckpt):
    base = small_llama(tmp_path / "base")
    states = [noisy(base, tmp_path / f"in{seed}", seed, torch.bfloat16) for seed in range(3)]
    ckpt("average", *(tmp_path / f"in{seed}" for seed in range(3)), "-o", tmp_path / "out", "--to", "hf")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    expected = mean(states, (1 / 3, 1 / 3, 1 / 3))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_formats_and_topologies_may_differ(tmp_path, ckpt):
    base = small_llama(tmp_path / "base")
    states = [noisy(base, tmp_path / f"in{seed}", seed) for seed in range(3)]
    ckpt("convert", tmp_path / "in0", tmp_path / "a", "--to", "native", "--tp", 2, "--pp", 2)
    ckpt("convert", tmp_path / "in1", tmp_path / "b", "--to", "legacy")
    ckpt("average", tmp_path / "a", tmp_path / "b", tmp_path / "in2", "-o", tmp_path / "out", "--tp", 2)
    ckpt("convert", tmp_path / "out", tmp_path / "hf", "--to", "hf")
    found = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    expected = mean(states, (1 / 3, 1 / 3, 1 / 3))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-7, atol=0, msg=name)


def test_average_has_masks_and_no_optimizer_state(tmp_path, ckpt):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    masks = native_checkpoints.masks(p)
    for name, factor in (("a", 1), ("b", 3)):
        scaled = {key: value * factor for key, value in p.items()}
        native_checkpoints.save(tmp_path / name, {**scaled, **native_checkpoints.optimizer_state(p), **masks}, m)
    ckpt("average", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    roles = {entry["role"] for entry in manifest["tensors"].values()}
    assert roles == {"parameter", "mask"}
    result = ckpt("diff", tmp_path / "a", tmp_path / "out", "--format", "json", code=1)
    names = {each["name"] for each in json.loads(result.stdout)["differences"]}
    assert names == set(p)


def test_model_is_compared_by_what_it_computes_not_by_its_family():
    sizes = {"num_attention_heads": 4, "hidden_size": 32, "activation": "swiglu", "padded_vocab_size": 128}
    llama = {**sizes, "family": "llama", "padded_vocab_size": 99, "num_key_value_heads": 4, "head_dim": 8}
    fields = {"normalization": "rmsnorm", "attention_bias": "none", "mlp_bias": False, "position_embedding": "rotary"}
    assert _compared({**sizes, "family": "gpt", **fields}) == _compared(llama)
    assert _compared({**sizes, "family": "gpt", **fields, "qk_norm": "head"}) != _compared(llama)
    assert _compared({**sizes, "family": "gpt"}) != _compared(llama)
    assert _compared({**sizes, "family": "bert"}) != _compared({**sizes, "family": "gpt"})


def changed_model(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda path: changed_model(path, rms_norm_eps=1e-3), "layernorm_epsilon"),
        (lambda path: noisy(path.with_name("in0"), path, 3, torch.bfloat16), "types"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, ckpt, change, named):
    base = small_llama(tmp_path / "in0", dtype="bfloat16")
    noisy(base, tmp_path / "in1", 1)
    if "noisy" in change.__code__.co_names:
        shutil.rmtree(tmp_path / "in1")
    change(tmp_path / "in1")
    result = ckpt("average", tmp_path / "in0", tmp_path / "in1", "-o", tmp_path / "out", code=5)
    assert named in result.stderr
    assert not (tmp_path / "out").exists()


def test_different_masks_are_refused(tmp_path, ckpt):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    for name, seed in (("a", 1), ("b", 2)):
        native_checkpoints.save(tmp_path / name, {**p, **native_checkpoints.masks(p, seed=seed)}, m)
    result = ckpt("average", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", code=5)
    assert "mask must be equal" in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--weights", "1"], "2 checkpoints"),
        (["--weights", "1,-1"], "at least 0"),
        (["--weights", "0,0"], "above 0"),
        (["--weights", "nan,1"], "finite"),
        (["--weights", "1,x"], "numbers between commas"),
        (["--ema", "1"], "in (0, 1)"),
        (["--ema", "0.5", "--weights", "1,1"], "give one of them"),
        (["--to", "llama2c"], "only be read"),
    ],
)
def test_invalid_options_are_refused(native, ckpt, tmp_path, options, named):
    result = ckpt("average", native[0], native[0], "-o", tmp_path / "out", *options, code=2)
    assert named in " ".join(result.stderr.split())


def test_one_checkpoint_and_an_output_over_an_input_are_refused(native, ckpt, tmp_path):
    assert "at least two" in ckpt("average", native[0], "-o", tmp_path / "out", code=2).stderr
    shutil.copytree(native[0], tmp_path / "other")
    overwriting = ("average", tmp_path / "other", native[0], "-o", tmp_path / "other", "--overwrite")
    assert "would replace the input" in ckpt(*overwriting, code=2).stderr


def test_average_of_equal_checkpoints_is_the_same(native, ckpt, tmp_path):
    ckpt("average", native[0], native[0], "-o", tmp_path / "out")
    assert "no tensor differs" in ckpt("diff", native[0], tmp_path / "out").stdout
    assert np.isfinite(native[2]["embedding.word.weight"]).all()
