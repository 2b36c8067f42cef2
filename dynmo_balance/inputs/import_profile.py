"""``profile import``: assign the measured times of other programs to the items of a profile's header.

* ``chrome-trace``: a trace of ``torch.profiler`` with modules or named ranges (see ``torch_traces``); or complete
  events (``ph`` X) named by an item followed by ``.forward``, ``.backward``, ``.backward_input`` or
  ``.backward_weight``, whose mean duration is used.
* ``deepspeed-log``, ``megatron-log``: times per worker; see ``timer_logs``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .._common.document import (
    MAX_TABLE_BYTES,
    finite_number,
    parse_any_json,
    read_text,
)
from .._common.errors import UsageError
from ..costs.cost_window import ItemCosts
from ..formats.plan import Plan
from ..formats.profile import Header
from ..partition import uniform
from ..planning.plan_builder import problem_of_run
from .timer_logs import SLOWEST, LoggedStep, deepspeed_steps, megatron_steps, spread, worker_times
from .torch_traces import has_layers, layer_times

MAX_US = 1e15
"""Of a time in a trace: 30 years."""
KINDS = ("forward", "backward", "backward_input", "backward_weight")


def _step(header: Header, step: int, forward: Sequence[int], **backward: Sequence[int]) -> dict[str, Any]:
    # None is "not sampled": these formats have no memory, and traces no time per worker.
    workers = len(header.workers)
    return {
        "record": "step",
        "step": step,
        "plan_id": 0,
        "step_ns": 0,
        "forward_ns": list(forward),
        **{name: list(values) for name, values in backward.items()},
        "activation_bytes": [None] * len(header.items),
        "busy_ns": [None] * workers,
        "peak_memory_bytes": [None] * workers,
    }


def _events(text: str, source: str) -> list[Mapping[str, Any]]:
    try:
        document = parse_any_json(text, MAX_TABLE_BYTES)
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from error
    # The Trace Event Format permits an object with ``traceEvents`` and a bare array.
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise UsageError(f"{source}: contains no list of trace events; record it with torch.profiler")
    return [
        event
        for event in events
        if isinstance(event, dict)
        and event.get("ph") == "X"
        and all(_is_time(event.get(key, 0)) for key in ("ts", "dur"))
    ]


def _is_time(value: Any) -> bool:
    """Whether a value is a number of microseconds whose sums are exact enough, and finite."""
    number = finite_number(value)
    return number is not None and abs(number) < MAX_US


def from_trace(
    text: str, source: str, header: Header, model: ItemCosts, workers_of_items: Sequence[int]
) -> list[dict[str, Any]]:
    """One step record of mean durations, of named events or of the modules of a ``torch.profiler`` trace.

    Args:
        text: the trace.
        source: its name, for messages.
        header: of the profile.
        model: costs that divide a layer's time among its items.
        workers_of_items: not used; all readers have the same signature.

    Raises:
        UsageError: the trace is not valid, or has no events for an item of the header.
    """
    events = _events(text, source)
    named = any(str(event.get("name", "")).endswith(".forward") for event in events)
    if not named and has_layers(events, len(_layers(header))):
        return [_from_modules(events, source, header, model)]
    spent: dict[tuple[str, str], list[float]] = {}
    for event in events:
        item, _, kind = str(event.get("name", "")).rpartition(".")
        if kind in KINDS and "dur" in event:
            spent.setdefault((item, kind), []).append(float(event["dur"]))
    missing = [item.name for item in header.items if (item.name, "forward") not in spent]
    if missing:
        raise UsageError(
            f"{source}: no events named {missing[0]}.forward (missing for {len(missing)} items), no modules of"
            f" torch.profiler, and no ranges named layers.0 to layers.{len(_layers(header)) - 1}; record it with"
            " with_stack=True, or each layer inside record_function"
        )

    def column(kind: str) -> list[int]:
        means = [spent.get((item.name, kind), [0.0]) for item in header.items]
        return [round(1000 * sum(values) / len(values)) for values in means]

    if any(kind in ("backward_input", "backward_weight") for _, kind in spent):
        split = {f"{kind}_ns": column(kind) for kind in ("backward_input", "backward_weight")}
        return [_step(header, 1, column("forward"), **split)]
    return [_step(header, 1, column("forward"), backward_ns=column("backward"))]


def _layers(header: Header) -> list[str]:
    """The layers between embedding and head."""
    kinds = {item.layer: item.kind for item in header.items}
    return [layer for layer, kind in kinds.items() if kind not in ("embedding", "head")]


def _from_modules(events: Sequence[Mapping[str, Any]], source: str, header: Header, model: ItemCosts) -> dict[str, Any]:
    """A step record of layer times; the time of a layer is divided among its items as in the model."""
    kinds = {item.layer: item.kind for item in header.items}
    layers = _layers(header)
    ends = [kind for kind in kinds.values() if kind in ("embedding", "head")]
    if ends != ["embedding", "head"]:
        raise UsageError(f"{source}: traces are read for models of one embedding, one stack of layers and one head")
    found = layer_times(events, len(layers), source)
    slot = {layer: at + 1 for at, layer in enumerate(layers)}
    workers_of_items = [
        slot.get(item.layer, 0 if item.kind == "embedding" else len(layers) + 1) for item in header.items
    ]
    backward = [b + w for b, w in zip(model.backward_input_ns, model.backward_weight_ns, strict=True)]

    def column(times: Sequence[float], modelled: Sequence[int]) -> list[int]:
        # Ends without a range take what they take of the layers' time in the model.
        inner = sum(ns for ns, at in zip(modelled, workers_of_items, strict=True) if 0 < at <= len(layers))
        times = list(times)
        for end in found.unknown:
            work = sum(ns for ns, at in zip(modelled, workers_of_items, strict=True) if at == end)
            times[end] = sum(times[1:-1]) * work / max(1, inner)
        shares = [max(1, ns) for ns in modelled]
        return spread({at: 1000 * us for at, us in enumerate(times)}, None, workers_of_items, shares)

    return _step(
        header,
        1,
        column(found.forward_us, model.forward_ns),
        backward_ns=column(found.backward_us, backward),
    )


def _from_log(
    steps: Sequence[LoggedStep],
    source: str,
    header: Header,
    model: ItemCosts,
    workers_of_items: Sequence[int],
    per: int,
) -> list[dict[str, Any]]:
    """One step record per logged step; ``per`` is the number of microbatches that a logged time includes."""
    backward = [b + w for b, w in zip(model.backward_input_ns, model.backward_weight_ns, strict=True)]
    records: list[dict[str, Any]] = []
    for number, logged in enumerate(steps, start=1):
        columns = []
        busy: dict[int, float] = {}
        for kind, modelled in zip(("forward", "backward"), (model.forward_ns, backward), strict=True):
            times = logged.times[kind]
            of_workers = worker_times(times, header, source)
            for worker, ms in of_workers.items():
                busy[worker] = busy.get(worker, 0.0) + ms * 1e6 * header.microbatches / per
            slowest = times[SLOWEST] * 1e6 / per if SLOWEST in times else None
            columns.append(
                spread({at: ms * 1e6 / per for at, ms in of_workers.items()}, slowest, workers_of_items, modelled)
            )
        # The format requires increasing steps. A restarted run repeats steps, and some logs have no numbers.
        last = records[-1]["step"] if records else 0
        step = number if logged.step is None or logged.step <= last else logged.step
        record = _step(header, max(step, last + 1), columns[0], backward_ns=columns[1])
        record["step_ns"] = round((logged.elapsed_ms or 0.0) * 1e6)
        record["busy_ns"] = [round(busy[at]) if at in busy else None for at in range(len(header.workers))]
        records.append(record)
    return records


def from_deepspeed(
    text: str, source: str, header: Header, model: ItemCosts, workers_of_items: Sequence[int]
) -> list[dict[str, Any]]:
    """One step record per logged microbatch; arguments as for ``from_trace``.

    Raises:
        UsageError: the log has no times of microbatches, or ranks that belong to no worker.
    """
    steps = list(deepspeed_steps(text))
    if not steps:
        raise UsageError(
            f"{source}: no line with fwd_microstep and bwd_microstep; log with wall_clock_breakdown, and check --kind"
        )
    return _from_log(steps, source, header, model, workers_of_items, 1)


def from_megatron(
    text: str, source: str, header: Header, model: ItemCosts, workers_of_items: Sequence[int]
) -> list[dict[str, Any]]:
    """One step record per logged step; arguments as for ``from_trace``.

    Raises:
        UsageError: the log has no forward and backward times, or ranks that belong to no worker.
    """
    steps = [step for step in megatron_steps(text) if all(step.times.get(kind) for kind in ("forward", "backward"))]
    if not steps:
        other = " it has forward-backward alone;" if "forward-backward" in text else ""
        raise UsageError(
            f"{source}: no times of forward-compute and backward-compute;{other} log with --timing-log-level 2, and"
            " check --kind"
        )
    return _from_log(steps, source, header, model, workers_of_items, header.microbatches)


SOURCES: Mapping[str, Callable[[str, str, Header, ItemCosts, Sequence[int]], list[dict[str, Any]]]] = {
    "chrome-trace": from_trace,
    "deepspeed-log": from_deepspeed,
    "megatron-log": from_megatron,
}


def item_workers(header: Header, model: ItemCosts, plan: Plan | None) -> list[int]:
    """The position in the header of each item's worker: as in the plan, or else Megatron's even split."""
    ids = [worker.worker for worker in header.workers]
    if plan is not None:
        return [ids.index(plan.owner[item.name]) for item in header.items]
    problem = problem_of_run(header, model)
    spans = pairwise(uniform.boundaries(problem))
    return [problem.positions[stage] for stage, (begin, end) in enumerate(spans) for _ in range(begin, end)]


def import_lines(
    kind: str, path: Path, header_line: bytes, header: Header, model: ItemCosts, plan: Plan | None = None
) -> bytes:
    """The lines of the new profile: the unchanged header, and one step record per measured step.

    Args:
        kind: format of the file, a key of ``SOURCES``.
        path: the file.
        header_line: the header's line of the profile that describes the run.
        header: the same, parsed.
        model: costs that divide a worker's time among its items.
        plan: the partition of the run; default: Megatron's even split.
    """
    text = read_text(path, MAX_TABLE_BYTES)
    records = SOURCES[kind](text, str(path), header, model, item_workers(header, model, plan))
    return b"\n".join([header_line, *(json.dumps(record).encode() for record in records), b""])
