"""An order of operations as arrays: 9 bytes per operation, where a tuple of ``Operation`` takes 200.

At 256 workers and 2,048 microbatches a step has a million operations. The schedules in rounds are built as arrays, and
``to_order`` makes tuples of them for what walks through single operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .operations import Kind, Operation, Order

KINDS = tuple(Kind)
"""The kinds by their number in arrays."""
FORWARD, BACKWARD, INPUT, WEIGHT = (KINDS.index(kind) for kind in KINDS[:4])


@dataclass(frozen=True, eq=False)
class OrderArrays:
    """The operations of all workers, one worker after another.

    Attributes:
        stages: ``[operations]`` int32.
        kinds: ``[operations]`` int8, indices of ``KINDS``.
        microbatches: ``[operations]`` int32.
        begins: ``[workers + 1]``, the first operation of each worker.
    """

    stages: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.int8]
    microbatches: npt.NDArray[np.int32]
    begins: tuple[int, ...]


def from_order(order: Order) -> OrderArrays:
    """The arrays of an order."""
    number = {kind: at for at, kind in enumerate(KINDS)}
    begins = [0]
    for operations in order:
        begins.append(begins[-1] + len(operations))
    return OrderArrays(
        np.fromiter((op.stage for row in order for op in row), np.int32, begins[-1]),
        np.fromiter((number[op.kind] for row in order for op in row), np.int8, begins[-1]),
        np.fromiter((op.microbatch for row in order for op in row), np.int32, begins[-1]),
        tuple(begins),
    )


def to_order(arrays: OrderArrays) -> Order:
    """The operations as tuples."""
    kinds = [KINDS[kind] for kind in arrays.kinds.tolist()]
    every = list(map(Operation, arrays.stages.tolist(), kinds, arrays.microbatches.tolist()))
    return tuple(tuple(every[begin:end]) for begin, end in pairwise(arrays.begins))
