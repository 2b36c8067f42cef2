"""Reads the files of ``torch.save`` (since torch 1.6) without torch: the pickled tree, and where each tensor lies."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from ..faults import CorruptError
from ..views import Piece, Tensor, View
from .pickles import LIMIT_BYTES, StorageRef, TensorRef, load_pickle
from .safetensors import DTYPE_BYTES, StoredArray


class TorchFile:
    """A torch file: ``tree`` is what was saved, with a :class:`TensorRef` for every tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._storages: dict[str, StoredArray] = {}
        try:
            with zipfile.ZipFile(path) as archive, open(path, "rb") as handle:
                entries = {info.filename: info for info in archive.infolist()}
                pickled = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
                if len(pickled) != 1:
                    raise CorruptError(f"{path}: has {len(pickled)} entries data.pkl, one is expected")
                self._root = pickled[0].removesuffix("data.pkl")
                self._check_entries(entries)
                if entries[pickled[0]].file_size > LIMIT_BYTES:
                    raise CorruptError(f"{path}: data.pkl has {entries[pickled[0]].file_size} bytes")
                payload = archive.read(pickled[0])
                self._offsets = {n: self._data_offset(handle, info) for n, info in entries.items()}
                self._entries = entries
        except FileNotFoundError as error:
            raise CorruptError(f"{path}: is missing") from error
        except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, ValueError) as error:
            raise CorruptError(f"{path}: not a file of torch.save (since torch 1.6): {error}") from error
        self.tree: Any = load_pickle(payload, str(path))

    def _check_entries(self, entries: dict[str, zipfile.ZipInfo]) -> None:
        for name, info in entries.items():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise CorruptError(f"{self.path}: the entry {name} is compressed or encrypted; torch stores plainly")

    def _data_offset(self, handle: Any, info: zipfile.ZipInfo) -> int:
        handle.seek(info.header_offset)
        header = handle.read(30)
        if len(header) < 30 or header[:4] != b"PK\3\4":
            raise CorruptError(f"{self.path}: no header of the entry {info.filename} at byte {info.header_offset}")
        begin = info.header_offset + 30 + int.from_bytes(header[26:28], "little")
        begin += int.from_bytes(header[28:30], "little")
        if begin + info.file_size > self.path.stat().st_size:
            raise CorruptError(f"{self.path}: the entry {info.filename} ends beyond the file")
        return begin

    def tensor(self, ref: TensorRef, name: str) -> Tensor:
        """A tensor of the tree as a window on the file's bytes; raises ``CorruptError`` where it leaves its storage."""
        array = self._storage(ref.storage)
        if len(ref.shape) != len(ref.strides) or min((*ref.shape, *ref.strides, ref.start), default=0) < 0:
            raise CorruptError(f"{self.path}: {name}: shape {ref.shape} with strides {ref.strides}")
        last = ref.start + sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
        if 0 not in ref.shape and last >= array.shape[0]:
            raise CorruptError(f"{self.path}: {name}: reaches element {last} of a storage of {array.shape[0]}")
        view = View(array, ref.start, ref.shape, ref.strides)
        return Tensor(array.dtype, ref.shape, (Piece((0,) * len(ref.shape), view),))

    def storages(self) -> list[StoredArray]:
        """Every storage of the archive as bytes, with the checksum that the archive gives it."""
        prefix = f"{self._root}data/"
        return [
            StoredArray(
                path=self.path,
                key=name,
                dtype="U8",
                shape=(info.file_size,),
                offset=self._offsets[name],
                crc32=info.CRC,
            )
            for name, info in self._entries.items()
            if name.startswith(prefix)
        ]

    def _storage(self, ref: StorageRef) -> StoredArray:
        if ref.key not in self._storages:
            entry = self._entries.get(f"{self._root}data/{ref.key}")
            size = ref.num_elements * DTYPE_BYTES[ref.dtype]
            if entry is None or entry.file_size < size:
                found = "nothing" if entry is None else f"{entry.file_size} bytes"
                raise CorruptError(f"{self.path}: the storage {ref.key} needs {size} bytes, found {found}")
            crc32 = entry.CRC if entry.file_size == size else None
            self._storages[ref.key] = StoredArray(
                path=self.path,
                key=entry.filename,
                dtype=ref.dtype,
                shape=(ref.num_elements,),
                offset=self._offsets[entry.filename],
                crc32=crc32,
            )
        return self._storages[ref.key]
