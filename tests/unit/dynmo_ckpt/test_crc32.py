import zlib

from hypothesis import given
from hypothesis import strategies as st

from dynmo_ckpt._common.crc32 import combine


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combine_equals_crc32_of_concatenation(first, second):
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_combine_long_second_part_equals_crc32_of_both():
    first, second = b"header", bytes(3_000_001)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
