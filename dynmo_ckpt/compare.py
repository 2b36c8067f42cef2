"""Compares two checkpoints tensor by tensor, whatever their formats and topologies, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._common.console import Tick
from .copyplan import OutputTensor, sources
from .io.reading import Reader, Words, open_sources
from .native import NativeCheckpoint, has_vocabulary_rows
from .panels import panels
from .views import Tensor

Numbers = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a tensor differs: ``kind`` is ``only-left``, ``only-right``, ``shape``, ``dtype`` or ``values``."""

    name: str
    kind: str
    message: str
    elements: int = 0
    max_abs: float = 0.0


def differences(
    left: NativeCheckpoint, right: NativeCheckpoint, roles: tuple[str, ...], atol: float, tick: Tick
) -> Iterator[Difference]:
    """Every tensor that differs; values by more than ``atol`` in some element, or a NaN against a number.

    Rows of the vocabulary's padding are not compared. Where one side has no masks, those of the other are applied to
    its weights, so that a pruned checkpoint equals its dense export.
    """
    both_masked = bool(left.names("mask")) == bool(right.names("mask"))
    wanted = tuple(role for role in roles if role != "mask" or both_masked)
    names = [dict.fromkeys(side.names(*wanted)) for side in (left, right)]
    for name in names[0] | names[1]:
        if name not in names[1]:
            yield Difference(name=name, kind="only-left", message="is on the left only")
        elif name not in names[0]:
            yield Difference(name=name, kind="only-right", message="is on the right only")
        else:
            pair = [_without_padding(side, name, not both_masked) for side in (left, right)]
            yield from _compare(name, pair[0], pair[1], atol)
            tick(pair[0].content.num_bytes / 1e6, name)


def set_elements(mask: Tensor) -> int:
    """How many elements of a mask are true."""
    output = OutputTensor(key="", shape=mask.shape, content=mask)
    with open_sources(sources([output])) as files:
        return sum(int(panel.sum()) for panel in panels(output, Reader(files)))


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bytes in row-major order."""
    return left.dtype == right.dtype and rounds_to(left, right)


def rounds_to(wide: Tensor, narrow: Tensor) -> bool:
    """Whether a tensor is another's numbers, rounded to the nearest of that one's type."""
    if wide.shape != narrow.shape:
        return False
    cast = None if wide.dtype == narrow.dtype else narrow.dtype
    outputs = [OutputTensor(key="", shape=wide.shape, content=wide, cast=cast)]
    outputs.append(OutputTensor(key="", shape=narrow.shape, content=narrow))
    with open_sources(sources(outputs)) as files:
        pair = [(panel.reshape(-1) for panel in panels(output, Reader(files))) for output in outputs]
        return all(np.array_equal(one, other) for one, other in _aligned(*pair))


def _without_padding(checkpoint: NativeCheckpoint, name: str, masked: bool) -> OutputTensor:
    model, entry = checkpoint.manifest["model"], checkpoint.manifest["tensors"][name]
    content, mask = checkpoint.tensors[name], checkpoint.tensors.get(f"{name}.mask") if masked else None
    shape = tuple(entry["shape"])
    if has_vocabulary_rows(name):
        shape = (model["vocab_size"], *shape[1:])
        content = content.narrow(0, 0, shape[0])
        mask = None if mask is None else mask.narrow(0, 0, shape[0])
    return OutputTensor(key=name, shape=shape, content=content, mask=mask)


def _compare(name: str, left: OutputTensor, right: OutputTensor, atol: float) -> Iterator[Difference]:
    if left.shape != right.shape:
        yield Difference(name=name, kind="shape", message=f"{list(left.shape)} on the left, {list(right.shape)} right")
        return
    dtypes = left.content.dtype, right.content.dtype
    if dtypes[0] != dtypes[1]:
        yield Difference(name=name, kind="dtype", message=f"{dtypes[0]} on the left, {dtypes[1]} on the right")
    count, largest = 0, 0.0
    with open_sources(sources([left, right])) as files:
        for one, other in _aligned(_values(left, Reader(files)), _values(right, Reader(files))):
            if np.array_equal(one, other):
                continue
            with np.errstate(invalid="ignore"):
                gap = np.abs(one.astype(np.float64) - other.astype(np.float64))
            same = (one == other) | (np.isnan(one) & np.isnan(other))
            far = ~same & ~(gap <= atol)
            count += int(far.sum())
            if far.any():
                largest = max(largest, float(np.nan_to_num(gap[far], nan=math.inf).max()))
    if count:
        total = math.prod(left.shape)
        message = f"{count} of {total} elements differ by more than {atol:g}, at most by {largest:g}"
        yield Difference(name=name, kind="values", message=message, elements=count, max_abs=largest)


def _values(tensor: OutputTensor, reader: Reader) -> Iterator[Numbers]:
    """The panels of a tensor as flat arrays of numbers."""
    for panel in panels(tensor, reader):
        yield as_numbers(panel.reshape(-1), tensor.content.dtype)


def as_numbers(words: Words, dtype: str) -> Numbers:
    """Raw words as numbers that numpy can compute with; BF16 becomes float32."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    kinds = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "BOOL": "u1", "U8": "u1"}
    return words.view(kinds[dtype])


def _aligned(left: Iterator[Numbers], right: Iterator[Numbers]) -> Iterator[tuple[Numbers, Numbers]]:
    """Two streams of the same elements, cut alike; a panel is used up before the next is asked for."""
    nothing: Numbers = np.empty(0, np.float32)
    one, other = nothing, nothing
    while True:
        one = one if one.size else next(left, nothing)
        other = other if other.size else next(right, nothing)
        size = min(one.size, other.size)
        if not size:
            return
        yield one[:size], other[:size]
        one, other = one[size:], other[size:]
