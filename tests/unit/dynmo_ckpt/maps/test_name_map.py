from pathlib import Path

import pytest

from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.io.safetensors import StoredArray
from dynmo_ckpt.maps.name_map import layout_of, load_map, to_foreign, to_native
from dynmo_ckpt.tensors.views import as_tensor
from tests.unit.dynmo_ckpt import native_checkpoints

TIED = {"head.weight": "embedding.word.weight"}


def tensors(shapes):
    return {
        name: as_tensor(StoredArray(path=Path("x"), key=name, dtype="F32", shape=tuple(shape), offset=0))
        for name, shape in shapes.items()
    }


def ours(m):
    stored = native_checkpoints.true_rows(m["vocab_size"], native_checkpoints.parameters(m))
    return tensors({name: value.shape for name, value in stored.items()})


def layout(m):
    return layout_of(load_map("gpt2"), m)


def back(m, foreign):
    return to_native(layout(m), {name: [tensor] for name, tensor in foreign.items()}, TIED)[0]


def theirs(m):
    return tensors({item.name: item.shape for item in to_foreign(layout(m), ours(m), TIED)})


def test_to_foreign_names_every_tensor_once():
    m = native_checkpoints.model()
    mapped = to_foreign(layout(m), ours(m), TIED)
    assert len({item.name for item in mapped}) == len(mapped) == 12 * m["num_layers"] + 4
    assert {item.name: item.shape for item in back(m, theirs(m))} == {
        name: tensor.shape for name, tensor in ours(m).items()
    }


def test_to_native_without_prefix_and_with_ignored_buffers():
    m = native_checkpoints.model()
    bare = {name.removeprefix("transformer."): tensor for name, tensor in theirs(m).items()}
    bare |= tensors({"h.0.attn.bias": (1, 1, 12, 12), "h.2.attn.masked_bias": (), "lm_head.weight": (29, 16)})
    assert len(back(m, bare)) == len(ours(m))


def test_unknown_tensor_is_refused():
    m = native_checkpoints.model()
    with pytest.raises(UnsupportedError, match=r"the map has no rule for 1 tensors: layers\.0\.mlp\.gate"):
        to_foreign(layout(m), ours(m) | tensors({"layers.0.mlp.gate": (1,)}), TIED)
    # By the name that the file has, with which --drop finds it.
    for name in ("transformer.h.9.ln_1.bias", "h.9.ln_1.bias", "score.weight"):
        with pytest.raises(UnsupportedError, match=f"no rule for 1 tensors: {name}"):
            back(m, theirs(m) | tensors({name: (1,)}))


def test_tensor_with_and_without_the_prefix_is_refused():
    m = native_checkpoints.model()
    with pytest.raises(CorruptError, match=r"has h\.0\.ln_1\.bias with and without transformer\."):
        back(m, theirs(m) | tensors({"h.0.ln_1.bias": (1,)}))


def test_to_native_missing_tensor_is_refused():
    m = native_checkpoints.model()
    incomplete = ours(m)
    del incomplete["head.norm.bias"]
    with pytest.raises(UnsupportedError, match=r"the input lacks 1 tensors: head\.norm\.bias"):
        to_foreign(layout(m), incomplete, TIED)
