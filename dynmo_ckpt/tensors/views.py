"""Lazy tensors: strided windows on stored bytes, sliced, reshaped and permuted without reading a byte. Pure.

::

    StoredArray   contiguous bytes in a file: path, offset, dtype, shape
      View        a strided window on one StoredArray            (strides and starts count elements)
        Piece     a View and its position in a tensor
          Tensor  dtype, shape and pieces; zero where no piece is

Every layout of a checkpoint (tensor-parallel slices, grouped query-key-value rows, transposed weights, flat optimizer
buffers) is a ``Tensor``, and one executor copies them all. The methods have the names of ``torch.Tensor``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..io.errors import UnsupportedError
from ..io.safetensors import DTYPE_BYTES, StoredArray


@dataclass(frozen=True)
class View:
    """A strided window on ``array`` that begins at element ``start``; ``strides`` count elements."""

    array: StoredArray
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: its begin in each dimension, and its elements; its extents are the shape of the view."""

    begin: tuple[int, ...]
    view: View


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements: ``(2, 3, 4)`` gives ``(12, 4, 1)``."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Tensor:
    """A tensor of pieces that do not overlap; elements in no piece are zero. ``dtype`` is as in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the dense tensor in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_covered(self) -> bool:
        """Whether the pieces cover all elements."""
        return sum(math.prod(piece.view.shape) for piece in self.pieces) == math.prod(self.shape)

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor:
        """Replace dimension ``dim`` by dimensions of ``sizes``, the last one fastest.

        A piece that ends within a row becomes several boxes, so that a slice of a flat buffer gets its shape back.

        Raises:
            UnsupportedError: the product of ``sizes`` is not the size of the dimension.
        """
        if 1 in sizes and len(sizes) > 1 and math.prod(sizes) == self.shape[dim]:
            wide = [size for size in sizes if size != 1]
            base = self.unflatten(dim, wide) if len(wide) > 1 else self
            return base.with_unit_dims(_splice(self.shape, dim, sizes))
        if math.prod(sizes) != self.shape[dim]:
            raise UnsupportedError(
                f"a dimension of {self.shape[dim]} cannot be split into {' x '.join(map(str, sizes))}"
            )
        pieces = []
        for piece in self.pieces:
            first, extent, stride = piece.begin[dim], piece.view.shape[dim], piece.view.strides[dim]
            for begin, shape in _boxes(first, first + extent, sizes):
                at = sum(b * step for b, step in zip(begin, row_major(sizes), strict=True))
                view = replace(
                    piece.view,
                    start=piece.view.start + (at - first) * stride,
                    shape=_splice(piece.view.shape, dim, shape),
                    strides=_splice(piece.view.strides, dim, [stride * step for step in row_major(sizes)]),
                )
                pieces.append(Piece(_splice(piece.begin, dim, begin), view))
        return replace(self, shape=_splice(self.shape, dim, sizes), pieces=tuple(pieces))

    def with_unit_dims(self, shape: Sequence[int]) -> Tensor:
        """The same elements with ``shape``, which differs only in dimensions of size 1."""
        dims = iter([dim for dim, size in enumerate(self.shape) if size != 1])
        sources = [next(dims) if size != 1 else None for size in shape]

        def pick(values: Sequence[int], single: int) -> tuple[int, ...]:
            """``values`` for the dimensions of ``shape``; ``single`` for each dimension of size 1."""
            return tuple(single if at is None else values[at] for at in sources)

        pieces = tuple(
            Piece(pick(p.begin, 0), replace(p.view, shape=pick(p.view.shape, 1), strides=pick(p.view.strides, 1)))
            for p in self.pieces
        )
        return replace(self, shape=tuple(shape), pieces=pieces)

    def flatten(self, dim: int) -> Tensor:
        """Merge dimensions ``dim`` and ``dim + 1``, the second one fastest.

        A piece whose rows are not contiguous to each other, such as a transposed one, becomes a piece for each row.
        """
        inner = self.shape[dim + 1]
        pieces = []
        for piece in self.pieces:
            (rows, width), view = piece.view.shape[dim : dim + 2], piece.view
            step, stride = view.strides[dim : dim + 2]
            # Rows become one strided window only if they are complete and lie at a constant distance.
            joined = width == inner and step == inner * stride
            for row in range(1 if joined else rows):
                begin = (piece.begin[dim] + row) * inner + piece.begin[dim + 1]
                part = replace(
                    view,
                    start=view.start + row * step,
                    shape=_splice(_splice(view.shape, dim + 1, []), dim, [rows * inner if joined else width]),
                    strides=_splice(_splice(view.strides, dim + 1, []), dim, [stride]),
                )
                pieces.append(Piece(_splice(_splice(piece.begin, dim + 1, []), dim, [begin]), part))
        shape = _splice(_splice(self.shape, dim + 1, []), dim, [self.shape[dim] * inner])
        return replace(self, shape=shape, pieces=tuple(pieces))

    def merge_dims(self, shape: Sequence[int]) -> Tensor:
        """The same elements in the same order with ``shape``, each dimension of which is a run of those of this tensor.

        Raises:
            UnsupportedError: ``shape`` divides a dimension.
        """
        tensor = self
        for dim, size in enumerate(shape):
            if dim == len(tensor.shape) or (size == 1 and tensor.shape[dim] != 1):
                tensor = tensor.with_unit_dims((*tensor.shape[:dim], 1, *tensor.shape[dim:]))
            while tensor.shape[dim] != size or (dim == len(shape) - 1 and len(tensor.shape) > len(shape)):
                if dim + 1 >= len(tensor.shape):
                    raise UnsupportedError(f"{list(self.shape)} cannot be read as {list(shape)}")
                tensor = tensor.flatten(dim)
        return tensor

    def squeeze_first(self) -> Tensor:
        """The same elements without the first dimension, which has size 1."""
        pieces = tuple(
            Piece(p.begin[1:], replace(p.view, shape=p.view.shape[1:], strides=p.view.strides[1:])) for p in self.pieces
        )
        return replace(self, shape=self.shape[1:], pieces=pieces)

    def permute(self, order: Sequence[int]) -> Tensor:
        """Reorder the dimensions: dimension ``i`` of the result is ``order[i]`` of this tensor."""

        def pick(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[dim] for dim in order)

        pieces = tuple(
            Piece(pick(p.begin), replace(p.view, shape=pick(p.view.shape), strides=pick(p.view.strides)))
            for p in self.pieces
        )
        return replace(self, shape=pick(self.shape), pieces=pieces)

    def narrow(self, dim: int, begin: int, end: int) -> Tensor:
        """The part ``[begin, end)`` along ``dim``."""
        pieces = []
        for piece in self.pieces:
            low = max(begin, piece.begin[dim])
            high = min(end, piece.begin[dim] + piece.view.shape[dim])
            if low < high:
                view = replace(
                    piece.view,
                    start=piece.view.start + (low - piece.begin[dim]) * piece.view.strides[dim],
                    shape=_splice(piece.view.shape, dim, [high - low]),
                )
                pieces.append(Piece(_splice(piece.begin, dim, [low - begin]), view))
        return replace(self, shape=_splice(self.shape, dim, [end - begin]), pieces=tuple(pieces))

    def zero_pad(self, dim: int, size: int) -> Tensor:
        """This tensor padded with zeros at the end to ``size`` along ``dim``."""
        # No piece covers the padding, and elements in no piece are zero.
        return replace(self, shape=_splice(self.shape, dim, [size]))


def _boxes(begin: int, end: int, sizes: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements ``[begin, end)`` of a row-major array as boxes, each with its begin and extents."""
    if begin >= end:
        return []
    if len(sizes) == 1:
        return [((begin,), (end - begin,))]
    inner = math.prod(sizes[1:])
    low, high = -(-begin // inner), end // inner
    # Begin and end lie within one row, which has no complete inner box.
    if low > high:
        rows = [(high, begin - high * inner, end - high * inner)]
    else:
        rows = [(low - 1, begin - (low - 1) * inner, inner)] if begin < low * inner else []
        rows += [(high, 0, end - high * inner)] if high * inner < end else []
    zeros = (0,) * (len(sizes) - 1)
    boxes = [((low, *zeros), (high - low, *sizes[1:]))] if low < high else []
    for row, first, last in rows:
        boxes += [((row, *at), (1, *shape)) for at, shape in _boxes(first, last, sizes[1:])]
    return boxes


def as_tensor(array: StoredArray) -> Tensor:
    """A stored array as a tensor."""
    view = View(array, 0, array.shape, row_major(array.shape))
    return Tensor(array.dtype, array.shape, (Piece((0,) * len(array.shape), view),))


def concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors along ``dim``.

    Args:
        tensors: at least one, with equal shapes except along ``dim``.
        dim: index of the dimension, not negative.

    Returns:
        A tensor whose size along ``dim`` is the sum of theirs.

    Raises:
        UnsupportedError: the types or the other dimensions differ.
    """
    first = tensors[0]
    pieces: list[Piece] = []
    at = 0
    for tensor in tensors:
        if tensor.dtype != first.dtype or _splice(tensor.shape, dim, []) != _splice(first.shape, dim, []):
            raise UnsupportedError(
                f"{tensor.dtype} {list(tensor.shape)} and {first.dtype} {list(first.shape)} cannot be concatenated "
                f"along dimension {dim}"
            )
        pieces.extend(Piece(_splice(piece.begin, dim, [piece.begin[dim] + at]), piece.view) for piece in tensor.pieces)
        at += tensor.shape[dim]
    return Tensor(first.dtype, _splice(first.shape, dim, [at]), tuple(pieces))


def _splice(values: Sequence[int], dim: int, new: Sequence[int]) -> tuple[int, ...]:
    return (*values[:dim], *new, *values[dim + 1 :])
