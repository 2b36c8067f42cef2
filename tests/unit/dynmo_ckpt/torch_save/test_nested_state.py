"""Nested dictionaries of a torch file become dotted names in order, or are refused."""

import pytest
import torch

from dynmo_ckpt.io.errors import CorruptError
from dynmo_ckpt.megatron.read import flatten
from dynmo_ckpt.torch_save.reader import open_torch


def opened(tmp_path, tree):
    torch.save(tree, tmp_path / "x.pt")
    return open_torch(tmp_path / "x.pt")


def test_flatten_nested_dictionaries_keeps_order(tmp_path):
    one = torch.ones(1)
    tree = {"b": {"z": {"w": one}, "a": one, 3: one}, "a": one, "c": {"w_extra_state": one, "note": "text"}}
    file = opened(tmp_path, tree)
    assert list(flatten(file, file.tree)) == ["b.z.w", "b.a", "b.3", "a"]


@pytest.mark.parametrize("kind", ["deep", "itself", "itself twice", pytest.param("shared", marks=pytest.mark.complete)])
def test_flatten_hostile_tree_is_refused(tmp_path, kind):
    tree = {"w": torch.ones(1)}
    file = opened(tmp_path, tree)
    inner = file.tree
    if kind == "deep":
        for _ in range(3000):
            inner = {"a": inner}
    elif kind == "shared":
        for _ in range(60):
            inner = {"a": inner, "b": inner}
    else:
        inner |= {"a": inner} | ({"b": inner} if kind == "itself twice" else {})
    with pytest.raises(CorruptError, match="must have at most 100 levels"):
        flatten(file, inner)


@pytest.mark.parametrize("key", [(1,), None, 1.5, 1 << 70])
def test_flatten_invalid_key_is_refused(tmp_path, key):
    file = opened(tmp_path, {"w": torch.ones(1)})
    with pytest.raises(CorruptError, match="a tensor's name must be a string"):
        flatten(file, {key: file.tree["w"]})
