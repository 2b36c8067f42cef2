"""Writes the profile, ``profile.jsonl``: one function for each kind of line. The specification is ``profile.md``.

Times are integer nanoseconds and sizes integer bytes. In per-item and per-worker lists None is "not sampled" and 0 is
"did not run".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .. import __version__
from .._common.document import (
    DocumentError,
    Problem,
    WriterError,
    append_line,
    append_lines,
    envelope,
    parse_json,
    read_lines,
)
from .._common.log_parts import Rotation, part_paths, rotate
from .profile_lines import FORMAT, VERSION, line_problems

# Kind of the event with new relative speeds of the workers.
WORKER_SPEED = "worker_speed"
# Key of a header that begins a part of a rotated profile and repeats the header of the part before.
CONTINUES = "x_continues"
WRITTEN_BY = f"dynmo-train {__version__}"

PlanOutcome = Literal["applied", "unchanged", "refused", "superseded", "rolled_back"]
Samples = Sequence[int | None]


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The model of a run."""

    family: str
    num_layers: int
    hidden_size: int
    sequence_length: int


@dataclass(frozen=True, kw_only=True)
class LinkInfo:
    """The measured link between neighboring workers."""

    bandwidth_bytes_per_s: int
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """One pipeline position with all its tensor- and data-parallel ranks.

    ``worker`` is its id for life; ``memory_bytes`` is None where unknown; ``relative_speed`` 1 is normal;
    ``releasable`` is False for the worker whose host holds the rendezvous store.
    """

    worker: int
    ranks: Sequence[int]
    hosts: Sequence[str]
    device: Literal["cpu", "cuda"]
    memory_bytes: int | None
    relative_speed: float = 1.0
    releasable: bool = False


@dataclass(frozen=True, kw_only=True)
class ItemInfo:
    """One item of the layer list at the finest granularity; ``boundary_bytes`` leave it, a microbatch.

    ``x_attention_window``: keys that a token attends to in this item, where layers differ; None where these are all.
    """

    name: str
    layer: str
    kind: Literal["embedding", "attention", "cross_attention", "mlp", "head", "layer"]
    param_count: int
    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    boundary_bytes: int
    cut_before: bool
    tied_to: str | None = None
    x_attention_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Schedule, granularity and parallel sizes of a segment of the run."""

    schedule: str
    virtual_stages_per_worker: int
    granularity: str
    microbatches: int
    micro_batch_size: int
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1


def analytic_keys(
    *, heads: int, key_value_width: int, window: int | None, context_parallel_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ``x_`` keys that costs are computed from: those of ``model``, and those of the header.

    Args:
        heads: Attention heads of a layer.
        key_value_width: Elements of the keys and values of a token in a layer.
        window: Keys that a token attends to; None means all.
        context_parallel_size: Ranks that share the tokens of a sample, which ``data_parallel_size`` counts, too.
    """
    model = {"x_num_attention_heads": heads, "x_key_value_width": key_value_width}
    context = {"x_context_parallel_size": context_parallel_size}
    return (
        model if window is None else {**model, "x_attention_window": window},
        context if context_parallel_size > 1 else {},
    )


def _plain(info: Any) -> dict[str, Any]:
    fields = asdict(info).items()
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields}
    return {name: value for name, value in plain.items() if value is not None or not name.startswith("x_")}


def header_record(
    *,
    run_id: str,
    segment: int,
    model: ModelInfo,
    layout: Layout,
    link: LinkInfo | None,
    workers: Sequence[WorkerInfo],
    items: Sequence[ItemInfo],
    replica_link: LinkInfo | None = None,
) -> dict[str, Any]:
    """Return the first line of a segment; ``items`` are in layer order, which all per-item lists follow."""
    return {
        **envelope(FORMAT, VERSION, WRITTEN_BY),
        "record": "header",
        "run_id": run_id,
        "segment": segment,
        "model": _plain(model),
        **_plain(layout),
        "link": None if link is None else _plain(link),
        **({} if replica_link is None else {"x_replica_link": _plain(replica_link)}),
        "workers": [_plain(worker) for worker in workers],
        "items": [_plain(item) for item in items],
    }


