"""``pytorch_model.bin`` of a Hugging Face directory, and types of numbers that no model has."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.huggingface.files import read_tensors
from dynmo_ckpt.io.errors import CorruptError, UnsafePickleError, UnsupportedError
from tests.unit.dynmo_ckpt.small_llama import small_llama

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class Evil:
    def __reduce__(self):
        return os.system, ("echo evil",)


def save_index(directory, parts):
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, directory / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("form", ["zip", "stream", "index"])
def test_read_tensors_of_bin_files_gives_all(tmp_path, form):
    if form == "index":
        save_index(tmp_path, [{"a": WEIGHTS["a"]}, {"b": WEIGHTS["b"]}])
    else:
        torch.save(WEIGHTS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=form == "zip")
    found = read_tensors(tmp_path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
    }
    view = found["a"].pieces[0].view
    stored = np.fromfile(view.array.path, np.float32, 6, offset=view.array.offset)
    assert np.array_equal(stored.reshape(2, 3), WEIGHTS["a"].numpy())


def test_read_tensors_prefers_safetensors(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    assert list(read_tensors(tmp_path)) == ["a"]


def test_read_tensors_prefers_a_single_file_to_an_index(tmp_path):
    """As transformers: the index and its files may be of an earlier export into the directory."""
    save_index(tmp_path, [{"a": WEIGHTS["a"]}, {"c": WEIGHTS["b"]}])
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    assert sorted(read_tensors(tmp_path)) == ["a", "b"]
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    save_file({"s": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert list(read_tensors(tmp_path)) == ["s"]


def test_read_tensors_tensor_in_two_files_is_refused(tmp_path):
    save_index(tmp_path, [WEIGHTS, {"b": WEIGHTS["b"] + 1}])
    with pytest.raises(CorruptError, match="several files have b"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"a": Evil()}, UnsafePickleError, "nothing was executed"),
        ({"state_dict": WEIGHTS}, UnsupportedError, "not a flat state dict: state_dict"),
        ([1], CorruptError, "has a list in place of"),
        ({"a": WEIGHTS["a"].to(torch.float8_e4m3fn)}, UnsupportedError, "float8"),
    ],
)
def test_read_tensors_of_other_bin_contents_is_refused(tmp_path, tree, error, message):
    torch.save(tree, tmp_path / "pytorch_model.bin")
    with pytest.raises(error, match=message):
        read_tensors(tmp_path)


def test_read_tensors_float8_is_named_in_the_error(tmp_path):
    save_file({"a": WEIGHTS["a"].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="a has the type F8_E4M3; supported are"):
        read_tensors(tmp_path)


def test_read_tensors_without_weights_names_other_files(tmp_path):
    (tmp_path / "tf_model.h5").write_bytes(b"x")
    with pytest.raises(CorruptError, match=r"must have model.safetensors or pytorch_model.bin.*tf_model.h5"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_codes_without_a_scale_are_refused(tmp_path, dtype):
    """A file of quantized weights without its configuration has a matrix of the right shape."""
    directory, name = small_llama(tmp_path / "in"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {name: (tensors[name] * 100).to(dtype)}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.up\.weight: has the type .*, and no scale"):
        open_checkpoint(directory)
