"""Plans files that ``torch.load`` opens, without torch: a pickle of plain values, and storages.

The container is a zip archive without compression. Its layout is computed first; then the storages are copied, and the
headers, which have the checksums of the storages, are written last::

    header | data.pkl | header, padding | data/0 | header, padding | data/1 | ... | version | central directory | end
                                         ^ a multiple of 64 bytes
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
from ..tensors.copy_plan import OutputTensor
from .pickles import STORAGE_DTYPES, GlobalName
from .reader import open_torch

STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
# As torch.save since 1.6, so that a memory-mapped storage is aligned for vector instructions.
ALIGN_BYTES = 64
# torch names the folder in the archive after the file; torch.load accepts any name.
STEM = "model_optim_rng"
ZIP32_LIMIT = _MARK = 0xFFFFFFFF
_LOCAL_BYTES = 30
_WIDE_BYTES = 20  # an extra field with two 64-bit numbers
_DOS_DATE = (1 << 5) | 1  # 1 January 1980, the earliest date of the zip format


@dataclass(frozen=True)
class NewTensor:
    """A tensor in the tree to pickle; ``storage`` is the number or the name of its storage in the file."""

    storage: int | str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class ConstantStorages:
    """Storages of a file whose bytes are known in advance, by name."""

    payloads: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], payload: bytes) -> NewTensor:
        """Add a storage of known bytes.

        Args:
            name: unique name of the storage in the file.
            dtype: as in safetensors.
            shape: of the tensor.
            payload: its bytes in row-major order, little-endian.

        Returns:
            A tensor for the tree.
        """
        self.payloads[name] = payload
        return NewTensor(name, dtype, shape)


@dataclass(frozen=True)
class NewObject:
    """An object in the tree to pickle: its type, and its attributes or the argument of ``__setstate__``."""

    type: GlobalName
    attributes: Mapping[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class NewCall:
    """An object in the tree that is pickled as a call, as enums and ``torch.Size`` are."""

    function: GlobalName
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class NewDict:
    """A dictionary in the tree to pickle whose keys are objects."""

    pairs: tuple[tuple[Any, Any], ...]


def dump_pickle(value: Any) -> bytes:
    """A pickle of protocol 2 of plain values, globals, and the classes ``New...`` of this module.

    Raises:
        TypeError: a value of another type.
    """
    return b"\x80\x02" + _encode(value) + b"."


def _encode(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            # LONG1 for any size: up to 255 bytes, and one opcode instead of three.
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
        case GlobalName():
            return _global(value)
        case NewTensor():
            return _encode_tensor(value)
    raise TypeError(f"cannot pickle a {type(value).__name__}")


def _global(name: GlobalName) -> bytes:
    return b"c" + name.module.encode() + b"\n" + name.name.encode() + b"\n"


def _encode_tensor(tensor: NewTensor) -> bytes:
    count = 1
    strides: list[int] = []
    for size in reversed(tensor.shape):
        strides.insert(0, count)
        count *= size
    kind = _global(GlobalName("torch", STORAGE_NAMES[tensor.dtype]))
    identifier = (
        b"(" + _encode("storage") + kind + _encode(str(tensor.storage)) + _encode("cpu") + _encode(count) + b"t"
    )
    # _rebuild_tensor_v2 takes storage, offset, shape, strides, requires_grad (False), and backward hooks (none).
    hooks = _global(GlobalName("collections", "OrderedDict")) + b")R"
    arguments = b"(" + identifier + b"Q" + _encode(0) + _encode(tensor.shape) + _encode(tuple(strides))
    return _global(GlobalName("torch._utils", "_rebuild_tensor_v2")) + arguments + b"\x89" + hooks + b"tR"


@dataclass(frozen=True)
class _Entry:
    """A member of the archive: name, size and header offset in bytes; ``payload`` is None for a storage."""

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
    """A file for ``torch.load``; ``tree`` refers to storages by number, and to constants by name.

    Attributes:
        name: path relative to the new directory.
        tensors: the tensors to copy.
        tree: what ``torch.load`` returns.
        lengths: number of consecutive ``tensors`` that are concatenated in each storage; empty: one each.
        constants: storages whose bytes are known in advance, by name.
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
            *((f"{STEM}/data/{n}", sum(t.num_bytes for t in parts), None) for n, parts in enumerate(self._storages)),
            *((f"{STEM}/data/{name}", len(payload), payload) for name, payload in self.constants.items()),
        ]
        # The version of torch's zip format; torch.load refuses an archive without it.
        members.append((f"{STEM}/version", 2, b"3\n"))
        entries, at = [], 0
        for name, size, payload in members:
            # An extra field pads the header, so that each storage begins at a multiple of 64 bytes, as in files of
            # torch.
            fixed = 4 + (_WIDE_BYTES if size >= ZIP32_LIMIT else 0)
            begin = at + _LOCAL_BYTES + len(name.encode()) + fixed
            extra = fixed + (-begin % ALIGN_BYTES)
            entries.append(_Entry(name, size, at, extra, payload))
            at = entries[-1].data_offset + size
        return entries

    @property
    def offsets(self) -> list[int]:
        """See ``Writable``."""
        begins = [entry.data_offset for entry in self._entries if entry.payload is None]
        return [
            offset
            for begin, parts in zip(begins, self._storages, strict=True)
            for offset in accumulate((tensor.num_bytes for tensor in parts[:-1]), initial=begin)
        ]

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """See ``Writable``; the arrays are storages."""
        stored = [entry for entry in self._entries if entry.name.startswith(f"{STEM}/data/")]
        return {entry.name: (entry.data_offset, entry.num_bytes) for entry in stored}

    @cached_property
    def num_bytes(self) -> int:
        """See ``Writable``; the sizes of the headers do not depend on checksums."""
        at, payload = self.other_bytes([0] * len(self.tensors))[-1]
        return at + len(payload)

    def read_index(self, path: Path) -> dict[str, tuple[int, int]]:
        """See ``Writable``."""
        return {array.key: (array.offset, array.num_bytes) for array in open_torch(path).storages.values()}

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """See ``Writable``."""
        sums = iter(checksums)
        storage_sums = iter([_combined([(next(sums), t.num_bytes) for t in parts]) for parts in self._storages])
        result, directory = [], b""
        for entry in self._entries:
            crc = next(storage_sums) if entry.payload is None else zlib.crc32(entry.payload)
            # From the limit on, both sizes and then the offset are 64-bit numbers in an extra field.
            is_wide = entry.num_bytes >= ZIP32_LIMIT
            size = _MARK if is_wide else entry.num_bytes
            sizes = struct.pack("<QQ", entry.num_bytes, entry.num_bytes) if is_wide else b""
            fields = struct.pack("<HHHHIII", 0, 0, 0, _DOS_DATE, crc, size, size)
            name = entry.name.encode()
            wide = struct.pack("<HH", 1, len(sizes)) + sizes if is_wide else b""
            # 0x4246, "FB", is the id that torch gives its padding field.
            unused = entry.extra_bytes - len(wide) - 4
            padding = wide + struct.pack("<HH", 0x4246, unused) + b"Z" * unused
            version = b"\x2d\0" if is_wide else b"\0\0"
            local = b"PK\3\4" + version + fields + struct.pack("<HH", len(name), entry.extra_bytes) + name + padding
            result.append((entry.header_offset, local))
            if entry.payload is not None:
                result.append((entry.data_offset, entry.payload))
            is_far = entry.header_offset >= ZIP32_LIMIT
            far = struct.pack("<Q", entry.header_offset) if is_far else b""
            extra = struct.pack("<HH", 1, len(sizes + far)) + sizes + far if is_wide or is_far else b""
            offset = _MARK if is_far else entry.header_offset
            tail = struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, offset)
            directory += b"PK\1\2" + struct.pack("<HH", 45, 45) + fields + tail + name + extra
        last = self._entries[-1]
        at = last.data_offset + last.num_bytes
        return [*result, (at, directory + _end_records(len(self._entries), len(directory), at))]