def step_record(
    *,
    step: int,
    plan_id: int,
    step_ns: int,
    forward_ns: Samples,
    activation_bytes: Samples,
    busy_ns: Samples,
    peak_memory_bytes: Samples,
    backward_ns: Samples | None = None,
    backward_input_ns: Samples | None = None,
    backward_weight_ns: Samples | None = None,
) -> dict[str, Any]:
    """Return the line of one optimizer step: costs per item (means per microbatch) and per worker.

    Args:
        step: Optimizer step.
        plan_id: Active plan.
        step_ns: Wall-clock time of the step.
        forward_ns: Per item.
        activation_bytes: Per item, per microbatch.
        busy_ns: Per worker, over the step.
        peak_memory_bytes: Per worker.
        backward_ns: Per item, the full backward; or, instead of it,
        backward_input_ns: per item, input gradients, and
        backward_weight_ns: per item, weight gradients, where the schedule splits the backward.

    Raises:
        ValueError: Neither ``backward_ns`` alone nor both parts alone are given.
    """
    given = (backward_ns is not None, backward_input_ns is not None, backward_weight_ns is not None)
    if given not in ((True, False, False), (False, True, True)):
        raise ValueError("give backward_ns, or both backward_input_ns and backward_weight_ns")
    lists = {
        "forward_ns": forward_ns,
        "backward_ns": backward_ns,
        "backward_input_ns": backward_input_ns,
        "backward_weight_ns": backward_weight_ns,
        "activation_bytes": activation_bytes,
        "busy_ns": busy_ns,
        "peak_memory_bytes": peak_memory_bytes,
    }
    record = {"record": "step", "step": step, "plan_id": plan_id, "step_ns": step_ns}
    return record | {name: list(values) for name, values in lists.items() if values is not None}


def event_record(*, step: int, kind: str, detail: Mapping[str, Any], next_expected_step: int | None) -> dict[str, Any]:
    """Return the line of an event after ``step``; ``next_expected_step`` is when the next of its kind is due."""
    return {
        "record": "event",
        "step": step,
        "kind": kind,
        "detail": dict(detail),
        "next_expected_step": next_expected_step,
    }


def plan_request_record(step: int) -> dict[str, Any]:
    """Return the line of a trainer that waits at the boundary after ``step`` for a plan that has read up to it."""
    return {"record": "plan_request", "step": step}


def plan_result_record(
    *, plan_id: int, step: int, result: PlanOutcome, pause_ns: int, num_bytes: int, reason: str
) -> dict[str, Any]:
    """Return the line with the result of a plan.

    Args:
        plan_id: number of the plan.
        step: the result is of the boundary after this step.
        result: what became of the plan.
        pause_ns: time that the migration took from training; 0 where nothing moved.
        num_bytes: bytes that moved between workers.
        reason: why, for people.
    """
    return {
        "record": "plan_result",
        "plan_id": plan_id,
        "step": step,
        "result": result,
        "pause_ns": pause_ns,
        "bytes": num_bytes,
        "reason": reason,
    }


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line to the profile.

    Raises:
        WriterError: The line breaks the format; nothing is written.
    """
    _check(path, record)
    append_line(path, record)


def _check(path: Path, record: Mapping[str, Any]) -> None:
    if problems := line_problems(record):
        raise WriterError(str(path), problems)


class ProfileAppender:
    """Appends to a profile that is rotated. Each part begins with a header: a copy, unless a new segment begins there.

    The copy has the relative speeds that were measured last, so that a part does not need the older ones.

    Args:
        path: the profile.
        rotation: when to start a new part, and how many to keep.
    """

    def __init__(self, path: Path, rotation: Rotation) -> None:
        self._path, self._rotation = path, rotation
        self._header: dict[str, Any] = {}
        self._header_bytes = 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one line, in a new part if the last one is full.

        Raises:
            WriterError: The line breaks the format; nothing is written.
            OSError: See ``append_line``.
        """
        _check(self._path, record)
        # A part has several times the size of its header, which may have megabytes.
        rotate(self._path, self._rotation, 4 * self._header_bytes)
        is_header = record["record"] == "header"
        is_new = not self._path.exists() or not self._path.stat().st_size
        copies = (self._header,) if is_new and self._header and not is_header else ()
        append_lines(self._path, (*copies, record))
        # Only once it is written: lines that wait for a full disk belong to the header before them.
        if is_header:
            self._header = {**record, CONTINUES: True}
            self._header_bytes = len(json.dumps(self._header))
        elif record["record"] == "event" and record["kind"] == WORKER_SPEED and self._header:
            detail = record["detail"]
            speeds = dict(zip(detail["workers"], detail["relative_speed"], strict=True))
            workers = [
                {**worker, "relative_speed": speeds.get(worker["worker"], worker["relative_speed"])}
                for worker in self._header["workers"]
            ]
            self._header = {**self._header, "workers": workers}


def next_segment(path: Path) -> int:
    """Return the segment of the next header: one above that of the last complete header, 0 in a new profile.

    Each part begins with a header, so that the newest part with a line is enough.

    Raises:
        DocumentError: a line with a header is damaged; a guessed segment could repeat one.
    """
    for part in reversed(part_paths(path)):
        segment = None
        for number, line in enumerate(read_lines(part), 1):
            if b'"header"' not in line:
                continue
            try:
                record = parse_json(line)
                segment = record["segment"] + 1 if record["record"] == "header" else segment
            except (ValueError, KeyError, TypeError) as error:
                raise DocumentError(str(part), [Problem(f"line {number}", "json", str(error))]) from error
        if segment is not None:
            return int(segment)
    return 0
