"""Tensors that are computed while they are read: rows of their inputs as float32, and results rounded to a type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.computed import ComputedArray, RowComputation
from ..io.reading import Reader, SourceFiles, Words
from ..io.safetensors import DTYPE_BYTES, StoredArray
from .copy_plan import OutputTensor
from .tiled_copy import cast, panels
from .views import Tensor, as_tensor

Floats = NDArray[np.float32]


def computed_tensor(
    name: str, dtype: str, shape: tuple[int, ...], inputs: tuple[Tensor, ...], compute: RowComputation
) -> Tensor:
    """A tensor that ``compute`` computes from ``inputs``, a chunk of rows at a time.

    Args:
        name: of the tensor, for messages.
        dtype: of the result, as in safetensors.
        shape: of the result; at least one dimension.
        inputs: at least one tensor; the files of all of them are opened for the computation.
        compute: computes rows.
    """
    arrays = tuple(dict.fromkeys(array for tensor in inputs for array in arrays_of(tensor)))
    computed = ComputedArray(
        path=arrays[0].path, key=name, dtype=dtype, shape=shape, offset=0, inputs=arrays, compute=compute
    )
    return as_tensor(computed)


@dataclass(frozen=True)
class _Constant:
    """The bytes of a constant in float32."""

    payload: bytes

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        return np.frombuffer(self.payload, np.uint32)


def constant_tensor(name: str, numbers: Floats) -> Tensor:
    """Numbers in memory as a tensor.

    Args:
        name: of the tensor, for messages.
        numbers: ``[N]`` float32; they are copied.
    """
    array = ComputedArray(
        path=Path(name),
        key=name,
        dtype="F32",
        shape=numbers.shape,
        offset=0,
        inputs=(),
        compute=_Constant(numbers.tobytes()),
    )
    return as_tensor(array)


def arrays_of(tensor: Tensor) -> tuple[StoredArray, ...]:
    """The arrays of which a tensor of any shape consists, each once."""
    return tuple(dict.fromkeys(piece.view.array for piece in tensor.pieces))


def is_computed(tensor: Tensor) -> bool:
    """Whether a part of a tensor of any shape is computed while it is read."""
    return any(isinstance(array, ComputedArray) for array in arrays_of(tensor))


def bits_of(files: SourceFiles, tensor: Tensor) -> Words:
    """The bits of a tensor, with its shape; the caller has narrowed it to a bounded size.

    Args:
        files: the open files.
        tensor: any shape; types as in safetensors.
    """
    found = np.empty(tensor.shape, f"u{DTYPE_BYTES[tensor.dtype]}")
    flat, at = found.reshape(-1), 0
    for panel in panels(OutputTensor(key="", shape=tensor.shape, content=tensor), Reader(files)):
        flat[at : at + panel.size] = panel.reshape(-1)
        at += panel.size
    return found


def floats_of(files: SourceFiles, tensor: Tensor) -> Floats:
    """The numbers of a floating-point tensor as float32, with its shape.

    Args:
        files: the open files.
        tensor: any shape, of the type F32, F16 or BF16.
    """
    words = bits_of(files, tensor)
    return words.view(np.float32) if tensor.dtype == "F32" else cast(words, tensor.dtype, "F32").view(np.float32)


def rounded(numbers: NDArray[Any], dtype: str) -> Words:
    """The bits of numbers of any shape in the floating-point type ``dtype``, rounded to nearest even."""
    words = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return words if dtype == "F32" else cast(words, "F32", dtype)
