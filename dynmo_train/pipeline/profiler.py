"""Measures each item of a pipeline rank in sampled steps: times, activation bytes, and the rank's busy time.

Forward times are measured around the call of an item. Backward times are measured between *marks*, identity functions
at the item boundaries::

    forward    mark 0 -> item 0 -> mark 1 -> item 1 -> mark 2 -> ...
    backward   mark 0 <- item 0 <- mark 1 <- item 1 <- mark 2 <- ...
                       |-- 0 ---|          |-- 1 ---|

The backward of a mark runs after all arithmetic of the later item and before that of the earlier one, because the
autograd engine takes ready nodes in reverse order of creation. Marks change no value, so that sampling, which decides
whether they are inserted, cannot change the bits of a run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..dynamics.technique import Event
from ..launch.watch.heartbeat import silent_heartbeat
from ..parallel.device_clock import Clock
from ..parallel.dims import ParallelDims
from ..parallel.process_groups import World
from .step_observer import StepObserver

# Rows of the square matrices of the calibration product: 0.1 ms on a core or a GPU.
_CPU_PRODUCT, _CUDA_PRODUCT = 96, 1024
_CALIBRATIONS = 3
# Least processor time of a step from which a stall is computed.
_MIN_STALL_NS = 20_000_000


class _RecordBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, profiler: LayerProfiler, position: int) -> torch.Tensor:
        """The identity of ``x``; ``position`` is the index of the item that reads it in its stage."""
        ctx.profiler, ctx.position = profiler, position
        # A view, not a copy: a mark costs no memory, and the values have the same bits.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # No synchronization: on CUDA this stamps the stream, where the later item's kernels are queued before.
        ctx.profiler.gradient_reached(ctx.position)
        return grads[0], None, None


@dataclass
class _Intervals:
    by_name: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))

    def mean_ns(self, clock: Clock, name: str, microbatches: int) -> int:
        """Nanoseconds of all intervals of ``name`` over the number of ``microbatches``; 0 without any."""
        return sum(clock.elapsed_ns(begin, end) for begin, end in self.by_name.get(name, ())) // microbatches


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a rank has measured in one step; on CUDA to be read once the device has reached the end of the step."""

    clock: Clock
    forward: _Intervals
    backward: _Intervals
    backward_input: _Intervals
    weight: _Intervals
    busy: _Intervals
    activation_bytes: Mapping[str, int]
    calibrations: Sequence[tuple[Any, Any]] = ()
    busy_wall_ns: int = 0

    def result(self, names: tuple[str, ...], microbatches: int) -> dict[str, Any]:
        """Return the measurements.

        Args:
            names: Item names, which give the order of the lists.
            microbatches: Number of microbatches of the step.

        Returns:
            Lists of a profile's ``step`` line, means per microbatch in ns and bytes; ``busy_ns`` of the step,
            ``calibration_ns`` of the fixed product, and ``stall_ppm``: wall over processor time, in millionths.
        """

        def means(intervals: _Intervals) -> list[int]:
            return [intervals.mean_ns(self.clock, name, microbatches) for name in names]

        backward = [
            _split_whole(*parts)
            for parts in zip(means(self.backward), means(self.backward_input), means(self.weight), strict=True)
        ]
        return {
            "forward_ns": means(self.forward),
            "backward_ns": [first for first, _ in backward],
            "backward_weight_ns": [second for _, second in backward] if self.weight.by_name else None,
            "activation_bytes": [self.activation_bytes.get(name, 0) for name in names],
            "busy_ns": (busy_ns := self.busy.mean_ns(self.clock, "", 1)),
            # The fastest of several: a preemption or a cold cache must not look like a slow clock.
            "calibration_ns": min((self.clock.elapsed_ns(*each) for each in self.calibrations), default=0),
            "stall_ppm": _stall_ppm(self.busy_wall_ns, busy_ns),
        }


