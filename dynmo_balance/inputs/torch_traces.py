"""Layer times in a trace of ``torch.profiler``, recorded with ``with_stack=True`` or with named ranges.

Such a trace has an event for each call of a module, named by class and instance (``nn.Module: Block_3``), the
operators with their sequence numbers, the backward steps with the sequence number of their operator, and on a GPU the
kernels with the call that launched them. The blocks are the instances of the class with one instance per layer (of
several, the class that takes the longest). Work of the model before the first block is the embedding, after the last
one the head. Work outside the model, such as a loss or an optimizer, is not counted in the forward pass.

Without modules the ranges of ``record_function`` are the blocks: ``layers.0``, ``model.layers.0`` or any other name
with the number of the layer at its end, once per layer; ranges named ``embedding`` and ``head`` are those ends.

A backward step belongs to the block of its operator; a gradient accumulation belongs to the block of the step before
it. Without kernels the CPU times count, with kernels those of the kernels::

    forward thread   | nn.Module: GPT_0 ......................................|     the root: one per pass
                     |  embedding  | Block_0 ... | Block_1 ... |  head        |
    operators           aten::mm, sequence number 7 -----------+
    backward thread  evaluate_function: MmBackward0, sequence number 7         -> the block of operator 7
                     evaluate_function: AccumulateGrad, no such number         -> the block of the step before it
    GPU              kernel, correlation 42 <- cudaLaunchKernel, correlation 42 -> the owner of the launch
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._common.errors import UsageError

Event = Mapping[str, Any]
_RANGE = re.compile(r"(.*?)(\d{1,9})")
_MODULE = re.compile(r"nn\.Module: (.+)_(\d{1,9})")
_BACKWARD = "autograd::engine::evaluate_function: "
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Mean times of a pass in us: embedding, each layer in order, head.

    Attributes:
        forward_us, backward_us: the times.
        unknown: positions of the ends that the trace does not name.
    """

    # Microseconds: the unit of ``ts`` and ``dur`` in the Trace Event Format.
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    unknown: tuple[int, ...] = ()


class _Spans:
    """Non-overlapping intervals of one thread, searched by time."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events: list[Event] = []
        # By start, the longest first: nested calls lie within an interval that is already present and are skipped.
        for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            if not self.events or event["ts"] >= self.events[-1]["ts"] + self.events[-1]["dur"]:
                self.events.append(event)
        self._starts = [event["ts"] for event in self.events]

    def before(self, instant: float) -> int:
        """The last interval that began by ``instant``, in us; -1 if none did."""
        return bisect_right(self._starts, instant) - 1

    def at(self, instant: float) -> int:
        """The interval that contains ``instant``, in us; -1 if there is none."""
        found = self.before(instant)
        inside = found >= 0 and instant < self.events[found]["ts"] + self.events[found]["dur"]
        return found if inside else -1


def _number(event: Event, name: str) -> int:
    """An integer of an event's arguments; -1 if it is missing."""
    arguments = event.get("args")
    value = arguments.get(name) if isinstance(arguments, dict) else None
    return value if isinstance(value, int) else -1


def has_layers(events: Sequence[Event], layers: int) -> bool:
    """Whether a trace has module events, or a named range for each of ``layers`` layers."""
    return any(_MODULE.fullmatch(str(event.get("name", ""))) for event in events) or bool(_ranges(events, layers))


