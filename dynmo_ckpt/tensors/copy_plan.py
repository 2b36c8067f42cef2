"""The copy plan: which files a conversion writes, and where in them each tensor goes. Pure; ``execute`` runs it.

::

    ExportPlan
      files        Writable 1         Writable 2        ...       safetensors, torch.save, ...
                     |
                     +- tensors   OutputTensor  key, stored shape, cast, mask
                     |              +- content: Tensor of Views on stored arrays of the input (tensors/views)
                     +- offsets   where in the file the bytes of each tensor begin
                     +- other_bytes(checksums)   headers, and what depends on the tensors' checksums
      small_files  configuration, tokenizer: bytes by path
      finish       files that need the checksums of all others, such as a manifest

Offsets and sizes are known before the first byte is written. That permits ``--plan``, the check for free disk space,
and threads that write tensors in any order. How a tensor's checksum is verified depends on how it is copied:

* ``expected_crc32``: the output is a concatenation of stored arrays; the expected CRC-32 is combined from theirs.
* ``contiguous_source``: the output is one contiguous part of an array; its CRC-32 is a part of the array's.
* otherwise bytes are reordered, masked or cast; the checksum of the source is computed while it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from .._common.crc32 import combine
from ..io.computed import stored_inputs
from ..io.safetensors import DTYPE_BYTES, StoredArray, encode_header, read_index
from .views import Tensor, View, row_major


@dataclass(frozen=True, kw_only=True)
class OutputTensor:
    """One tensor to write.

    Attributes:
        key: its name in the file.
        shape: its stored shape.
        content: its elements in row-major order; it may have more dimensions than ``shape``.
        mask: elements are zero where the mask is false; has the shape of ``content``.
        cast: the type to write, as in safetensors; None keeps the type of ``content``.
    """

    key: str
    shape: tuple[int, ...]
    content: Tensor
    mask: Tensor | None = None
    cast: str | None = None

    @property
    def dtype(self) -> str:
        """The written type, as in safetensors."""
        return self.cast or self.content.dtype

    @property
    def num_bytes(self) -> int:
        """Number of bytes to write."""
        return math.prod(self.content.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """Size in bytes and CRC-32 of a written file, and the CRC-32 of each of its tensors by key."""

    num_bytes: int
    crc32: int
    tensors: Mapping[str, int]


class Writable(Protocol):
    """A file to write: tensors at known offsets, and other bytes that may depend on the tensors' checksums."""

    @property
    def name(self) -> str:
        """Path relative to the new directory."""

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """The tensors, in the order of their bytes."""

    @property
    def offsets(self) -> list[int]:
        """The byte offset of each tensor."""

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """Byte offset and number of bytes of each array that a reader finds, by key."""

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """All other bytes by offset, given the CRC-32 of each tensor; together with the tensors they leave no gap."""

    def read_index(self, path: Path) -> dict[str, tuple[int, int]]:
        """The index of the written file at ``path``, as a reader sees it; compared with ``index``."""


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """A checkpoint to write.

    Attributes:
        files: the files with tensors.
        small_files: other files by path.
        decisions: what ``conversion.json`` records and the command reports.
        finish: makes files that depend on the written ones; it takes the written files and the small ones by path.
    """

    files: tuple[Writable, ...]
    small_files: Mapping[str, bytes]
    decisions: Mapping[str, Any]
    finish: Callable[[Mapping[str, WrittenFile], Mapping[str, bytes]], Mapping[str, bytes]] | None = None


@dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """A safetensors file to write; ``tensors`` are in the order of their bytes."""

    name: str
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def header(self) -> bytes:
        """The bytes before the first tensor."""
        return encode_header([(t.key, t.dtype, t.shape) for t in self.tensors], self.metadata)

    @property
    def offsets(self) -> list[int]:
        """The byte offset of each tensor."""
        sizes = [tensor.num_bytes for tensor in self.tensors]
        return list(accumulate(sizes[:-1], initial=len(self.header))) if sizes else []

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """Byte offset and number of bytes of each tensor, by key."""
        return {t.key: (begin, t.num_bytes) for t, begin in zip(self.tensors, self.offsets, strict=True)}

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """The header, which does not depend on the checksums."""
        return [(0, self.header)]

    def read_index(self, path: Path) -> dict[str, tuple[int, int]]:
        """See ``Writable``."""
        return {key: (array.offset, array.num_bytes) for key, array in read_index(path).arrays.items()}


def safetensors_file(
    name: str, tensors: Iterable[OutputTensor], metadata: Mapping[str, str] | None = None
) -> SafetensorsFile:
    """A file of ``tensors``, wide types before narrow ones, so that each tensor is aligned."""
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    return SafetensorsFile(name=name, tensors=tuple(ordered), metadata=metadata or {})


def shard_by_size(tensors: Sequence[OutputTensor], limit_bytes: int) -> list[list[OutputTensor]]:
    """Group ``tensors`` into files of at most ``limit_bytes`` each; a larger tensor gets a separate file."""
    groups: list[list[OutputTensor]] = []
    filled = 0
    for tensor in tensors:
        size = tensor.num_bytes
        if not groups or filled + size > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return groups


def sources(tensors: Iterable[OutputTensor]) -> list[StoredArray]:
    """The stored arrays from which tensors are read, each once."""
    contents = [content for tensor in tensors for content in (tensor.content, tensor.mask) if content is not None]
    return list({piece.view.array: None for content in contents for piece in content.pieces})


def expected_crc32(tensor: OutputTensor) -> int | None:
    """The CRC-32 that the written bytes must have, where the tensor is a concatenation of complete stored arrays.

    None where bytes are reordered, cut, cast or masked, or an array has no recorded checksum.
    """
    content = tensor.content
    if tensor.mask is not None or tensor.cast is not None or not content.is_covered:
        return None
    strides = row_major(content.shape)
    # In the order of their bytes, because a CRC-32 of a concatenation depends on the order.
    pieces = sorted(
        (sum(b * s for b, s in zip(piece.begin, strides, strict=True)), index)
        for index, piece in enumerate(content.pieces)
    )
    total, at = 0, 0
    for begin, index in pieces:
        view = content.pieces[index].view
        if begin != at or view.array.crc32 is None or not _is_complete(view) or not _same_order(view, strides):
            return None
        total = combine(total, view.array.crc32, view.array.num_bytes)
        at += view.array.num_bytes // DTYPE_BYTES[content.dtype]
    return total


def sources_to_check(tensor: OutputTensor) -> list[StoredArray]:
    """The arrays of a tensor that have a recorded checksum, each once; of a computed array, its inputs."""
    stored = dict.fromkeys(each for array in sources([tensor]) for each in stored_inputs(array))
    return [array for array in stored if array.crc32 is not None]


def contiguous_source(tensor: OutputTensor) -> tuple[StoredArray, int] | None:
    """The array and byte offset of which the written bytes are a contiguous copy; None where there is none.

    The CRC-32 of the written bytes is then that of this part of the array.
    """
    content = tensor.content
    if tensor.mask is not None or tensor.cast is not None or len(content.pieces) != 1 or not content.is_covered:
        return None
    view = content.pieces[0].view
    if view.array.crc32 is None or not _same_order(view, row_major(content.shape)):
        return None
    return view.array, view.start * DTYPE_BYTES[content.dtype]


def _is_complete(view: View) -> bool:
    elements = view.array.num_bytes // DTYPE_BYTES[view.array.dtype]
    count = 1
    for size in view.shape:
        count *= size
    return view.start == 0 and count == elements


def _same_order(view: View, strides: tuple[int, ...]) -> bool:
    """Whether the view has the strides of the output, so that its bytes are copied in the same order."""
    return all(size == 1 or old == new for size, old, new in zip(view.shape, view.strides, strides, strict=True))
