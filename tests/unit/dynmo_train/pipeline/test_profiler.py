"""The profiler: it keeps no graph alive, merges ranks, and divides the backwards of a partly split schedule."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from dynmo_train.parallel.device_clock import CpuClock
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.pipeline.profiler import LayerProfiler, cost_table, merge_cost_tables


class Witness:
    """Lives as long as the graph that holds it."""


class Observed(torch.autograd.Function):
    """The identity, which holds a witness."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, witness: Witness) -> torch.Tensor:
        ctx.witness = witness
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def test_saved_tensors_of_an_unused_branch_free_the_graph():
    profiler = LayerProfiler(CpuClock(threads=1))
    profiler.begin_step(True, 1)
    witness = Witness()
    watched = weakref.ref(witness)
    x = torch.ones(8, requires_grad=True)
    with profiler.saved_tensors("layers.0", set):
        hidden = Observed.apply(x, witness) * 2
        unused = hidden.exp()  # saves its own output for a backward that never runs
        loss = (hidden * hidden).sum()
    loss.backward()
    assert profiler.measurements().result(("layers.0",), 1)["activation_bytes"][0] > 0
    assert torch.equal(x.grad, torch.full((8,), 8.0))
    del hidden, unused, loss, witness
    gc.collect()
    assert watched() is None


class CountingClock(CpuClock):
    """Time passes only when a test lets it."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.now = 0

    def stamp(self) -> int:
        return self.now


def test_whole_backwards_are_divided_as_the_split_ones():
    """DualPipeV: of four microbatches one is split; its parts divide the time of the others, and no time is lost."""
    profiler = LayerProfiler(CountingClock())
    profiler.begin_step(True, 1)
    for took, full in ((100, True), (60, False), (96, True), (104, True)):
        with profiler.backward(("a",), full=full):
            profiler.clock.now += took
    with profiler.weight("a"):
        profiler.clock.now += 20
    result = profiler.measurements().result(("a",), 4)
    assert (result["backward_ns"], result["backward_weight_ns"]) == ([72], [23])
    assert 72 + 23 == (60 + 20 + 300) / 4


def test_cost_tables_merge_to_the_maximum_of_a_pipeline_rank():
    items = ["a", "b", "c", "d"]

    def costs(names, busy, forward, weight):
        return {
            "items": names,
            "forward_ns": forward,
            "backward_ns": [0] * len(names),
            "backward_weight_ns": weight,
            "activation_bytes": [1] * len(names),
            "busy_ns": busy,
            "peak_memory_bytes": 2**40 + busy,
            "calibration_ns": 3 * busy,
            "stall_ppm": 1_000_000 + busy,
        }

    first, second = ("a", "b", "c"), ("d",)
    measured = [
        costs(first, 5, [1, 9, 2], None),
        costs(first, 7, [3, 2, 2], None),
        costs(second, 1, [4], [1]),
        costs(second, 2, [3], [2]),
    ]
    tables = [cost_table(items, each["items"], each) for each in measured]
    merged = merge_cost_tables(ParallelDims(pipeline=2, data=2), items, [first, second], tables)
    assert merged == [costs(first, 7, [3, 9, 2], None), costs(second, 2, [4], [2])]
