"""The operations of a schedule, and their notation."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from .._common.errors import UsageError

MAX_FORWARDS = 1 << 20
"""Maximum of stages times microbatches. Each takes about 1 kB and 20 to 40 us: 1 GB and a minute in all."""


class Kind(StrEnum):
    """What an operation computes; the letters are those of torch's schedule tables."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SHARD_FORWARD = "S"
    SHARD_WEIGHT = "T"


SHARD_KINDS = (Kind.SHARD_FORWARD, Kind.SHARD_WEIGHT)
"""Passes of a sharded output layer; their operations have the first stage of their worker."""


class Operation(NamedTuple):
    """One operation: ``2F0`` is the forward of stage 2 for microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """The notation of torch."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Order = tuple[tuple[Operation, ...], ...]
"""For each worker its operations in execution order."""


def check_operations(stages: int, microbatches: int) -> None:
    """Refuse a step with more operations than a command simulates.

    Raises:
        UsageError: ``stages`` times ``microbatches`` is above ``MAX_FORWARDS``.
    """
    if stages * microbatches > MAX_FORWARDS:
        raise UsageError(
            f"{stages:,} stages x {microbatches:,} microbatches: a simulated step has at most {MAX_FORWARDS:,} forward"
            " passes (stages x microbatches); use fewer --microbatches or --stages"
        )
