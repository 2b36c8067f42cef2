"""Small partitioning problems from plain numbers."""

from __future__ import annotations

from dynmo_balance.costs.cost_window import ItemCosts
from dynmo_balance.formats.profile import Item
from dynmo_balance.partition.problem import Chain, PartitionProblem, WorkerSlot


def make_item(name: str, size: int = 0, kind: str = "layer", boundary: int = 0) -> Item:
    return Item(
        name=name,
        layer=name,
        kind=kind,
        param_count=size,
        param_bytes=size,
        gradient_bytes=0,
        optimizer_bytes=0,
        boundary_bytes=boundary,
        cut_before=True,
        tied_to=None,
    )


def make_chain(forward, backward=None, weight=None, activation=None, sizes=None, cuts=None, boundary=0) -> Chain:
    n = len(forward)
    sizes = sizes or [0] * n
    costs = ItemCosts(
        forward_ns=tuple(forward),
        backward_input_ns=tuple(backward or [0] * n),
        backward_weight_ns=tuple(weight or [0] * n),
        activation_bytes=tuple(activation or [0] * n),
        split=weight is not None,
        records=1,
        from_step=1,
        to_step=1,
    )
    items = tuple(make_item(f"layers.{i}", size, boundary=boundary) for i, size in enumerate(sizes))
    return Chain(items=items, costs=costs, cuts=tuple(cuts) if cuts else tuple(range(n + 1)))


def make_problem(
    chain: Chain, stages: int, schedule: str = "1f1b", microbatches: int = 8, **options
) -> PartitionProblem:
    speeds = options.pop("speeds", None) or [1_000_000] * stages
    memory = options.pop("memory", None) or [None] * stages
    slots = tuple(
        WorkerSlot(worker=p, speed_ppm=speed, memory_bytes=cap)
        for p, (speed, cap) in enumerate(zip(speeds, memory, strict=True))
    )
    return PartitionProblem(chain=chain, slots=slots, schedule=schedule, microbatches=microbatches, **options)
