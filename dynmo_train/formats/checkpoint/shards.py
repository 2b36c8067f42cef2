"""The header of safetensors files: names, dtypes, shapes and offsets of tensors; no tensor bytes.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes without gaps. Everything
is checked against the size of the file before a byte of a tensor is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..._common.document import parse_json, short_repr

DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "BOOL": 1, "U8": 1}
TORCH_NAMES = {
    "F64": "float64",
    "I64": "int64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "BOOL": "bool",
    "U8": "uint8",
}
HEADER_LIMIT_BYTES = 100_000_000
_ALIGN_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class TensorLocation:
    """Location of a stored tensor.

    Attributes:
        dtype: safetensors name of its dtype.
        shape: Its shape.
        begin: Offset of its first byte in the file.
        end: Offset after its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the length and header of a file.

    Args:
        tensors: ``(key, dtype, shape)`` of each tensor, in file order: from wide dtypes to narrow ones, which keeps
            every tensor aligned. Spaces pad the header so that the first tensor begins on a page.
    """
    header: dict[str, object] = {}
    begin = 0
    for key, dtype, shape in tensors:
        end = begin + math.prod(shape) * DTYPE_BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def decode_header(length_bytes: bytes, text: bytes, file_bytes: int) -> dict[str, TensorLocation]:
    """Return key -> location of each tensor.

    Args:
        length_bytes: First 8 bytes of the file.
        text: The JSON header.
        file_bytes: Size of the file.

    Raises:
        ValueError: The header breaks the format; the message names the rule.
    """
    header_end = 8 + int.from_bytes(length_bytes, "little")
    if len(length_bytes) != 8 or header_end > file_bytes or len(text) != header_end - 8:
        raise ValueError(f"the header should end at byte {header_end}, the file has {file_bytes} bytes")
    header = parse_json(text, HEADER_LIMIT_BYTES)
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    places = {key: _place(key, value, header_end) for key, value in header.items() if key != "__metadata__"}
    # Without gaps and overlaps, every byte after the header belongs to one tensor and is covered by its checksum.
    at = header_end
    for key, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != at:
            raise ValueError(f"{key} begins at byte {place.begin}, not at {at}: a gap or an overlap")
        at = place.end
    if at != file_bytes:
        raise ValueError(f"the tensors end at byte {at}, the file at {file_bytes}")
    return places


def _place(key: str, value: object, header_end: int) -> TensorLocation:
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{key} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"{key} has the type {short_repr(dtype)}; known are {', '.join(DTYPE_BYTES)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{key} has {short_repr(numbers)} where non-negative integers are required")
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise ValueError(
            f"{key} has the offsets {short_repr(offsets)}, but {dtype} {short_repr(shape)} takes {size} bytes"
        )
    return TensorLocation(dtype=dtype, shape=tuple(shape), begin=header_end + offsets[0], end=header_end + offsets[1])
