"""The table of what will be written: files, tensors, their bytes' places. Pure; ``execute`` carries it out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from .._common.crc32 import combine
from ..io.safetensors import DTYPE_BYTES, StoredArray, encode_header
from .views import Tensor, View, row_major


@dataclass(frozen=True, kw_only=True)
class OutputTensor:
    """One tensor to write: ``content`` in row-major order is what ``shape`` holds. Zero where ``mask`` is false.

    ``cast`` is the type to write where it is not the content's.
    """

    key: str
    shape: tuple[int, ...]
    content: Tensor
    mask: Tensor | None = None
    cast: str | None = None

    @property
    def dtype(self) -> str:
        """The type that is written."""
        return self.cast or self.content.dtype

    @property
    def num_bytes(self) -> int:
        """Size of what is written."""
        return math.prod(self.content.shape) * DTYPE_BYTES[self.dtype]


class Writable(Protocol):
    """A file to write: tensors at places known beforehand, and other bytes that may depend on their checksums."""

    @property
    def name(self) -> str:
        """Path inside the new directory."""

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """What is copied, in the order of the bytes."""

    @property
    def offsets(self) -> list[int]:
        """Where each tensor's bytes begin."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """What a reader finds in the file: offset and number of bytes of each stored array, by key."""

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """Everything but the tensors' bytes, by offset; with them it leaves no gap."""


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """One safetensors file to write, its tensors in the order of their bytes."""

    name: str
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def header(self) -> bytes:
        """The bytes before the first tensor."""
        return encode_header([(t.key, t.dtype, t.shape) for t in self.tensors], self.metadata)

    @property
    def offsets(self) -> list[int]:
        """Where each tensor's bytes begin."""
        sizes = [tensor.num_bytes for tensor in self.tensors]
        return list(accumulate(sizes[:-1], initial=len(self.header))) if sizes else []

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """Offset and number of bytes of each tensor, by key."""
        return {t.key: (begin, t.num_bytes) for t, begin in zip(self.tensors, self.offsets, strict=True)}

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """Everything but the tensors' bytes, by offset; here independent of the tensors' checksums."""
        return [(0, self.header)]


def output_file(name: str, tensors: Iterable[OutputTensor], metadata: Mapping[str, str] | None = None) -> OutputFile:
    """A file with ``tensors`` put in an order that keeps each aligned: wide types before narrow ones."""
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    return OutputFile(name=name, tensors=tuple(ordered), metadata=metadata or {})


def shard_by_size(tensors: Sequence[OutputTensor], limit_bytes: int) -> list[list[OutputTensor]]:
    """Cut ``tensors`` into files of at most ``limit_bytes``; a larger tensor has a file of its own."""
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
    """The stored arrays that tensors are read from, each once."""
    contents = [content for tensor in tensors for content in (tensor.content, tensor.mask) if content is not None]
    return list({piece.view.array: None for content in contents for piece in content.pieces})


def expected_crc32(tensor: OutputTensor) -> int | None:
    """The checksum that the written bytes must have, where whole stored arrays are put one behind the other.

    None where bytes are regrouped, cut or masked, or the source has no checksum: then the source itself is checked.
    """
    content = tensor.content
    if tensor.mask is not None or tensor.cast is not None or not content.is_covered:
        return None
    strides = row_major(content.shape)
    pieces = sorted(
        (sum(b * s for b, s in zip(piece.begin, strides, strict=True)), index)
        for index, piece in enumerate(content.pieces)
    )
    total, at = 0, 0
    for begin, index in pieces:
        view = content.pieces[index].view
        if begin != at or view.array.crc32 is None or not _is_whole(view) or not _fits(view, strides):
            return None
        total = combine(total, view.array.crc32, view.array.num_bytes)
        at += view.array.num_bytes // DTYPE_BYTES[content.dtype]
    return total


def checked_sources(tensor: OutputTensor) -> list[StoredArray]:
    """The arrays with a recorded checksum that must be compared with what was read, each once."""
    return [array for array in sources([tensor]) if array.crc32 is not None]


def run_of(tensor: OutputTensor) -> tuple[StoredArray, int] | None:
    """The array whose bytes from an offset on are what is written, one behind the other; None where it is otherwise.

    The checksum of what was written is then that of this part of the array.
    """
    content = tensor.content
    if tensor.mask is not None or tensor.cast is not None or len(content.pieces) != 1 or not content.is_covered:
        return None
    view = content.pieces[0].view
    if view.array.crc32 is None or not _fits(view, row_major(content.shape)):
        return None
    return view.array, view.start * DTYPE_BYTES[content.dtype]


def _is_whole(view: View) -> bool:
    elements = view.array.num_bytes // DTYPE_BYTES[view.array.dtype]
    count = 1
    for size in view.shape:
        count *= size
    return view.start == 0 and count == elements


def _fits(view: View, strides: tuple[int, ...]) -> bool:
    """Whether the view's bytes lie in the output as they lie in the file."""
    return all(
        size == 1 or mine == theirs for size, mine, theirs in zip(view.shape, view.strides, strides, strict=True)
    )
