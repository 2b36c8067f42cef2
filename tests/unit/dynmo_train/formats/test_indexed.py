"""The reader of indexed data sets, against bytes written here by hand from the layout."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dynmo_train._common.document import DocumentError
from dynmo_train.formats.indexed import open_indexed
from tests.tables import table


def index_bytes(lengths, pointers, documents, *, code=8, version=1, magic=b"MMIDIDX\x00\x00"):
    fixed = magic + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    return fixed + (
        np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes() + np.array(documents, "<i8").tobytes()
    )


def write(folder, index, payload):
    (folder / "x.idx").write_bytes(index)
    (folder / "x.bin").write_bytes(payload)
    return str(folder / "x")


GOOD = index_bytes([3, 0, 2], [0, 6, 6], [0, 1, 3])
PAYLOAD = np.array([5, 6, 7, 8, 9], "<u2").tobytes()


def test_open_indexed_reads_a_dataset(tmp_path):
    data = open_indexed(write(tmp_path, GOOD, PAYLOAD))
    assert data.num_documents == 2
    assert data.lengths.tolist() == [3, 0, 2]
    assert data.starts.tolist() == [0, 3, 3]
    assert data.documents.tolist() == [0, 1, 3]
    assert data.tokens.tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(("code", "dtype"), [(1, "<u1"), (2, "<i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_open_indexed_reads_every_integer_dtype(tmp_path, code, dtype):
    size = np.dtype(dtype).itemsize
    data = open_indexed(
        write(tmp_path, index_bytes([1, 2], [0, size], [0, 2], code=code), np.array([1, 2, 3], dtype).tobytes())
    )
    assert data.tokens[data.starts[1] :].tolist() == [2, 3]


def test_open_indexed_ignores_multimodal_modes(tmp_path):
    assert open_indexed(write(tmp_path, GOOD + b"\x00\x00\x00", PAYLOAD)).lengths.tolist() == [3, 0, 2]


def test_open_indexed_reads_an_empty_dataset(tmp_path):
    assert open_indexed(write(tmp_path, index_bytes([], [], [0]), b"")).num_documents == 0


@table(
    ("index", "payload", "where", "kind"),
    [
        (GOOD[:20], PAYLOAD, "", "truncated"),
        (GOOD[:-1], PAYLOAD, "", "truncated"),
        (GOOD + b"\x00", PAYLOAD, "", "size"),
        (b"not an index, only text that is long enough for it", PAYLOAD, "magic", "magic"),
        (b"TNTIDX\x00\x00" + GOOD[8:], PAYLOAD, "version", "version"),
        (index_bytes([3], [0], [0, 1], version=2), PAYLOAD, "version", "version"),
        (index_bytes([3], [0], [0, 1], code=6), PAYLOAD, "dtype", "choice"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 2**60, 1), PAYLOAD, "", "truncated"),
        (GOOD, PAYLOAD[:-2], "lengths", "length"),
        (GOOD, PAYLOAD + b"\x00\x00", "lengths", "length"),
        (index_bytes([3], [-2], [0, 1]), PAYLOAD, "pointers", "order"),
        (index_bytes([2], [1], [0, 1]), PAYLOAD, "pointers", "order"),
        (index_bytes([-1], [0], [0, 1]), PAYLOAD, "lengths", "range"),
        (index_bytes([3], [0], []), PAYLOAD, "documents", "order"),
        (index_bytes([3], [0], [1, 1]), PAYLOAD, "documents", "order"),
        (index_bytes([3], [0], [0, 2]), PAYLOAD, "documents", "order"),
        (index_bytes([3, 2], [0, 6], [0, 2, 1, 2]), PAYLOAD, "documents", "order"),
    ],
)
def test_open_indexed_of_a_broken_dataset_names_the_field(tmp_path, index, payload, where, kind):
    with pytest.raises(DocumentError) as caught:
        open_indexed(write(tmp_path, index, payload))
    assert (where, kind) in [(problem.path, problem.kind) for problem in caught.value.problems]
    assert "x.idx" in str(caught.value)


def test_open_indexed_without_a_file_names_it(tmp_path):
    (tmp_path / "x.idx").write_bytes(GOOD)
    with pytest.raises(DocumentError, match=r"x\.bin: no such file"):
        open_indexed(str(tmp_path / "x"))
    with pytest.raises(DocumentError, match="2 problems"):
        open_indexed(str(tmp_path / "y"))


@pytest.mark.parametrize("name", ["x.bin", "x.idx"])
def test_open_indexed_accepts_the_name_of_either_file(tmp_path, name):
    write(tmp_path, GOOD, PAYLOAD)
    assert open_indexed(str(tmp_path / name)).prefix == str(tmp_path / "x")


def test_open_indexed_keeps_a_prefix_with_a_file_suffix(tmp_path):
    (tmp_path / "x.bin.idx").write_bytes(GOOD)
    (tmp_path / "x.bin.bin").write_bytes(PAYLOAD)
    assert open_indexed(str(tmp_path / "x.bin")).prefix == str(tmp_path / "x.bin")


def test_open_indexed_missing_files_have_one_suffix(tmp_path):
    with pytest.raises(DocumentError) as error:
        open_indexed(str(tmp_path / "none.bin"))
    assert "none.bin.bin" not in str(error.value)