def _ranges(events: Sequence[Event], layers: int) -> dict[str, dict[int, list[Event]]]:
    """For each name that has a number per layer at its end, the ranges of each number."""
    found: dict[str, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        match = _RANGE.fullmatch(str(event.get("name", "")))
        if match and event.get("cat", "user_annotation") == "user_annotation":
            found[match[1]][int(match[2])].append(event)
    return {name: calls for name, calls in found.items() if len(calls) == layers and len(calls) == max(calls) + 1}


def layer_times(events: Sequence[Event], layers: int, source: str) -> LayerTimes:
    """The times of the layers in a trace.

    Raises:
        UsageError: no module class has one instance per layer, or there is no backward pass.
    """
    # A trace is a file of another program: events without usable times or threads are ignored instead of trusted.
    timed = [
        one
        for one in events
        if all(isinstance(one.get(key), int | float) for key in ("ts", "dur"))
        and isinstance(one.get("tid"), int | str | None)
    ]
    reader = _Reader(timed, layers, source)
    forward, backward = reader.times()
    if not any(backward):
        raise UsageError(f"{source}: has no backward steps (autograd::engine::evaluate_function); trace a whole step")
    return LayerTimes(
        forward_us=tuple(one / reader.passes for one in forward),
        backward_us=tuple(one / reader.passes for one in backward),
        unknown=reader.unknown,
    )


class _Reader:
    def __init__(self, events: Sequence[Event], layers: int, source: str) -> None:
        self._events, self._layers = events, layers
        by_thread: dict[Any, list[Event]] = defaultdict(list)
        for event in events:
            if str(event.get("name", "")).startswith(_BACKWARD):
                by_thread[event.get("tid")].append(event)
        self._backward = {thread: _Spans(found) for thread, found in by_thread.items()}
        has_modules = any(_MODULE.fullmatch(str(event.get("name", ""))) for event in events)
        self._blocks, self._index = self._find_blocks(source) if has_modules else self._find_ranges()
        ends = () if has_modules else (-1, layers)
        self.unknown = tuple(end + 1 for end in ends if end not in self._index)
        self._thread = self._blocks.events[0].get("tid")
        self._roots = self._find_roots()
        self.passes = sum(index == 0 for index in self._index)

    def _in_backward(self, event: Event) -> int:
        spans = self._backward.get(event.get("tid"))
        return -1 if spans is None else spans.at(event["ts"])

    def _modules(self) -> dict[str, dict[int, list[Event]]]:
        """For each class and instance its calls in the forward pass, without recomputation."""
        found: dict[str, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for event in self._events:
            match = _MODULE.fullmatch(str(event.get("name", "")))
            # Activation checkpointing calls modules again inside the backward pass; that time is backward time.
            if match and self._in_backward(event) < 0:
                found[match[1]][int(match[2])].append(event)
        return found

    def _find_blocks(self, source: str) -> tuple[_Spans, list[int]]:
        """The calls of the blocks in order, and the index of the block of each."""
        modules = self._modules()
        fitting = {
            name: calls
            for name, calls in modules.items()
            if len(calls) == self._layers and len({len(one) for one in calls.values()}) == 1
        }
        if not fitting:
            present = ", ".join(f"{len(calls)} {name}" for name, calls in sorted(modules.items()))
            raise UsageError(
                f"{source}: no module class has {self._layers} instances; it has {present or 'no modules'};"
                " use a trace of one process that executes all layers, and the header of that model"
            )
        # Attention and MLP have one instance per layer too; the block contains them, so it takes longest.
        name = max(fitting, key=lambda one: sum(event["dur"] for calls in fitting[one].values() for event in calls))
        order = sorted(fitting[name], key=lambda instance: min(event["ts"] for event in fitting[name][instance]))
        number = {id(event): at for at, instance in enumerate(order) for event in fitting[name][instance]}
        spans = _Spans([event for calls in fitting[name].values() for event in calls])
        return spans, [number[id(event)] for event in spans.events]

    def _find_ranges(self) -> tuple[_Spans, list[int]]:
        """The named ranges in order, and the index of the layer of each; -1 is the embedding, the last one the head."""
        fitting = _ranges(self._events, self._layers)
        name = max(fitting, key=lambda one: sum(event["dur"] for calls in fitting[one].values() for event in calls))
        number = {id(event): at for at, calls in fitting[name].items() for event in calls}
        ends = {"embedding": -1, "head": self._layers}
        for event in self._events:
            if event.get("name") in ends and event.get("cat", "user_annotation") == "user_annotation":
                number[id(event)] = ends[str(event["name"])]
        inside = [event for event in self._events if id(event) in number and self._in_backward(event) < 0]
        spans = _Spans(inside)
        return spans, [number[id(event)] for event in spans.events]

    def _find_roots(self) -> _Spans:
        """The outermost modules that contain a first block: the model, once per pass."""
        starts = sorted(e["ts"] for e, index in zip(self._blocks.events, self._index, strict=True) if index == 0)
        containing = []
        for event in self._events:
            if event.get("tid") == self._thread and _MODULE.fullmatch(str(event.get("name", ""))):
                at = bisect_right(starts, event["ts"])
                if at < len(starts) and starts[at] < event["ts"] + event["dur"] and self._in_backward(event) < 0:
                    containing.append(event)
        return _Spans(containing)

    def _owner(self, instant: float, *, outside: bool) -> int:
        """0 for the embedding, then the layers, then the head; outside the model the head (``outside``) or -1."""
        at = self._blocks.at(instant)
        if at >= 0:
            return self._index[at] + 1
        if self._roots.at(instant) < 0:
            return self._layers + 1 if outside else -1
        last = self._blocks.before(instant)
        root = self._roots.events[self._roots.at(instant)]
        if last < 0 or self._blocks.events[last]["ts"] < root["ts"]:
            return 0
        return self._index[last] + 2 if self._index[last] + 1 < self._layers else self._layers + 1

    def _owners_of_steps(self) -> dict[Any, list[int]]:
        """The owner of each backward step, by thread."""
        made: dict[int, int] = {}
        for event in sorted((e for e in self._events if e.get("cat") == "cpu_op"), key=lambda one: one["ts"]):
            number = _number(event, "Sequence number")
            if number >= 0 and event.get("tid") == self._thread and self._in_backward(event) < 0:
                made[number] = self._owner(event["ts"], outside=True)
        owners: dict[Any, list[int]] = {}
        for thread, spans in self._backward.items():
            last, found = self._layers + 1, []
            for event in spans.events:
                # The engine accumulates a weight's gradient right after the operator that made it.
                last = made.get(_number(event, "Sequence number"), last)
                found.append(last)
            owners[thread] = found
        return owners

    def times(self) -> tuple[list[float], list[float]]:
        """Forward and backward time of embedding, layers and head in us, summed over all passes."""
        forward, backward = [0.0] * (self._layers + 2), [0.0] * (self._layers + 2)
        owners = self._owners_of_steps()
        launches = {_number(event, "correlation"): event for event in self._events if event.get("cat") in _LAUNCHES}
        kernels = [event for event in self._events if event.get("cat") in _KERNELS]
        for kernel in kernels:
            launch = launches.get(_number(kernel, "correlation"))
            if launch is None:
                continue
            step = self._in_backward(launch)
            owner = owners[launch.get("tid")][step] if step >= 0 else self._owner(launch["ts"], outside=False)
            if owner >= 0:
                (backward if step >= 0 else forward)[owner] += kernel["dur"]
        if kernels:
            return forward, backward  # on a GPU the CPU only launches; its times are not those of the layers
        for thread, spans in self._backward.items():
            for event, owner in zip(spans.events, owners[thread], strict=True):
                backward[owner] += event["dur"]
        for event, index in zip(self._blocks.events, self._index, strict=True):
            forward[index + 1] += event["dur"]
        for root in self._roots.events:
            inside = [e for e in self._blocks.events if root["ts"] <= e["ts"] < root["ts"] + root["dur"]]
            forward[0] += inside[0]["ts"] - root["ts"]
            forward[-1] += root["ts"] + root["dur"] - inside[-1]["ts"] - inside[-1]["dur"]
        return forward, backward
