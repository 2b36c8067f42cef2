"""Writes files that ``torch.load`` opens, without torch: a pickle of plain values, and storages.

The container is a zip archive with nothing compressed. Its layout is computed first, the storages are copied to their
places, and the headers, which hold the storages' checksums, follow.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..copyplan import OutputTensor
from ..faults import UnsupportedError
from .pickles import STORAGE_DTYPES, Name

STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
ALIGN_BYTES = 64
ZIP32_LIMIT = 0xFFFFFFFF
_LOCAL_BYTES = 30
_DOS_DATE = (1 << 5) | 1  # 1 January 1980, the first that a zip archive can say


@dataclass(frozen=True)
class NewTensor:
    """A tensor in the tree to be pickled; ``storage`` is the number of its storage in the file."""

    storage: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class NewObject:
    """An object in the tree to be pickled: its type's name and its attributes."""

    type: Name
    attributes: Mapping[str, Any]


def dump_pickle(value: Any) -> bytes:
    """``value`` as a pickle of protocol 2: plain values, :class:`NewTensor` and :class:`NewObject`."""
    return b"\x80\x02" + _encode(value) + b"."


def _encode(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            payload = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(payload)]) + payload
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case dict():
            return b"}(" + b"".join(_encode(k) + _encode(v) for k, v in value.items()) + b"u"
        case list():
            return b"](" + b"".join(map(_encode, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(_encode, value)) + b"t"
        case NewObject():
            return _global(value.type) + b")\x81" + _encode(dict(value.attributes)) + b"b"
        case NewTensor():
            return _encode_tensor(value)
    raise TypeError(f"a {type(value).__name__} cannot be pickled here")


def _global(name: Name) -> bytes:
    return b"c" + name.module.encode() + b"\n" + name.name.encode() + b"\n"


def _encode_tensor(tensor: NewTensor) -> bytes:
    count = 1
    strides: list[int] = []
    for size in reversed(tensor.shape):
        strides.insert(0, count)
        count *= size
    kind = _global(Name("torch", STORAGE_NAMES[tensor.dtype]))
    identifier = (
        b"(" + _encode("storage") + kind + _encode(str(tensor.storage)) + _encode("cpu") + _encode(count) + b"t"
    )
    hooks = _global(Name("collections", "OrderedDict")) + b")R"
    arguments = b"(" + identifier + b"Q" + _encode(0) + _encode(tensor.shape) + _encode(tuple(strides))
    return _global(Name("torch._utils", "_rebuild_tensor_v2")) + arguments + b"\x89" + hooks + b"tR"


@dataclass(frozen=True)
class _Entry:
    """A member of the archive: its name, size, and where its header begins; ``payload`` is None for a storage."""

    name: str
    num_bytes: int
    header_offset: int
    extra_bytes: int
    payload: bytes | None

    @property
    def data_offset(self) -> int:
        return self.header_offset + _LOCAL_BYTES + len(self.name.encode()) + self.extra_bytes


@dataclass(frozen=True, kw_only=True)
class TorchOutputFile:
    """A file to be opened by ``torch.load``: ``tree`` refers to ``tensors`` by their position."""

    name: str
    tensors: tuple[OutputTensor, ...]
    tree: Any

    @cached_property
    def _entries(self) -> list[_Entry]:
        pickled = dump_pickle(self.tree)
        members: list[tuple[str, int, bytes | None]] = [
            ("model_optim_rng/data.pkl", len(pickled), pickled),
            ("model_optim_rng/byteorder", 6, b"little"),
            *((tensor.key, tensor.num_bytes, None) for tensor in self.tensors),
        ]
        members.append(("model_optim_rng/version", 2, b"3\n"))
        entries, at = [], 0
        for name, size, payload in members:
            if size >= ZIP32_LIMIT:
                raise UnsupportedError(f"{name}: {size} bytes in one storage; more tensor ranks make them smaller")
            begin = at + _LOCAL_BYTES + len(name.encode()) + 4
            extra = 4 + (-begin % ALIGN_BYTES)
            entries.append(_Entry(name, size, at, extra, payload))
            at = entries[-1].data_offset + size
        return entries

    @property
    def offsets(self) -> list[int]:
        """Where each tensor's bytes begin."""
        return [entry.data_offset for entry in self._entries if entry.payload is None]

    @cached_property
    def num_bytes(self) -> int:
        """Size of the whole file; the headers' sizes do not depend on checksums."""
        at, payload = self.other_bytes([0] * len(self.tensors))[-1]
        return at + len(payload)

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """Everything but the tensors' bytes, by offset, given the tensors' checksums."""
        left = iter(checksums)
        result, directory = [], b""
        for entry in self._entries:
            crc = next(left) if entry.payload is None else zlib.crc32(entry.payload)
            fields = struct.pack("<HHHHIII", 0, 0, 0, _DOS_DATE, crc, entry.num_bytes, entry.num_bytes)
            name = entry.name.encode()
            padding = struct.pack("<HH", 0x4246, entry.extra_bytes - 4) + b"Z" * (entry.extra_bytes - 4)
            local = b"PK\3\4" + b"\0\0" + fields + struct.pack("<HH", len(name), entry.extra_bytes) + name + padding
            result.append((entry.header_offset, local))
            if entry.payload is not None:
                result.append((entry.data_offset, entry.payload))
            is_far = entry.header_offset >= ZIP32_LIMIT
            extra = struct.pack("<HHQ", 1, 8, entry.header_offset) if is_far else b""
            offset = ZIP32_LIMIT if is_far else entry.header_offset
            tail = struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, offset)
            directory += b"PK\1\2" + struct.pack("<HH", 45, 45) + fields + tail + name + extra
        last = self._entries[-1]
        at = last.data_offset + last.num_bytes
        return [*result, (at, directory + _end_records(len(self._entries), len(directory), at))]


def _end_records(count: int, size: int, offset: int) -> bytes:
    """The end of a zip archive, with its 64-bit form before it."""
    wide = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, offset + size, 1)
    few = min(count, 0xFFFF)
    narrow = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, few, few, size, min(offset, ZIP32_LIMIT), 0)
    return wide + locator + narrow
