"""What a page shows of a run: read line by line from a run directory, and reduced while it is read.

    run.json        RunData.facts          configuration, versions, start
    metrics.jsonl   RunData.losses, ...    loss, step time and tokens of each step; validation losses
    profile.jsonl   RunData.add_record     cost of each layer, busy time and memory of each worker, results of plans
    plans/          RunData.partitions     stage boundaries of each plan
    events.jsonl    RunData.ended_utc      time of the last event; marks, where there is no profile

A missing or unreadable file leaves its part empty and adds a sentence to ``RunData.notes``: a page of what there is
helps more than an error. Callers check the lines of a profile by the rules of the format before they add them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..document import (
    DocumentError,
    finite_number,
    parse_json,
    read_any_json,
)
from ..log_parts import part_paths, read_part_lines
from .series import Columns, Track
from .units import plural

NEUTRAL_EVENTS = ("evaluated", "checkpoint")
"""Kinds of events that do not change the cost of a layer: they have no mark."""
MAX_MARKS = 400
"""Marks of a run; the newest are shown."""
MAX_NOT_FINITE = 20
"""Marks of losses that are not finite; the first ones."""
TRAINING_LOSSES = ("lm_loss", "loss")
"""Names of the loss of a step in ``metrics.jsonl``."""
_PLAN_NAME = re.compile(r"plan-(\d{6,})\.json")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The stages of a plan.

    Attributes:
        plan_id: number of the plan.
        items: names of the items of each stage, in the order of stages.
        workers: worker of each stage.
    """

    plan_id: int
    items: tuple[tuple[str, ...], ...]
    workers: tuple[int, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Index of the first item of every stage but the first."""
        ends, total = [], 0
        for names in self.items[:-1]:
            total += len(names)
            ends.append(total)
        return tuple(ends)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at the boundary after a step: ``migration`` or ``event``, a short name, a sentence."""

    step: int
    kind: str
    name: str
    text: str


@dataclass(kw_only=True)
class RunData:
    """A run, bounded in size.

    Attributes:
        name: of the run directory.
        run: ``run.json``; empty if there is none.
        header: the newest header of the profile; empty if there is none.
        starts: times at which segments of the profile started.
        losses: name to values by step, validation losses included.
        not_finite: steps whose loss was not finite; the value is 1.
        step_ns, tokens: of each step.
        costs: forward plus backward time of each item, a microbatch, in ns.
        loads: the same of each stage.
        workers: ids of all workers in the order of their first header; released ones included.
        memory: peak memory of each of ``workers``, in bytes.
        bubble: share of the workers' time without arithmetic; empty with one worker.
        num_workers: workers with a stage.
        active: first step of each active plan, recorded or not, and its number, in order.
        partitions: the plans of the run, by number.
        results: records of the profile about plans, by number.
        marks: migrations and changes of the model.
        notes: what could not be read.
        ended_utc: time of the newest event.
    """

    name: str
    run: Mapping[str, Any] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)
    starts: list[str] = field(default_factory=list)
    losses: dict[str, Track] = field(default_factory=dict)
    not_finite: Track = field(default_factory=Track)
    step_ns: Track = field(default_factory=Track)
    profiled_ns: Track = field(default_factory=Track)
    tokens: Track = field(default_factory=Track)
    costs: Columns = field(default_factory=Columns)
    loads: Columns = field(default_factory=Columns)
    workers: list[int] = field(default_factory=list)
    memory: Columns = field(default_factory=Columns)
    bubble: Track = field(default_factory=Track)
    num_workers: Track = field(default_factory=Track)
    active: list[tuple[int, int]] = field(default_factory=list)
    partitions: Mapping[int, Partition] = field(default_factory=dict)
    results: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended_utc: str | None = None
    _work: list[float | None] = field(default_factory=list)
    _next_start: tuple[str, str] | None = None
    _last_step: int = 0
    _positions: list[int] = field(default_factory=list)

    @property
    def noun(self) -> str:
        """What a plan moves: ``layer``, or ``item`` where attention and MLP of a layer are placed separately."""
        return "layer" if self.header.get("granularity") == "layer" else "item"

    def count_text(self, names: Iterable[str]) -> str:
        """The number of these items in the unit of ``noun``: ``2 layers``."""
        return plural(self.count(names), self.noun)

    def count(self, names: Iterable[str]) -> int:
        """The number of these items, or of the layers that they are parts of."""
        if self.noun == "item":
            return len(set(names))
        layers = {item["name"]: item["layer"] for item in self.header["items"]}
        return len({layers.get(name, name) for name in names})

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Add one valid record of the profile, in the order of the file."""
        match record["record"]:
            case "header":
                self._next_start = _start_text(self.header, record)
                self.header = record
                self._work = [None] * len(record["items"])
                ids = [worker["worker"] for worker in record["workers"]]
                self.workers += [each for each in ids if each not in self.workers]
                self._positions = [self.workers.index(each) for each in ids]
                if "created_utc" in record:
                    self.starts.append(record["created_utc"])
            case "step" if self.header:
                self._add_step(record)
            case "event" if record["kind"] not in NEUTRAL_EVENTS:
                self._mark(Mark(step=record["step"], kind="event", name=record["kind"], text=_event_text(record)))
            case "plan_result":
                self._add_result(record)

    def _add_result(self, record: Mapping[str, Any]) -> None:
        self.results[record["plan_id"]] = record
        self._last_step = record["step"]
        if record["result"] in ("applied", "rolled_back"):
            name = f"plan {record['plan_id']}" + ("" if record["result"] == "applied" else " rolled back")
            self._mark(Mark(step=record["step"], kind="migration", name=name, text=record["reason"]))

    def _mark(self, mark: Mark) -> None:
        self.marks.append(mark)
        if len(self.marks) > 2 * MAX_MARKS:
            del self.marks[:-MAX_MARKS]

    def _add_step(self, record: Mapping[str, Any]) -> None:
        step, plan_id, step_ns = record["step"], record["plan_id"], record["step_ns"]
        if self.profiled_ns.steps and step <= self.profiled_ns.steps[-1]:
            self._resume(step)
        if self._next_start is not None and self.profiled_ns.steps:
            name, text = self._next_start
            # The first step of a segment may have no record; a resumed step may be before the last one of the
            # previous segment.
            self._mark(Mark(step=min(step - 1, self._last_step), kind="event", name=name, text=text))
        self._next_start = None
        before = self.profiled_ns.steps[-1] if len(self.profiled_ns) else step
        self.profiled_ns.add(step, step_ns)
        self._last_step = step
        work = _work(record)
        self.costs.add(step, work)
        self._work = [old if new is None else new for old, new in zip(self._work, work, strict=False)]
        partition = self.partitions.get(plan_id)
        if not self.active or self.active[-1][1] != plan_id:
            first = self._first_step(plan_id, before, step)
            self.active.append((first, plan_id))
            if partition is not None and first < step:
                self.num_workers.add(first, len(set(partition.workers)))
        if partition is not None:
            self.num_workers.add(step, len(set(partition.workers)))
            self.loads.add(step, _stage_loads(self._work, partition))
        if any(value is not None for value in record["peak_memory_bytes"]):
            peaks: list[float | None] = [None] * len(self.workers)
            for position, value in zip(self._positions, record["peak_memory_bytes"], strict=True):
                peaks[position] = value
            self.memory.add(step, peaks)
        busy = [value for value in record["busy_ns"] if value is not None]
        # One pipeline rank waits for no other: the rest of its step is optimizer, data and logs.
        if step_ns and len(busy) == len(record["busy_ns"]) > 1:
            self.bubble.add(step, max(0.0, 1 - sum(busy) / len(busy) / step_ns))

    def _first_step(self, plan_id: int, before: int, step: int) -> int:
        """The first step of a plan that became active between two recorded steps."""
        result = self.results.get(plan_id, {})
        if result.get("result") == "applied" and before <= result["step"] < step:
            return int(result["step"]) + 1
        return step

    def _resume(self, step: int) -> None:
        """Forget what was recorded from ``step`` on: the run resumed from a checkpoint before it."""
        for columns in (self.costs, self.loads, self.memory):
            columns.resume(step)
        self.active = [each for each in self.active if each[0] < step]
        self.marks = [mark for mark in self.marks if mark.step < step]

    def finish(self) -> None:
        """Add what follows from all files together; called once, after the last line."""
        if not len(self.step_ns):
            self.step_ns = self.profiled_ns
        for first, last in _ranges(self.not_finite.steps)[:MAX_NOT_FINITE]:
            steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
            self.marks.append(Mark(step=first - 1, kind="event", name="loss not finite", text=f"in {steps}"))
        self.marks.sort(key=lambda mark: mark.step)
        del self.marks[:-MAX_MARKS]


def _ranges(steps: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last step of each run of consecutive steps."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return ranges


def _start_text(before: Mapping[str, Any], header: Mapping[str, Any]) -> tuple[str, str] | None:
    """Name and sentence of the mark of a new segment; None for the first one."""
    if not before:
        return None
    fewer = len(before["workers"]) - len(header["workers"])
    if fewer > 0:
        return f"released {plural(fewer, 'worker')}", f"{plural(len(header['workers']), 'worker')} remain in use"
    return "restart", f"start {header['segment']:,} of the run, on {plural(len(header['workers']), 'worker')}"


def _event_text(record: Mapping[str, Any]) -> str:
    detail = record.get("detail") or {}
    parts = [f"{key}: {_brief(value)}" for key, value in list(detail.items())[:4]]
    return f"{record['kind']} after step {record['step']:,}" + (f" ({'; '.join(parts)})" if parts else "")


def _brief(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            return "none"
        return str(value[0]) if len(value) == 1 else f"{len(value):,} from {value[0]} to {value[-1]}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _work(record: Mapping[str, Any]) -> list[float | None]:
    """Forward plus backward time of each item; None where a part was not sampled."""
    names = ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns")
    parts = [record[name] for name in names if record.get(name) is not None]
    return [None if None in values else float(sum(values)) for values in zip(*parts, strict=True)]


def _stage_loads(work: Sequence[float | None], partition: Partition) -> list[float | None]:
    ends = [*partition.cuts, len(work)]
    loads: list[float | None] = []
    for first, last in zip([0, *ends], ends, strict=False):
        values = work[first:last]
        known = [value for value in values if value is not None]
        loads.append(math.fsum(known) if len(known) == len(values) else None)
    return loads


def read_partitions(folder: Path) -> dict[int, Partition]:
    """The plans of a folder that can be read, by number; plans that are still being written are left out."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (match := _PLAN_NAME.fullmatch(path.name)) is None:
            continue
        try:
            document = read_any_json(path)
            stages = sorted(document["stages"], key=lambda stage: stage["stage"])
            found[int(match[1])] = Partition(
                plan_id=int(match[1]),
                items=tuple(tuple(map(str, stage["items"])) for stage in stages),
                workers=tuple(int(stage["worker"]) for stage in stages),
            )
        except (DocumentError, LookupError, TypeError, ValueError, OverflowError):
            continue
    return found


