from __future__ import annotations

import numpy as np
import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.formats.indexed import Index, best_dtype, bin_path, encode_index, idx_path, read_index
from dynmo_tools.formats.int_columns import arange, in_memory

LENGTHS = in_memory([3, 1, 2])
DOCUMENTS = in_memory([0, 2, 3])


def encoded(form, dtype):
    return b"".join(encode_index(Index(form=form, dtype=np.dtype(dtype), lengths=LENGTHS, documents=DOCUMENTS)))


def test_encode_mmap_with_two_byte_tokens_is_exact():
    assert encoded("mmap", np.uint16).hex(" ") == (
        "4d 4d 49 44 49 44 58 00 00 01 00 00 00 00 00 00 00 08"
        " 03 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00"
        " 03 00 00 00 01 00 00 00 02 00 00 00"
        " 00 00 00 00 00 00 00 00 06 00 00 00 00 00 00 00 08 00 00 00 00 00 00 00"
        " 00 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00"
    )


def test_encode_mmap_with_four_byte_tokens_is_exact():
    assert encoded("mmap", np.int32).hex(" ") == (
        "4d 4d 49 44 49 44 58 00 00 01 00 00 00 00 00 00 00 04"
        " 03 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00"
        " 03 00 00 00 01 00 00 00 02 00 00 00"
        " 00 00 00 00 00 00 00 00 0c 00 00 00 00 00 00 00 10 00 00 00 00 00 00 00"
        " 00 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00"
    )


def test_encode_tnt_is_exact():
    assert encoded("tnt", np.int32).hex(" ") == (
        "54 4e 54 49 44 58 00 00 01 00 00 00 00 00 00 00 04 00 00 00 00 00 00 00 04 00 00 00 00 00 00 00"
        " 03 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00"
        " 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00"
        " 00 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00 04 00 00 00 00 00 00 00 06 00 00 00 00 00 00 00"
        " 03 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00"
        " 00 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00"
    )


def test_pointers_above_two_gib_are_exact(tmp_path):
    """Four sequences of 2**29 four-byte tokens: the pointers pass 2**32, the tokens are a hole in a sparse file."""
    lengths = np.full(4, 1 << 29, dtype=np.int64)
    index = Index(form="mmap", dtype=np.dtype(np.int32), lengths=in_memory(lengths), documents=arange(5))
    prefix = tmp_path / "large"
    payload = b"".join(encode_index(index))
    idx_path(prefix).write_bytes(payload)
    with open(bin_path(prefix), "wb") as handle:
        handle.truncate(8 << 30)
    pointers = np.frombuffer(payload, dtype="<i8", count=4, offset=34 + 16)
    assert pointers.tolist() == [0, 1 << 31, 1 << 32, 3 << 31]
    assert read_index(prefix).num_tokens == 1 << 31


def test_sequence_of_2_to_the_31_tokens_is_refused():
    lengths = np.asarray([1, 1 << 31], dtype=np.int64)
    index = Index(form="mmap", dtype=np.dtype(np.uint16), lengths=in_memory(lengths), documents=arange(3))
    with pytest.raises(UsageError, match="sequence 1 has 2147483648 tokens"):
        b"".join(encode_index(index))


@pytest.mark.parametrize(("num_ids", "expected"), [(65_499, "uint16"), (65_500, "int32"), (300_000, "int32")])
def test_best_dtype_follows_the_vocabulary_size(num_ids, expected):
    assert best_dtype(num_ids).name == expected
