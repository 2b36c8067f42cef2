"""The safetensors container without torch: the index of a file, and the header of a new one.

Sizes and offsets are compared with the size of the file before memory is allocated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._common.document import parse_json, short_repr
from .errors import CorruptError, UnsupportedError, short_name
from .files import open_file

DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "I16": 2, "BF16": 2, "F16": 2, "BOOL": 1, "U8": 1}
# Types that only a reader of quantized weights opens; each value is one byte.
QUANTIZED_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
# Types of the format that DynMo reads not at all, or only with scales, which are separate tensors.
OTHER_TYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "I8", "C64")
# The limit of the safetensors library: a larger header would not open there.
HEADER_LIMIT_BYTES = 100_000_000
# The data begins at a page, so that reads and writes of whole pages are aligned.
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """A contiguous row-major array in a file.

    Attributes:
        path: the file.
        key: its name in the file.
        dtype: as in safetensors.
        shape: its dimensions.
        offset: from the begin of the file, in bytes.
        crc32: the recorded CRC-32 of its bytes; None where the file records none.
    """

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    crc32: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * (DTYPE_BYTES.get(self.dtype) or QUANTIZED_BYTES[self.dtype])


@dataclass(frozen=True, kw_only=True)
class Index:
    """Index of a safetensors file: arrays by key, in the order of their bytes, metadata, and header."""

    arrays: Mapping[str, StoredArray]
    metadata: Mapping[str, str]
    header: bytes


def read_index(path: Path, *, quantized: bool = False) -> Index:
    """Index a safetensors file.

    Args:
        path: the file.
        quantized: also index the types of ``QUANTIZED_BYTES``, whose numbers need scales.

    Raises:
        CorruptError: the file is missing, or breaks the format.
        UnsupportedError: a type that DynMo does not read, such as float8.
    """
    try:
        with open_file(path) as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(0)
            length = handle.read(8)
            text_bytes = int.from_bytes(length, "little")
            if len(length) < 8:
                raise CorruptError(f"{path}: not a safetensors file: has {size} bytes, and a header has at least 8")
            if length.isascii() and length.decode().isprintable():
                raise CorruptError(
                    f"{path}: not a safetensors file: begins with the text {length.decode()!r}, as a page or a pickle "
                    "in its place; download it again"
                )
            if 8 + text_bytes > size or text_bytes > HEADER_LIMIT_BYTES:
                raise CorruptError(f"{path}: a header of {text_bytes} bytes does not fit into a file of {size} bytes")
            text = handle.read(text_bytes)
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = parse_json(text, HEADER_LIMIT_BYTES)
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ must have string values only")
        arrays = {key: _array(path, key, value, 8 + text_bytes, quantized) for key, value in header.items()}
        ordered = _contiguous(arrays, 8 + text_bytes, size)
    except ValueError as error:
        raise CorruptError(f"{path}: not a safetensors file: {error}") from error
    return Index(arrays=ordered, metadata=metadata, header=length + text)


def _array(path: Path, key: str, value: object, data_begin: int, quantized: bool) -> StoredArray:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{short_name(key)} must have exactly dtype, shape and data_offsets")
    dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    is_known = isinstance(dtype, str) and (dtype in DTYPE_BYTES or (quantized and dtype in QUANTIZED_BYTES))
    if not is_known and dtype in OTHER_TYPES:
        raise UnsupportedError(
            f"{path}: {short_name(key)} has the type {dtype}; supported are {', '.join(DTYPE_BYTES)}. Convert it to "
            "one of these with the program that wrote it"
        )
    if not is_known:
        raise ValueError(f"{short_name(key)} has the type {short_repr(dtype)}; must be one of {', '.join(DTYPE_BYTES)}")
    for numbers in (shape, span):
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{short_name(key)} has {short_repr(numbers)} in place of non-negative integers")
    array = StoredArray(path=path, key=key, dtype=dtype, shape=tuple(shape), offset=data_begin + sum(span[:1]))
    if len(span) != 2 or span[1] - span[0] != array.num_bytes:
        raise ValueError(
            f"{short_name(key)} has the offsets {short_repr(span)}; {dtype} {short_repr(shape)} takes "
            f"{array.num_bytes} bytes"
        )
    return array


def _contiguous(arrays: Mapping[str, StoredArray], begin: int, end: int) -> dict[str, StoredArray]:
    # By size too: an array without elements begins where the next one begins.
    ordered = dict(sorted(arrays.items(), key=lambda item: (item[1].offset, item[1].num_bytes)))
    for key, array in ordered.items():
        if array.offset != begin:
            raise ValueError(f"{short_name(key)} begins at byte {array.offset}, expected {begin}: a gap or an overlap")
        begin += array.num_bytes
    if begin != end:
        raise ValueError(f"the arrays end at byte {begin}, the file at byte {end}")
    return ordered


def encode_header(
    arrays: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The header of a file with ``arrays`` in this order without gaps, padded with spaces to a page.

    Args:
        arrays: key, dtype and shape of each array; wide types must come before narrow ones, to keep all aligned.
        metadata: strings for ``__metadata__``.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for key, dtype, shape in arrays:
        end = begin + math.prod(shape) * DTYPE_BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text