def read_run_files(run: Path) -> RunData:
    """The run without its profile: the caller adds the records, then calls ``finish``.

    Args:
        run: run directory, or a profile.
    """
    if not run.is_dir():
        data = RunData(name=run.name)
        data.notes.append("This page was made from a profile alone: there are no losses, plans and settings.")
        return data
    data = RunData(name=run.resolve().name, partitions=read_partitions(run / "plans"))
    try:
        document = read_any_json(run / "run.json")
        data.run = document if isinstance(document, Mapping) else {}
    except DocumentError as error:
        data.notes.append(f"Model, settings and versions are missing: {error}.")
    try:
        _read_metrics(data, run / "metrics.jsonl")
    except DocumentError as error:
        data.notes.append(f"Losses are missing: {error}.")
    with suppress(DocumentError):  # a run without an event yet has no file
        _read_events(data, run / "events.jsonl", with_marks=not part_paths(run / "profile.jsonl"))
    return data


class _Lines:
    """The lines of a document that have a step; ``invalid`` counts the others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.invalid = 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for line in read_part_lines(self.path):
            try:
                value = parse_json(line)
            except ValueError:
                value = None
            if isinstance(value, Mapping) and isinstance(value.get("step"), int) and 0 <= value["step"] < 1 << 62:
                yield value
            else:
                self.invalid += 1  # a damaged line is not worth the page


def _number(value: Any) -> float | None:
    return finite_number(value)


def _read_metrics(data: RunData, path: Path) -> None:
    lines = _Lines(path)
    for line in lines:
        step = line["step"]
        for name in line:
            if name.endswith("_loss") or name == "loss":
                _add_loss(data, name, step, line[name])
        if (step_ns := _number(line.get("step_ns"))) is not None:
            data.step_ns.add(step, step_ns)
            data.tokens.add(step, _number(line.get("tokens")) or 0.0)
    if lines.invalid:
        verb = "is" if lines.invalid == 1 else "are"
        data.notes.append(
            f"{plural(lines.invalid, 'line')} of {path.name} {verb} left out: not a JSON object with a step."
        )


def _add_loss(data: RunData, name: str, step: int, value: Any) -> None:
    track = data.losses.setdefault(name, Track())
    number = _number(value)
    if number is not None:
        track.add(step, number)
    elif value is None:  # as run.md states, a number that is not finite
        track.resume(step)
    if name in TRAINING_LOSSES:
        data.not_finite.resume(step)
        if value is None:
            data.not_finite.add(step, 1.0)


def _read_events(data: RunData, path: Path, *, with_marks: bool) -> None:
    for line in _Lines(path):
        kind, text = str(line.get("kind")), str(line.get("message"))
        data.ended_utc = str(line.get("time_utc")) if line.get("time_utc") else data.ended_utc
        if with_marks and kind == "plan_applied":
            data.add_record(
                {"record": "plan_result", "plan_id": line.get("plan_id", 0), "step": line["step"], "result": "applied"}
                | {"reason": text, "pause_ns": line.get("pause_ns"), "bytes": line.get("bytes")}
            )
        elif with_marks and kind in ("pruned", "frozen", "released"):
            data._mark(Mark(step=line["step"], kind="event", name=kind, text=text))


def moved_items(before: Partition | None, after: Partition | None) -> list[str]:
    """The items that have another worker in the second partition."""
    if before is None or after is None:
        return []
    owner = {name: worker for names, worker in zip(before.items, before.workers, strict=True) for name in names}
    return [
        name
        for names, worker in zip(after.items, after.workers, strict=True)
        for name in names
        if owner.get(name, worker) != worker
    ]
