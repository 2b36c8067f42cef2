"""From what each process measured to what each worker cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..parallel.dims import ParallelDims


def merge_rank_costs(dims: ParallelDims, costs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """From what each rank measured to one object a worker: the maximum over its ranks, which hold the same items."""
    merged: list[dict[str, Any]] = []
    for worker in range(dims.pipeline):
        own = [costs[rank] for rank in dims.ranks(pipeline=worker)]
        largest: dict[str, Any] = {"items": own[0]["items"]}
        for field in own[0].keys() - {"items"}:
            values = [one[field] for one in own if one[field] is not None]
            if not values:
                largest[field] = None
            elif isinstance(values[0], list):
                largest[field] = [max(same) for same in zip(*values, strict=True)]
            else:
                largest[field] = max(values)
        merged.append(largest)
    return merged
