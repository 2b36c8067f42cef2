"""The reader of indexed data sets, against bytes written here by hand from the layout."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dynmo_train._common.document import DocumentError
from dynmo_train.formats.indexed import open_indexed


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
