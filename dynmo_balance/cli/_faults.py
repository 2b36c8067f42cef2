"""A plan that was read but whose numbers do not hold."""

from __future__ import annotations

from .._common.document import Problem
from .._common.errors import DynmoError


class FaultsError(DynmoError):
    """Every number of a plan that was recomputed and found to be another; exit code 1."""

    def __init__(self, source: str, faults: list[Problem]) -> None:
        noun = "number does" if len(faults) == 1 else "numbers do"
        super().__init__("\n  ".join([f"{source}: {len(faults)} {noun} not hold", *map(str, faults)]))
