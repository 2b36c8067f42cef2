"""The words of a schedule: what a worker does, one operation after the other."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an operation computes; the letters are those of torch's schedule tables."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Operation(NamedTuple):
    """One operation: ``2F0`` is the forward of stage 2 for microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """As torch writes it."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Order = tuple[tuple[Operation, ...], ...]
"""For each worker the operations in the order in which it does them."""
