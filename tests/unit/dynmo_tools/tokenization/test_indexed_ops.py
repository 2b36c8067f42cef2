from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.config.settings import IndexForm
from dynmo_tools.formats.indexed import Index, IndexedReader, bin_path, encode_index, idx_path, read_index
from dynmo_tools.formats.int_columns import arange, in_memory
from dynmo_tools.tokenization.indexed_ops import convert_dataset, expand_prefixes, merge_datasets


def make(prefix, documents, dtype=np.uint16, form="mmap"):
    sequences = [sequence for document in documents for sequence in document]
    index = Index(
        form=form,
        dtype=np.dtype(dtype),
        lengths=in_memory([len(s) for s in sequences]),
        documents=in_memory(np.cumsum([0, *(len(document) for document in documents)])),
    )
    bin_path(prefix).write_bytes(np.asarray([t for s in sequences for t in s], dtype=dtype).tobytes())
    idx_path(prefix).write_bytes(b"".join(encode_index(index)))
    return prefix


def documents_of(prefix):
    reader = IndexedReader(prefix)
    bounds = reader.index.documents.tolist()
    return [[reader[s].tolist() for s in range(a, b)] for a, b in itertools.pairwise(bounds)]


A = [[[1, 2], [3]], [[4]]]
B = [[[5]], [], [[6, 7, 8]]]


@pytest.mark.parametrize("form", ["mmap", "tnt"])
def test_merge_datasets_concatenates_them(tmp_path, form):
    dtype = np.uint16 if form == "mmap" else np.int32
    made = [make(tmp_path / name, docs, dtype, form) for name, docs in (("a", A), ("b", B), ("c", []))]
    merge_datasets(made, tmp_path / "all")
    assert documents_of(tmp_path / "all") == A + B


def test_merge_datasets_widens_types_with_widen_only(tmp_path):
    made = [make(tmp_path / "a", A), make(tmp_path / "b", [[[70_000]]], np.int32)]
    with pytest.raises(UsageError, match="--widen"):
        merge_datasets(made, tmp_path / "all")
    assert not idx_path(tmp_path / "all").exists()
    for order in (made, made[::-1]):
        index = merge_datasets(order, tmp_path / "all", widen=True, overwrite=True)
        assert index.dtype == np.dtype(np.int32)
    assert documents_of(tmp_path / "all") == [[[70_000]], *A]


def test_merge_above_two_gib_has_exact_pointers(tmp_path):
    for name in ("a", "b", "c"):
        lengths = np.full(2, 1 << 28, dtype=np.int64)
        index = Index(form="mmap", dtype=np.dtype(np.int32), lengths=in_memory(lengths), documents=arange(3))
        idx_path(tmp_path / name).write_bytes(b"".join(encode_index(index)))
        with open(bin_path(tmp_path / name), "wb") as handle:
            handle.truncate(2 << 30)
    from dynmo_tools.tokenization.indexed_ops import merged_index

    indices = [read_index(tmp_path / name) for name in ("a", "b", "c")]
    merged = merged_index(indices, [tmp_path / "a"] * 3, widen=False)
    payload = b"".join(encode_index(merged))
    pointers = np.frombuffer(payload, dtype="<i8", count=6, offset=34 + 24)
    assert pointers.tolist() == [n << 30 for n in range(6)]


@pytest.mark.parametrize("form", list(IndexForm))
def test_convert_and_back_is_byte_identical(tmp_path, form):
    source = make(tmp_path / "a", A + B)
    convert_dataset(source, tmp_path / "other", form, None)
    assert documents_of(tmp_path / "other") == A + B
    convert_dataset(tmp_path / "other", tmp_path / "back", IndexForm.MMAP, np.dtype(np.uint16))
    assert bin_path(tmp_path / "back").read_bytes() == bin_path(source).read_bytes()
    assert idx_path(tmp_path / "back").read_bytes() == idx_path(source).read_bytes()


def test_convert_with_an_id_out_of_range_leaves_no_output(tmp_path):
    make(tmp_path / "a", [[[70_000]]], np.int32)
    with pytest.raises(UsageError, match="the id 70000 is out of range"):
        convert_dataset(tmp_path / "a", tmp_path / "small", IndexForm.MMAP, np.dtype(np.uint16))
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_dataset_named_twice_is_merged_twice(tmp_path):
    source = make(tmp_path / "a", A)
    merge_datasets(expand_prefixes([str(source), str(source)]), tmp_path / "twice")
    assert documents_of(tmp_path / "twice") == A + A


def test_merge_output_that_is_an_input_is_refused(tmp_path):
    source = make(tmp_path / "a", A)
    with pytest.raises(UsageError, match="both input and output"):
        merge_datasets([source], source)


def test_expand_prefixes_accepts_folders_patterns_and_names(tmp_path):
    for name in ("b", "a"):
        make(tmp_path / name, A)
    both = [tmp_path / "a", tmp_path / "b"]
    assert expand_prefixes([str(tmp_path)]) == both
    assert expand_prefixes([str(tmp_path / "?.idx")]) == both
    assert expand_prefixes([str(tmp_path / "b"), str(tmp_path)]) == [tmp_path / "b", *both]
    assert expand_prefixes([str(tmp_path / "a.*")]) == [tmp_path / "a"]
    with pytest.raises(UsageError, match="no indexed dataset found"):
        expand_prefixes([str(tmp_path / "none")])