@dataclass(frozen=True, kw_only=True)
class ConcatenatedTorchFiles:
    """Concatenated files of ``torch.save``, as in torch's distributed checkpoints.

    ``.metadata`` has the begin and the number of bytes of each part.
    """

    name: str
    parts: tuple[TorchSaveFile, ...]

    @cached_property
    def begins(self) -> list[int]:
        """Byte offset of each part."""
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
        """See ``Writable``; the begin of the part makes its keys unique."""
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
        result, remaining = [], list(checksums)
        for begin, part in zip(self.begins, self.parts, strict=True):
            own, remaining = remaining[: len(part.tensors)], remaining[len(part.tensors) :]
            result += [(begin + at, payload) for at, payload in part.other_bytes(own)]
        return result


def _combined(parts: Sequence[tuple[int, int]]) -> int:
    """CRC-32 of concatenated bytes, from the CRC-32 and length of each part."""
    total = 0
    for checksum, num_bytes in parts:
        total = combine(total, checksum, num_bytes)
    return total


def _end_records(count: int, size: int, offset: int) -> bytes:
    """The end of central directory records of a zip archive, in 64-bit and 32-bit form."""
    wide = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, offset + size, 1)
    few = min(count, 0xFFFF)
    narrow = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, few, few, size, min(offset, _MARK), 0)
    return wide + locator + narrow
