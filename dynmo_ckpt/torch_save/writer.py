"""Writes files that ``torch.load`` opens, without torch: a pickle of plain values, and storages.

The container is a zip archive with nothing compressed. Its layout is computed first, the storages are copied to their
places, and the headers, which hold the storages' checksums, follow.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from .._common.crc32 import combine
from ..errors import UnsupportedError
from ..tensors.copy_plan import OutputTensor
from .pickles import STORAGE_DTYPES, Name
from .reader import open_torch

STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
ALIGN_BYTES = 64
STEM = "model_optim_rng"
ZIP32_LIMIT = 0xFFFFFFFF
_LOCAL_BYTES = 30
_DOS_DATE = (1 << 5) | 1  # 1 January 1980, the first that a zip archive can say


@dataclass(frozen=True)
class NewTensor:
    """A tensor in the tree to be pickled; ``storage`` is the number or the name of its storage in the file."""

    storage: int | str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Constants:
    """Storages of a file whose bytes are known beforehand, by name."""

    payloads: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], payload: bytes) -> NewTensor:
        """A tensor of the tree with these bytes; ``name`` is that of no other storage."""
        self.payloads[name] = payload
        return NewTensor(name, dtype, shape)


@dataclass(frozen=True)
class NewObject:
    """An object in the tree to be pickled: its type's name, and its attributes or what ``__setstate__`` takes."""

    type: Name
    attributes: Mapping[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class NewCall:
    """An object in the tree to be pickled as the result of a call, as pickle stores enumerations and ``torch.Size``."""

    function: Name
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class NewDict:
    """A dictionary in the tree to be pickled whose keys are objects."""

    pairs: tuple[tuple[Any, Any], ...]


def dump_pickle(value: Any) -> bytes:
    """``value`` as a pickle of protocol 2: plain values, names, and the classes ``New...`` of this module."""
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
    return _encode_object(value)


def _encode_object(value: Any) -> bytes:
    match value:
        case NewObject():
            state = value.attributes if isinstance(value.attributes, tuple) else dict(value.attributes)
            return _global(value.type) + b")\x81" + _encode(state) + b"b"
        case NewDict():
            return b"}(" + b"".join(_encode(k) + _encode(v) for k, v in value.pairs) + b"u"
        case NewCall():
            return _global(value.function) + _encode(value.arguments) + b"R"
        case Name():
            return _global(value)
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
class TorchSaveFile:
    """A file to be opened by ``torch.load``: ``tree`` refers to storages by their position, or by name to constants.

    Attributes:
        name: path inside the new directory.
        tensors: what is copied.
        tree: what ``torch.load`` returns.
        lengths: how many of ``tensors``, one behind the other, make each storage; empty: one each.
        constants: storages whose bytes are known, by name.
    """

    name: str
    tensors: tuple[OutputTensor, ...]
    tree: Any
    lengths: tuple[int, ...] = ()
    constants: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def _storages(self) -> list[tuple[OutputTensor, ...]]:
        """The tensors of each storage."""
        ends = list(accumulate(self.lengths or (1,) * len(self.tensors)))
        return [self.tensors[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def _entries(self) -> list[_Entry]:
        pickled = dump_pickle(self.tree)
        members: list[tuple[str, int, bytes | None]] = [
            (f"{STEM}/data.pkl", len(pickled), pickled),
            (f"{STEM}/byteorder", 6, b"little"),
            *((f"{STEM}/data/{n}", sum(t.num_bytes for t in held), None) for n, held in enumerate(self._storages)),
            *((f"{STEM}/data/{name}", len(payload), payload) for name, payload in self.constants.items()),
        ]
        members.append((f"{STEM}/version", 2, b"3\n"))
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
        begins = [entry.data_offset for entry in self._entries if entry.payload is None]
        return [
            offset
            for begin, held in zip(begins, self._storages, strict=True)
            for offset in accumulate((tensor.num_bytes for tensor in held[:-1]), initial=begin)
        ]

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """Offset and number of bytes of each storage, by key."""
        stored = [entry for entry in self._entries if entry.name.startswith(f"{STEM}/data/")]
        return {entry.name: (entry.data_offset, entry.num_bytes) for entry in stored}

    @cached_property
    def num_bytes(self) -> int:
        """Size of the whole file; the headers' sizes do not depend on checksums."""
        at, payload = self.other_bytes([0] * len(self.tensors))[-1]
        return at + len(payload)

    def read_index(self, path: Path) -> dict[str, tuple[int, int]]:
        """See ``Writable``."""
        return {array.key: (array.offset, array.num_bytes) for array in open_torch(path).storages.values()}

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """See ``Writable``."""
        sums = iter(checksums)
        joined = [_joined([(next(sums), tensor.num_bytes) for tensor in held]) for held in self._storages]
        left = iter(joined)
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


@dataclass(frozen=True, kw_only=True)
class ConcatenatedTorchFiles:
    """Files of ``torch.save`` one behind the other, as torch's distributed checkpoints have them.

    ``begins`` and ``num_bytes`` of each part are where its metadata says that a tensor lies.
    """

    name: str
    parts: tuple[TorchSaveFile, ...]

    @cached_property
    def begins(self) -> list[int]:
        """Where each part begins."""
        return list(accumulate((part.num_bytes for part in self.parts[:-1]), initial=0)) if self.parts else []

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """See ``Writable``."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def offsets(self) -> list[int]:
        """See ``Writable``."""
        return [begin + at for begin, part in zip(self.begins, self.parts, strict=True) for at in part.offsets]

    @property
    def num_bytes(self) -> int:
        """See ``Writable``."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """See ``Writable``; the offset of a part distinguishes its keys from those of other parts."""
        return {
            f"{begin}:{key}": (begin + at, size)
            for begin, part in zip(self.begins, self.parts, strict=True)
            for key, (at, size) in part.index.items()
        }

    def read_index(self, path: Path) -> dict[str, tuple[int, int]]:
        """See ``Writable``."""
        return {
            f"{begin}:{array.key}": (array.offset, array.num_bytes)
            for begin, part in zip(self.begins, self.parts, strict=True)
            for array in open_torch(path, begin, part.num_bytes).storages.values()
        }

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """See ``Writable``."""
        result, left = [], list(checksums)
        for begin, part in zip(self.begins, self.parts, strict=True):
            own, left = left[: len(part.tensors)], left[len(part.tensors) :]
            result += [(begin + at, payload) for at, payload in part.other_bytes(own)]
        return result


def _joined(parts: Sequence[tuple[int, int]]) -> int:
    """The checksum of concatenated strings, from their checksums and lengths."""
    total = 0
    for checksum, num_bytes in parts:
        total = combine(total, checksum, num_bytes)
    return total


def _end_records(count: int, size: int, offset: int) -> bytes:
    """The end of a zip archive, with its 64-bit form before it."""
    wide = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, offset + size, 1)
    few = min(count, 0xFFFF)
    narrow = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, few, few, size, min(offset, ZIP32_LIMIT), 0)
    return wide + locator + narrow
