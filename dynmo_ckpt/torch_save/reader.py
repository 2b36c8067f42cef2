"""Reads files of ``torch.save`` without torch: the pickled tree, and the place of each tensor.

There are two containers: the zip archive of torch 1.6 and later, and the older stream of pickles followed by storages.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .._common.document import short_repr
from ..io.errors import CorruptError, short_name
from ..io.files import open_file
from ..io.safetensors import DTYPE_BYTES, StoredArray
from ..tensors.views import Piece, Tensor, View
from .pickles import MAX_PICKLE_BYTES, StorageRef, TensorRef, load_pickle, load_stream

STREAM_MAGIC = 0x1950A86A20F9469CFC6C
STREAM_PROTOCOL = 1001
_SCALARS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i"}


@dataclass(frozen=True, kw_only=True)
class TorchFile:
    """A torch file: ``tree`` is the saved object with a :class:`TensorRef` per tensor; ``storages`` are raw bytes."""

    path: Path
    tree: Any
    storages: Mapping[str, StoredArray]

    def tensor(self, ref: TensorRef, name: str) -> Tensor:
        """A tensor of the tree, lazily.

        Args:
            ref: the tensor, as the pickle describes it.
            name: of the tensor, for messages.

        Raises:
            CorruptError: invalid shape or strides, or a tensor that exceeds its storage.
        """
        array = self._typed(ref.storage)
        if len(ref.shape) != len(ref.strides) or min((*ref.shape, *ref.strides, ref.start), default=0) < 0:
            raise CorruptError(
                f"{self.path}: {short_name(name)}: invalid shape {short_repr(ref.shape)} or strides "
                f"{short_repr(ref.strides)}"
            )
        # The pickle is untrusted: its strides must not reach beyond the storage into other bytes of the file.
        last = ref.start + sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
        if 0 not in ref.shape and last >= array.shape[0]:
            raise CorruptError(
                f"{self.path}: {short_name(name)}: reaches element {last} of a storage of {array.shape[0]}"
            )
        view = View(array, ref.start, ref.shape, ref.strides)
        return Tensor(array.dtype, ref.shape, (Piece((0,) * len(ref.shape), view),))

    def number(self, value: Any) -> int | float | None:
        """``value`` if it is a number, or the element of a tensor with one element; None for anything else.

        torch stores Adam's ``step`` as a float32 tensor without dimensions.

        Raises:
            CorruptError: the tensor exceeds its storage.
        """
        if isinstance(value, int | float):
            return value
        if not isinstance(value, TensorRef) or math.prod(value.shape) != 1 or value.storage.dtype not in _SCALARS:
            return None
        self.tensor(value, "a number")  # checks that it lies within its storage
        kind = _SCALARS[value.storage.dtype]
        width = struct.calcsize(kind)
        with open_file(self.path) as handle:
            handle.seek(self.storages[value.storage.key].offset + value.start * width)
            found: int | float = struct.unpack(kind, handle.read(width))[0]
        return found

    def _typed(self, ref: StorageRef) -> StoredArray:
        stored = self.storages.get(ref.key)
        size = ref.num_elements * DTYPE_BYTES[ref.dtype]
        if stored is None or stored.num_bytes < size:
            found = "nothing" if stored is None else f"{stored.num_bytes} bytes"
            raise CorruptError(f"{self.path}: the storage {short_name(ref.key)} needs {size} bytes, found {found}")
        return StoredArray(
            path=self.path,
            key=stored.key,
            dtype=ref.dtype,
            shape=(ref.num_elements,),
            offset=stored.offset,
            # The recorded CRC-32 covers the complete entry, so it does not apply to a part of it.
            crc32=stored.crc32 if stored.num_bytes == size else None,
        )


class _FileRange(io.RawIOBase):
    """A range of a file as a file; zipfile searches the end of the archive from the end of its file."""

    def __init__(self, handle: BinaryIO, begin: int, num_bytes: int) -> None:
        super().__init__()
        self.handle, self.begin, self.num_bytes, self.at = handle, begin, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As ``io.IOBase.seek``: to byte ``offset`` from the begin (``whence`` 0), here (1) or the end (2)."""
        self.at = max(0, offset + (0, self.at, self.num_bytes)[whence])
        return self.at

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes; all that are left where it is negative."""
        left = max(0, self.num_bytes - self.at)
        self.handle.seek(self.begin + self.at)
        found = self.handle.read(left if size < 0 else min(size, left))
        self.at += len(found)
        return found


def open_torch(path: Path, begin: int = 0, num_bytes: int | None = None) -> TorchFile:
    """Read the tree of a torch file and index its storages.

    Args:
        path: the file.
        begin: byte offset of what ``torch.save`` wrote.
        num_bytes: its length in bytes; None: to the end of the file.

    Raises:
        UnsafePickleError: the file refers to more than plain data.
        CorruptError: it is missing, broken, or not a torch file.
    """
    try:
        with open_file(path) as handle:
            size = handle.seek(0, io.SEEK_END)
            if num_bytes is not None and not 0 <= begin <= begin + num_bytes <= size:
                raise CorruptError(f"{path}: has {size} bytes; {num_bytes} from byte {begin} on are expected")
            part: Any = handle if num_bytes is None else _FileRange(handle, begin, num_bytes)
            part.seek(0)
            is_zip = part.read(4) == b"PK\3\4"
            part.seek(0)
            if num_bytes is not None and not is_zip:
                raise CorruptError(f"{path}: byte {begin} is not the begin of a file of torch.save")
            tree, storages = _read_zip(path, part, begin) if is_zip else _read_stream(path, handle)
    except FileNotFoundError as error:
        raise CorruptError(f"{path}: is missing") from error
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, ValueError, TypeError) as error:
        raise CorruptError(f"{path}: not a file of torch.save: {error}") from error
    return TorchFile(path=path, tree=tree, storages=storages)


def _read_zip(path: Path, handle: BinaryIO, begin: int) -> tuple[Any, dict[str, StoredArray]]:
    with zipfile.ZipFile(handle) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        pickled = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickled) != 1:
            raise CorruptError(f"{path}: has {len(pickled)} entries data.pkl, expected one")
        for name, info in entries.items():
            # Tensors are read at their place in the file, and no entry can expand to more memory than its bytes.
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise CorruptError(
                    f"{path}: the entry {short_name(name)} is compressed or encrypted; torch writes it uncompressed"
                )
            # zipfile reads the number of bytes in the first of both, without a look at the second.
            if info.compress_size != info.file_size:
                raise CorruptError(
                    f"{path}: the entry {short_name(name)} has {info.compress_size:,} and {info.file_size:,} bytes;"
                    " both must be equal without compression"
                )
        if entries[pickled[0]].file_size > MAX_PICKLE_BYTES:
            raise CorruptError(
                f"{path}: data.pkl has {entries[pickled[0]].file_size:,} bytes; the limit is {MAX_PICKLE_BYTES:,}"
            )
        payload = archive.read(pickled[0])
    prefix = pickled[0].removesuffix("data.pkl") + "data/"
    storages = {
        name.removeprefix(prefix): StoredArray(
            path=path,
            key=name,
            dtype="U8",
            shape=(info.file_size,),
            offset=begin + _data_offset(path, handle, info),
            crc32=info.CRC,
        )
        for name, info in entries.items()
        if name.startswith(prefix)
    }
    return load_pickle(payload, str(path)), storages


def _data_offset(path: Path, handle: BinaryIO, info: zipfile.ZipInfo) -> int:
    handle.seek(info.header_offset)
    header = handle.read(30)
    if len(header) < 30 or header[:4] != b"PK\3\4":
        raise CorruptError(f"{path}: the entry {short_name(info.filename)} has no header at byte {info.header_offset}")
    # The local header has its own extra field, with which torch aligns storages. Its length differs from that in the
    # central directory, so only the local header gives the begin of the data.
    begin = info.header_offset + 30 + int.from_bytes(header[26:28], "little")
    begin += int.from_bytes(header[28:30], "little")
    if begin + info.file_size > handle.seek(0, io.SEEK_END):
        raise CorruptError(f"{path}: the entry {short_name(info.filename)} exceeds the file")
    return begin


def _read_stream(path: Path, handle: BinaryIO) -> tuple[Any, dict[str, StoredArray]]:
    """The container before torch 1.6: pickles of magic, protocol, system, tree, keys; then each storage."""
    source = str(path)
    magic, protocol, system = (load_stream(handle, source)[0] for _ in range(3))
    if magic != STREAM_MAGIC or protocol != STREAM_PROTOCOL or not isinstance(system, dict):
        raise CorruptError(f"{path}: neither a zip archive nor torch's container before 1.6")
    if system.get("little_endian") is not True:
        raise CorruptError(f"{path}: was written on a big-endian machine; only little-endian files are supported")
    tree, refs = load_stream(handle, source)
    keys = load_stream(handle, source)[0]
    at = handle.seek(0, io.SEEK_CUR)
    size = handle.seek(0, io.SEEK_END)
    storages = {}
    for key in keys:
        # Not of a list: lists that share lists have a text of exponential length.
        ref = refs.get(str(key)) if isinstance(key, str | int) else None
        if ref is None:
            raise CorruptError(f"{path}: the storage {short_name(key)} belongs to no tensor")
        handle.seek(at)
        count = int.from_bytes(handle.read(8), "little", signed=True)
        num_bytes = ref.num_elements * DTYPE_BYTES[ref.dtype]
        if count != ref.num_elements or at + 8 + num_bytes > size:
            raise CorruptError(
                f"{path}: the storage {short_name(key)} has {count} elements, expected {ref.num_elements}"
            )
        storages[ref.key] = StoredArray(path=path, key=ref.key, dtype="U8", shape=(num_bytes,), offset=at + 8)
        at += 8 + num_bytes
    return tree, storages
