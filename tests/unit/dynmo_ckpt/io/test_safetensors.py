import json

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from dynmo_ckpt.io.errors import CorruptError
from dynmo_ckpt.io.safetensors import encode_header, read_index
from tests.tables import table


def container(header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def test_read_index_of_safetensors_package(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([True, False, True])}
    save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    index = read_index(tmp_path / "x.safetensors")
    payload = (tmp_path / "x.safetensors").read_bytes()
    assert index.metadata == {"format": "pt"}
    assert {key: (array.dtype, array.shape) for key, array in index.arrays.items()} == {
        "a": ("BOOL", (3,)),
        "b": ("F32", (2, 3)),
    }
    for key, array in index.arrays.items():
        assert payload[array.offset : array.offset + array.num_bytes] == arrays[key].tobytes()


def test_encode_header_is_read_by_safetensors():
    payload = encode_header([("b", "I64", (2,)), ("a", "U8", (3,))], {"format": "pt"})
    assert len(payload) % 4096 == 0
    arrays = load(payload + np.array([1, 2]).tobytes() + b"\1\2\3")
    assert arrays["b"].tolist() == [1, 2]
    assert arrays["a"].tolist() == [1, 2, 3]


@table(
    ("payload", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\1\0\0", "has 3 bytes"),
        (b"\xff" * 8 + b"{}", "does not fit"),
        (container(b"{"), "not a safetensors file"),
        (container(b"[]"), "not an object"),
        (container(b"[" * 50_000), "not a safetensors file"),
        (container({"a": 1}), "must have exactly dtype"),
        (container({"a": entry(extra=1)}), "must have exactly dtype"),
        (container({"a": entry(dtype="F8")}), "has the type"),
        (container({"a": entry(shape=[-2])}), "non-negative"),
        (container({"a": entry(shape=[2.0])}), "non-negative"),
        (container({"a": entry(shape=[True])}), "non-negative"),
        (container({"a": entry(data_offsets=[0, 4])}), "takes 8 bytes"),
        (container({"a": entry(data_offsets=[8])}), "takes 8 bytes"),
        (container({"a": entry(data_offsets=[4, 12])}), "a gap or an overlap"),
        (container({"a": entry(), "b": entry()}), "a gap or an overlap"),
        (container({"a": entry(shape=[10**9, 10**9], data_offsets=[0, 4 * 10**18])}), "the arrays end at"),
        (container({"a": entry()}, b"\0" * 9), "the arrays end at"),
        (container({"__metadata__": {"a": 1}}, b""), "string values only"),
        (container(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'), "repeats a key"),
    ],
)
def test_read_index_invalid_file_is_refused(tmp_path, payload, message):
    (tmp_path / "x.safetensors").write_bytes(payload)
    with pytest.raises(CorruptError, match=message):
        read_index(tmp_path / "x.safetensors")


def test_open_missing_file_is_named(tmp_path):
    with pytest.raises(CorruptError, match=r"absent\.safetensors: cannot be read"):
        read_index(tmp_path / "absent.safetensors")
