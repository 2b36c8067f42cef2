"""Names from files are shortened in messages."""

import pytest

from dynmo_ckpt.io.errors import CorruptError, short_name, short_names
from dynmo_ckpt.io.safetensors import encode_header, read_index


def test_short_name_long_or_unprintable_is_shortened_and_escaped():
    assert short_name("layers.0") == "layers.0"
    assert len(short_name("x" * 10**6)) == 200
    assert short_name("a\x1b[2J\nb") == r"a\x1b[2J\nb"
    nested = [1]
    for _ in range(100):
        nested = [nested, nested]
    assert len(short_name(nested)) <= 200


def test_short_names_more_than_the_limit_ends_in_dots():
    assert short_names("abc") == "a, b, c"
    assert short_names("abcdefg") == "a, b, c, d, e, ..."


def test_read_index_hostile_name_is_shortened_in_the_message(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header([("y" * 10**5, "F32", (2,))]))
    with pytest.raises(CorruptError) as error:
        read_index(path)
    assert len(str(error.value)) < 500