class LayerProfiler:
    """Collects the costs of one pipeline rank's items over a step.

    Not thread-safe: the schedule of a rank runs in one thread, and so does autograd on CPU. On CUDA, the device's
    autograd thread only records events while the schedule waits for it.

    Args:
        clock: Takes time stamps.

    Attributes:
        sampling: Whether this step is measured.
        measures_stall: Whether operations compute only, so that their wall time shows a busy processor.
        always_marks: Insert marks in steps that are not measured, too, for a listener.
        heartbeat: Reports the phase of each operation to the launcher, in every step.
        observer: Reads the tensors of a step; None in training.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.heartbeat = silent_heartbeat()
        self.observer: StepObserver | None = None
        self.sampling, self.always_marks, self.measures_stall = False, False, False
        self._product: tuple[torch.Tensor, torch.Tensor] | None = None
        self._reset()
        self._names: tuple[str, ...] = ()
        self._last_mark: tuple[int, Any] | None = None
        self._listener: Callable[[int], None] | None = None

    def _reset(self) -> None:
        self._forward, self._backward, self._weight, self._busy = (_Intervals() for _ in range(4))
        self._backward_input = _Intervals()
        self._open = self._backward
        self._activation_bytes: dict[str, int] = {}
        self._calibrations: list[tuple[Any, Any]] = []
        self._busy_wall_ns = 0

    def calibrate(self, device: torch.device) -> None:
        """In a measured step, measure a fixed product, whose time does not depend on the model; it is not waited for.

        Args:
            device: Device of the product.
        """
        if not self.sampling:
            return
        if self._product is None:
            # Without random numbers: the bits of a run must not depend on whether it is measured.
            size = _CUDA_PRODUCT if device.type == "cuda" else _CPU_PRODUCT
            self._product = (torch.full((size, size), 0.5, device=device), torch.empty((size, size), device=device))
        ones, out = self._product
        with torch.no_grad():
            for _ in range(_CALIBRATIONS):
                begin = self.clock.stamp()
                torch.mm(ones, ones, out=out)
                self._calibrations.append((begin, self.clock.stamp()))

    def calibration_ns(self, device: torch.device) -> int:
        """Measure the fixed product at once and return its time in ns; on CUDA this waits for the device."""
        self.sampling = True
        for _ in range(_CALIBRATIONS):
            self.calibrate(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found = min(self.clock.elapsed_ns(*each) for each in self._calibrations)
        self.sampling = False
        self._reset()
        return found

    def begin_step(self, sampling: bool, step: int) -> None:
        """Discard the measurements of the last step; ``sampling`` is whether to measure optimizer step ``step``."""
        self.sampling = sampling
        self._reset()

    def events(self, step: int) -> Sequence[Event]:
        """Return the events that the profiler itself has after ``step``: none, unless it emulates a run."""
        return ()

    def mark(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Mark the boundary before the item at ``position`` of the stage, where this step needs marks.

        Args:
            x: What the item reads first, of any shape; returned with the same values.
            position: Index of the item in its stage.
        """
        if not ((self.sampling or self.always_marks) and torch.is_grad_enabled() and x.requires_grad):
            return x
        marked: torch.Tensor = _RecordBackward.apply(x, self, position)  # type: ignore[no-untyped-call]
        return marked

    @contextmanager
    def _measure(self, intervals: _Intervals, name: str) -> Iterator[None]:
        if not self.sampling:
            yield
            return
        begin = self.clock.stamp()
        yield
        intervals.by_name[name].append((begin, self.clock.stamp()))

    @contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Measure the forward of one item."""
        with self._measure(self._forward, name):
            yield

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Measure one operation of the schedule on this rank."""
        begin_ns = time.perf_counter_ns()
        with self._measure(self._busy, ""):
            yield
        if self.sampling and self.measures_stall:
            self._busy_wall_ns += time.perf_counter_ns() - begin_ns

    @contextmanager
    def weight(self, name: str, share: float = 1.0) -> Iterator[None]:
        """Measure weight gradients of one item in a split backward.

        Args:
            name: Name of the item.
            share: Fraction of the item's weight gradients; an emulation needs it.
        """
        with self._measure(self._weight, name):
            yield

    @contextmanager
    def backward(self, names: tuple[str, ...], *, full: bool = True) -> Iterator[None]:
        """Measure the backward of a stage with these items, which the marks divide.

        Args:
            names: Item names of the stage.
            full: False where weight gradients are left to W.
        """
        if not self.sampling or not names:
            yield
            return
        self._open = self._backward if full else self._backward_input
        self._names, self._last_mark = names, (len(names), self.clock.stamp())
        yield
        self._close_interval(0)
        self._last_mark = None

    @contextmanager
    def listening(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Call ``listener`` in a backward with each position from which on all gradients are complete."""
        self._listener = listener
        yield
        self._listener = None

    def gradient_reached(self, position: int) -> None:
        """Handle a mark in the backward: the gradient of the input of the item at ``position`` is complete."""
        if self._listener is not None:
            self._listener(position)
        if self.sampling and self._last_mark is not None:
            self._close_interval(position)

    def _close_interval(self, position: int) -> None:
        """Count the time since the last mark for the item before that mark."""
        if self._last_mark is None:
            return
        last_position, begin = self._last_mark
        # Without this the end of a backward would count twice: the mark of the first item, where there is one, has
        # already closed the last interval.
        if position >= last_position:
            return
        now = self.clock.stamp()
        self._open.by_name[self._names[last_position - 1]].append((begin, now))
        self._last_mark = (position, now)

    @contextmanager
    def saved_tensors(self, name: str, ignored: Callable[[], set[int]]) -> Iterator[None]:
        """Measure the bytes that an item's forward saves for its backward, once per sampled step, each storage once.

        Args:
            name: Name of the item.
            ignored: Returns data pointers of storages that are not counted (parameters); called within the forward.
        """
        # The first microbatch of the step stands for all, because the hooks cost time.
        if not self.sampling or name in self._activation_bytes:
            yield
            return
        sizes: dict[int, int] = {}
        pointers: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
            # Read within the forward: with ZeRO the gathered parameters have storage only then.
            pointers.update(() if pointers else ignored())
            if storage is not None and storage.data_ptr() not in pointers:
                sizes[storage.data_ptr()] = storage.nbytes()
            # Not the tensor itself: a node that saves its own output and whose backward never runs (a branch that no
            # loss uses) would reference itself, and so keep the microbatch's graph alive forever.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._activation_bytes[name] = sum(sizes.values())

    def set_activation_bytes(self, name: str, num_bytes: int) -> None:
        """Set the activation memory of an item whose saved tensors are known: ``num_bytes`` per microbatch.

        A checkpointed item saves its inputs. Only the first call of a sampled step has an effect.
        """
        if self.sampling:
            self._activation_bytes.setdefault(name, num_bytes)

    def measurements(self) -> Measurements:
        """Return what was measured since :meth:`begin_step`; the next step does not change it."""
        return Measurements(
            clock=self.clock,
            forward=self._forward,
            backward=self._backward,
            backward_input=self._backward_input,
            weight=self._weight,
            busy=self._busy,
            activation_bytes=self._activation_bytes,
            calibrations=self._calibrations,
            busy_wall_ns=self._busy_wall_ns,
        )


def _stall_ppm(wall_ns: int, processor_ns: int) -> int:
    """Wall over processor time in millionths; 1 in short steps, where one preemption would decide."""
    return wall_ns * 1_000_000 // processor_ns if wall_ns and processor_ns >= _MIN_STALL_NS else 1_000_000


def _split_whole(whole_ns: int, input_ns: int, weight_ns: int) -> tuple[int, int]:
    """Return the times of input and weight gradient of an item, with its full backwards divided as its split ones.

    DualPipeV splits the backward of some microbatches only.
    """
    split_ns = input_ns + weight_ns
    of_weight = weight_ns + (whole_ns * weight_ns // split_ns if split_ns else 0)
    return whole_ns + split_ns - of_weight, of_weight


LISTS = ("forward_ns", "backward_ns", "backward_weight_ns", "activation_bytes")
SCALARS = ("busy_ns", "peak_memory_bytes", "calibration_ns", "stall_ppm")


def cost_table(item_names: Sequence[str], names: Sequence[str], costs: Mapping[str, Any]) -> torch.Tensor:
    """Return the costs of a rank in the one shape that an all-gather needs.

    Args:
        item_names: All items, in list order.
        names: Items of the rank, in the order of the lists.
        costs: ``LISTS`` (None where not measured) and ``SCALARS`` of the rank: times in ns, memory in bytes.

    Returns:
        int64 ``[lists + 1, items + 1]``: a row per list with a place for each item, and 1 in the last column where the
        list was measured; the last row has the scalars.
    """
    index_of = {name: index for index, name in enumerate(item_names)}
    here = [index_of[name] for name in names]
    table = torch.zeros(len(LISTS) + 1, max(len(item_names), len(SCALARS)) + 1, dtype=torch.int64)
    for row, name in enumerate(LISTS):
        if costs[name] is not None:
            table[row, here] = torch.tensor(costs[name], dtype=torch.int64)
            table[row, -1] = 1
    table[-1, : len(SCALARS)] = torch.tensor([costs.get(name, 0) for name in SCALARS], dtype=torch.int64)
    return table


def merge_cost_tables(
    dims: ParallelDims,
    item_names: Sequence[str],
    names_of_rank: Sequence[tuple[str, ...]],
    tables: Sequence[torch.Tensor],
) -> list[dict[str, Any]]:
    """Return the costs of each pipeline rank: the maximum over its ranks of every number, and its ``items``.

    The slowest rank decides: its data- and tensor-parallel peers wait for it in their collectives.

    Args:
        dims: Parallel dimensions of the run.
        item_names: All items, in list order.
        names_of_rank: Items of each pipeline rank.
        tables: Result of :func:`cost_table` of each rank, int64 ``[lists + 1, items + 1]``.
    """
    index_of = {name: index for index, name in enumerate(item_names)}
    merged = []
    for pipeline_rank, names in enumerate(names_of_rank):
        largest = torch.stack([tables[rank] for rank in dims.ranks(pipeline=pipeline_rank)]).amax(0)
        here = [index_of[name] for name in names]
        costs: dict[str, Any] = {"items": names}
        for row, name in enumerate(LISTS):
            costs[name] = largest[row, here].tolist() if largest[row, -1] else None
        merged.append(costs | dict(zip(SCALARS, largest[-1].tolist(), strict=False)))
    return merged


class CostGather:
    """The costs of all ranks, gathered while the next step runs; a collective on the CPU.

    Args:
        world: Processes of the run.
        item_names: All items, in list order.
        names_of_rank: Items of each pipeline rank.
        local: What this rank has measured: :meth:`Measurements.result` and ``peak_memory_bytes``.
    """

    def __init__(
        self,
        world: World,
        item_names: Sequence[str],
        names_of_rank: Sequence[tuple[str, ...]],
        local: Mapping[str, Any],
    ) -> None:
        self._dims, self._item_names, self._names_of_rank = world.dims, item_names, names_of_rank
        table = cost_table(item_names, names_of_rank[world.pipeline_rank], local)
        self._tables = [torch.empty_like(table) for _ in range(world.size)]
        self._work = dist.all_gather(self._tables, table, group=world.groups.world, async_op=True)

    def wait(self) -> list[dict[str, Any]]:
        """Wait for all ranks and return :func:`merge_cost_tables`."""
        if self._work is not None:
            self._work.wait()
        return merge_cost_tables(self._dims, self._item_names, self._names_of_rank, self._tables)
