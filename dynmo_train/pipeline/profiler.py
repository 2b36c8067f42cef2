"""Measures each item of a worker during sampled steps: forward, backward, activation bytes, and the worker's busy time.

Forward times stand around the item's call. Backward times stand between *marks*: identity functions at the item
boundaries, whose backward runs after all arithmetic of the later item and before that of the earlier one, because the
autograd engine takes ready nodes in reverse order of creation. Marks stand in every step, sampled or not, so that
sampling cannot change the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dynamics.technique import Event
from ..parallel.device_clock import Clock


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, profiler: LayerProfiler, position: int) -> torch.Tensor:
        ctx.profiler, ctx.position = profiler, position
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.profiler.gradient_reached(ctx.position)
        return grads[0], None, None


@dataclass
class _Totals:
    pairs: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))

    def mean_ns(self, clock: Clock, name: str, microbatches: int) -> int:
        return sum(clock.elapsed_ns(begin, end) for begin, end in self.pairs.get(name, ())) // microbatches


class LayerProfiler:
    """Collects the costs of one worker's items over a step.

    Not thread-safe: the schedule of a worker runs in one thread, and so does its autograd on CPU; on CUDA the device's
    autograd thread only records events while the schedule waits for it.

    ``always_marks`` says that somebody wants to hear of gradients in steps that are not sampled as well.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sampling, self.always_marks = False, False
        self._forward, self._backward, self._weight, self._busy = _Totals(), _Totals(), _Totals(), _Totals()
        self._activation_bytes: dict[str, int] = {}
        self._names: tuple[str, ...] = ()
        self._last: tuple[int, Any] | None = None
        self._listener: Callable[[int], None] | None = None

    def begin_step(self, sampling: bool, step: int) -> None:
        """Forget the last step; ``sampling`` says whether to measure this one, the run's ``step``."""
        self.sampling = sampling
        self._forward, self._backward, self._weight, self._busy = _Totals(), _Totals(), _Totals(), _Totals()
        self._activation_bytes = {}

    def events(self, step: int) -> Sequence[Event]:
        """What the probe itself has to tell after ``step``: nothing where costs are what arithmetic takes."""
        return ()

    def mark(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """``x`` itself; its gradient's arrival is the boundary before the item at ``position`` of the stage.

        Without effect in a step in which nobody asks for these arrivals.
        """
        if not ((self.sampling or self.always_marks) and torch.is_grad_enabled() and x.requires_grad):
            return x
        marked: torch.Tensor = _Mark.apply(x, self, position)  # type: ignore[no-untyped-call]
        return marked

    @contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Around the forward of one item."""
        if not self.sampling:
            yield
            return
        begin = self.clock.stamp()
        yield
        self._forward.pairs[name].append((begin, self.clock.stamp()))

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around one operation of the schedule on this worker."""
        if not self.sampling:
            yield
            return
        begin = self.clock.stamp()
        yield
        self._busy.pairs[""].append((begin, self.clock.stamp()))

    @contextmanager
    def backward(self, names: tuple[str, ...], *, whole: bool = True) -> Iterator[None]:
        """Around the backward of a stage with these items: the marks inside say where one ends and the next begins.

        ``whole`` is False where weight gradients are left over for later.
        """
        if not self.sampling or not names:
            yield
            return
        self._names, self._last = names, (len(names), self.clock.stamp())
        yield
        self._close_interval(0)
        self._last = None

    @contextmanager
    def telling(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Around a backward: ``listener`` is told each position from which on all gradients are complete."""
        self._listener = listener
        yield
        self._listener = None

    def gradient_reached(self, position: int) -> None:
        """Called in the backward when the gradient of the input of the item at ``position`` is complete."""
        if self._listener is not None:
            self._listener(position)
        if self.sampling and self._last is not None:
            self._close_interval(position)

    def _close_interval(self, position: int) -> None:
        """Give the time since the last mark to the items between it and ``position``: one, or the front's first few."""
        if self._last is None:
            return
        last_position, begin = self._last
        if position >= last_position:
            return
        now = self.clock.stamp()
        self._backward.pairs[self._names[last_position - 1]].append((begin, now))
        self._last = (position, now)

    @contextmanager
    def weight(self, name: str, share: float = 1.0) -> Iterator[None]:
        """Around a share of the weight gradients of one item, where the schedule splits the backward."""
        if not self.sampling:
            yield
            return
        begin = self.clock.stamp()
        yield
        self._weight.pairs[name].append((begin, self.clock.stamp()))

    @contextmanager
    def saved(self, name: str, ignored: Callable[[], set[int]]) -> Iterator[None]:
        """Around one item's forward, once a sampled step: the bytes that it keeps for its backward, each storage once.

        Args:
            name: of the item.
            ignored: data pointers of storages that are kept anyway (the parameters), asked for within the forward.
        """
        if not self.sampling or name in self._activation_bytes:
            yield
            return
        sizes: dict[int, int] = {}
        kept: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
            kept.update(() if kept else ignored())
            if storage is not None and storage.data_ptr() not in kept:
                sizes[storage.data_ptr()] = storage.nbytes()
            # Not the tensor itself: a node that saves its own output and whose backward never runs (a branch that no
            # loss uses) would hold itself, and with it the microbatch's graph for ever.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._activation_bytes[name] = sum(sizes.values())

    def activation_is(self, name: str, count: int) -> None:
        """State the bytes that an item keeps, where they are known (a checkpointed item keeps its input)."""
        if self.sampling:
            self._activation_bytes.setdefault(name, count)

    def result(self, names: tuple[str, ...], microbatches: int) -> dict[str, Any]:
        """Means of a microbatch, in the order of ``names``: the arrays of a profile's ``step`` line, and busy time."""
        split = bool(self._weight.pairs)
        backward = [self._backward.mean_ns(self.clock, name, microbatches) for name in names]
        weight = [self._weight.mean_ns(self.clock, name, microbatches) for name in names]
        return {
            "forward_ns": [self._forward.mean_ns(self.clock, name, microbatches) for name in names],
            "backward_ns": backward,
            "backward_weight_ns": weight if split else None,
            "activation_bytes": [self._activation_bytes.get(name, 0) for name in names],
            "busy_ns": sum(self.clock.elapsed_ns(begin, end) for begin, end in self._busy.pairs[""]),
        }
