"""Compares and rounds the contents of tensors, a panel at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.reading import Reader, Words, open_sources
from .copy_plan import OutputTensor, sources
from .tiled_copy import panels
from .views import Tensor

Numbers = NDArray[Any]


def count_true(mask: Tensor) -> int:
    """Number of true elements of ``mask``, a ``BOOL`` tensor of any shape."""
    output = OutputTensor(key="", shape=mask.shape, content=mask)
    with open_sources(sources([output])) as files:
        return sum(int(panel.sum()) for panel in panels(output, Reader(files)))


def equal_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether ``left`` and ``right``, of any shape, have the same type, shape, and bytes in row-major order."""
    return left.dtype == right.dtype and rounds_to(left, right)


def rounds_to(wide: Tensor, narrow: Tensor) -> bool:
    """Whether ``wide``, rounded to the type of ``narrow``, has the shape of ``narrow`` and equals it byte for byte."""
    if wide.shape != narrow.shape:
        return False
    cast = None if wide.dtype == narrow.dtype else narrow.dtype
    outputs = [OutputTensor(key="", shape=wide.shape, content=wide, cast=cast)]
    outputs.append(OutputTensor(key="", shape=narrow.shape, content=narrow))
    with open_sources(sources(outputs)) as files:
        pair = [(panel.reshape(-1) for panel in panels(output, Reader(files))) for output in outputs]
        return all(np.array_equal(one, other) for one, other in aligned(*pair))


def as_numbers(words: Words, dtype: str) -> Numbers:
    """``words`` of any shape as numbers of the same shape; ``dtype`` is as in safetensors, BF16 becomes float32."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    kinds = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "BOOL": "u1", "U8": "u1"}
    return words.view(kinds[dtype])


def aligned(left: Iterator[Numbers], right: Iterator[Numbers]) -> Iterator[tuple[Numbers, Numbers]]:
    """Two streams ``left`` and ``right`` of flat arrays, cut at the same elements; ends with the shorter one.

    A panel is consumed before the next one is requested, because the next one reuses its buffer.
    """
    empty: Numbers = np.empty(0, np.float32)
    one, other = empty, empty
    while True:
        one = one if one.size else next(left, empty)
        other = other if other.size else next(right, empty)
        size = min(one.size, other.size)
        if not size:
            return
        yield one[:size], other[:size]
        one, other = one[size:], other[size:]
