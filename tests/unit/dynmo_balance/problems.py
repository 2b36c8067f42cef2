"""Small partitioning problems from plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from hypothesis import strategies as st

from dynmo_balance._common.errors import UsageError
from dynmo_balance.costs.cost_window import ItemCosts
from dynmo_balance.costs.vocabulary import ShardCosts
from dynmo_balance.formats.plan import CUSTOM
from dynmo_balance.formats.profile import Item
from dynmo_balance.partition.problem import Chain, PartitionProblem, WorkerSlot
from dynmo_balance.schedules.operations import Kind, Operation
from dynmo_balance.simulation.simulator import predict

SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
TIMES = st.integers(0, 40)


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


@st.composite
def split_problems(
    draw: st.DrawFn, schedule: str = "1f1b", virtual: int = 1
) -> tuple[PartitionProblem, tuple[int, ...]]:
    """A problem with a frozen front, transfers and speeds, and the boundaries of one partition."""
    workers = draw(st.integers(1, 4))
    units = draw(st.integers(workers * virtual, workers * virtual + 5))
    columns = [draw(st.lists(TIMES, min_size=units, max_size=units)) for _ in range(3)]
    frozen = draw(st.integers(0, units - 1))
    for column in columns[1:]:
        column[:frozen] = [0] * frozen
    chain = make_chain(columns[0], backward=columns[1], weight=columns[2], boundary=draw(st.integers(0, 3)))
    if draw(st.booleans()):
        shards = ShardCosts(
            count=draw(st.integers(workers, 9)),
            forward_ns=draw(TIMES),
            weight_ns=draw(TIMES),
            static_bytes=0,
            gradient_bytes=0,
            activation_bytes=0,
            stream_bytes=2,
            part_bytes=1,
            sums_bytes=1,
        )
        chain = replace(chain, vocabulary=shards)
    problem = make_problem(
        chain,
        workers,
        schedule,
        draw(st.integers(workers * virtual, 12)),
        virtual_stages=virtual,
        speeds=[draw(st.integers(500_000, 1_500_000)) for _ in range(workers)],
        link_bandwidth=1_000_000_000,
        link_latency_ns=draw(st.integers(0, 9)),
    )
    every = draw(st.permutations(range(1, units)))
    inner = sorted(every[: problem.num_stages - 1])
    return problem, (0, *inner, units)


def with_random_layout(problem: PartitionProblem, draw: Callable[..., Any]) -> PartitionProblem:
    """The problem with any stage on any worker, which are numbered in the order of their first stages."""
    number: dict[int, int] = {}
    layout = tuple(number.setdefault(worker, len(number)) for worker in draw(st.permutations(problem.positions)))
    return replace(problem, schedule=CUSTOM, layout=layout)


def worker_orders(stage: int, microbatches: int) -> list[tuple[Operation, ...]]:
    """All orders of the operations of one stage."""
    found: list[tuple[Operation, ...]] = []

    def extend(row: tuple[Operation, ...], done: tuple[int, ...]) -> None:
        if sum(done) == 3 * microbatches:
            found.append(row)
        for m, kind in enumerate(done):
            if kind < 3:
                extend((*row, Operation(stage, SPLIT[kind], m)), (*done[:m], kind + 1, *done[m + 1 :]))

    extend((), (0,) * microbatches)
    return found


def fits(problem: PartitionProblem, peaks: Sequence[int]) -> bool:
    """Whether peaks of memory are within the limits of the workers."""
    limits = [slot.memory_bytes for slot in problem.slots]
    return all(limit is None or peak <= limit for limit, peak in zip(limits, peaks, strict=True))


def best_of_all_orders(problem: PartitionProblem) -> int | None:
    """The shortest step over all partitions with one stage per worker and all orders of operations.

    None if none of them fits the memory.
    """
    units, workers = len(problem.chain.items), len(problem.slots)
    rows = [worker_orders(stage, problem.microbatches) for stage in range(workers)]
    problem = replace(problem, schedule=CUSTOM, layout=tuple(range(workers)))
    best = None
    for inner in combinations(range(1, units), workers - 1):
        for order in product(*rows):
            try:
                made = predict(replace(problem, order=order), (0, *inner, units))
            except UsageError:  # a deadlock
                continue
            if fits(problem, made.peak_memory_bytes):
                best = made.step_ns if best is None else min(best, made.step_ns)
    return best
