"""Sums and last records of the files of a run, in bounded memory: what the live view needs of gigabytes of lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..._common.document import MAX_INTEGER
from ...formats.profile import CONTINUES, WORKER_SPEED

# Number of last steps that the means are over.
RECENT_STEPS = 20
# Points of a curve over the whole run; more than the columns of any terminal.
CURVE_POINTS = 512
_LAST_LOSSES = 60
_LAST_EVENTS = 5
_LAST_INCIDENTS = 20
_MAX_SKIPPED = 10_000
_MAX_RESULTS = 1_000


def mean(values: Sequence[float]) -> float | None:
    """The mean; None without values."""
    return sum(values) / len(values) if values else None


def resample(values: Sequence[float], count: int) -> list[float]:
    """Means of neighboring values.

    Args:
        values: values in order.
        count: maximum number of means.
    """
    if len(values) <= count:
        return list(values)
    edges = [at * len(values) // count for at in range(count + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


class Curve:
    """Means of a value over equal numbers of steps; merges neighbors beyond ``CURVE_POINTS`` points."""

    def __init__(self) -> None:
        self._stride = 1
        # Bucket number, sum and count; in the order of the steps.
        self._buckets: list[tuple[int, float, int]] = []

    def add(self, step: int, value: float) -> None:
        """Add the value of a step, which is later than all others."""
        bucket = step // self._stride
        if self._buckets and self._buckets[-1][0] == bucket:
            _, total, count = self._buckets[-1]
            self._buckets[-1] = (bucket, total + value, count + 1)
            return
        self._buckets.append((bucket, value, 1))
        if len(self._buckets) > CURVE_POINTS:
            merged: dict[int, tuple[float, int]] = {}
            for number, total, count in self._buckets:
                before = merged.get(number // 2, (0.0, 0))
                merged[number // 2] = (before[0] + total, before[1] + count)
            self._stride *= 2
            self._buckets = [(number, total, count) for number, (total, count) in merged.items()]

    def cut(self, step: int) -> None:
        """Discard the values of ``step`` and later ones, which a resumed run repeats."""
        while self._buckets and self._buckets[-1][0] * self._stride >= step:
            self._buckets.pop()

    def values(self) -> list[float]:
        """The means, in order."""
        return [total / count for _, total, count in self._buckets]


@dataclass(kw_only=True)
class MetricsSummary:
    """What ``metrics.jsonl`` showed so far."""

    step: int = 0
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LAST_LOSSES))
    loss_curve: Curve = field(default_factory=Curve)
    rate_curve: Curve = field(default_factory=Curve)
    num_skipped: int = 0
    last_skipped: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_SKIPPED))
    validation_loss: float | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of the file."""
        if line.get("validation_loss") is not None:
            self.validation_loss = float(line["validation_loss"])
        if "step_ns" not in line:
            return
        step, step_ns, tokens = int(line["step"]), int(line["step_ns"]), int(line["tokens"])
        if step <= self.step:
            self._cut(step)
        keys = ("learning_rate", "plan_id", "model_flops", "lm_loss")
        fields = {key: line[key] for key in keys if line.get(key) is not None}
        self.step = step
        self.recent.append({"step": step, "step_ns": step_ns, "tokens": tokens, **fields})
        if "lm_loss" in fields:
            self.losses.append((step, float(fields["lm_loss"])))
            self.loss_curve.add(step, float(fields["lm_loss"]))
        if step_ns:
            self.rate_curve.add(step, tokens / step_ns * 1e9)
        if not line.get("updated", True):
            self.num_skipped += 1
            self.last_skipped.append(step)

    def _cut(self, step: int) -> None:
        """Discard the steps that a run repeats after a resume from an older checkpoint."""
        self.recent = deque((each for each in self.recent if each["step"] < step), maxlen=RECENT_STEPS)
        self.losses = deque((each for each in self.losses if each[0] < step), maxlen=_LAST_LOSSES)
        self.loss_curve.cut(step)
        self.rate_curve.cut(step)
        while self.last_skipped and self.last_skipped[-1] >= step:
            self.last_skipped.pop()
            self.num_skipped -= 1

    def mean(self, value: Callable[[Mapping[str, Any]], float | None]) -> float | None:
        """Mean over the recent steps that have the value."""
        return mean([found for each in self.recent if (found := value(each)) is not None])

    def per_s(self, key: str) -> float | None:
        """Sum of a count over the recent steps, per second."""
        seconds = sum(each["step_ns"] for each in self.recent) / 1e9
        has_key = bool(self.recent) and all(key in each for each in self.recent)
        return sum(each[key] for each in self.recent) / seconds if seconds and has_key else None


def _count(value: Any) -> int:
    """A number of a record.

    Raises:
        ValueError: it is too large, so that quotients would be infinite.
    """
    number = int(value)
    if abs(number) > MAX_INTEGER:
        raise ValueError("a number of a record has more than 64 bits")
    return number


def _samples(values: Iterable[Any]) -> list[int]:
    """The numbers of a record, 0 for one that was not sampled; raises as ``_count``."""
    return [_count(value or 0) for value in values]


@dataclass(kw_only=True)
class ProfileSummary:
    """What ``profile.jsonl`` showed so far."""

    segment: int | None = None
    workers: list[dict[str, Any]] = field(default_factory=list)
    start_workers: frozenset[int] = frozenset()
    joined: list[int] = field(default_factory=list)
    measured: deque[tuple[int, list[int], list[int]]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    results: dict[int, tuple[str, int, str]] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of the file."""
        kind = line["record"]
        if kind == "header":
            self._start(line)
        elif kind == "step":
            # Copies: a record holds the times of every item, too.
            row = (_count(line["step_ns"]), _samples(line["busy_ns"]), _samples(line.get("peak_memory_bytes") or ()))
            self.measured.append(row)
        elif kind == "plan_result":
            self.results[int(line["plan_id"])] = (str(line["result"]), int(line["step"]), str(line["reason"]))
            while len(self.results) > _MAX_RESULTS:
                del self.results[next(iter(self.results))]
        elif kind == "event" and line["kind"] == WORKER_SPEED:
            speeds = dict(zip(line["detail"]["workers"], line["detail"]["relative_speed"], strict=True))
            for worker in self.workers:
                worker["relative_speed"] = float(speeds.get(worker["worker"], worker["relative_speed"]))
        elif kind == "event":
            self.expected.pop(line["kind"], None)
            if line.get("next_expected_step") is not None:
                self.expected[line["kind"]] = int(line["next_expected_step"])

    def _start(self, header: Mapping[str, Any]) -> None:
        if header.get(CONTINUES) and header.get("segment") == self.segment and self.segment is not None:
            return
        before = {each["worker"] for each in self.workers}
        # An earlier start may have had other workers, and its loads are over.
        self.measured.clear()
        self.workers = [
            {
                "worker": int(each["worker"]),
                "ranks": len(each["ranks"]),
                "memory_bytes": each.get("memory_bytes"),
                "relative_speed": float(each.get("relative_speed", 1.0)),
            }
            for each in header.get("workers", ())
        ]
        ids = {each["worker"] for each in self.workers}
        self.segment = header.get("segment")
        # A release writes a header with a part of the workers; a start has the ids from 0 on.
        if not (ids < self.start_workers):
            self.joined = sorted(ids - before) if before else []
            self.start_workers = frozenset(ids)

    @property
    def released(self) -> list[int]:
        """Ids of the workers that were released since the last start."""
        return sorted(self.start_workers - {each["worker"] for each in self.workers})

    def loads(self) -> list[float]:
        """Fraction of the measured step time that each worker computed, 0 to 1."""
        rows = [row for row in self.measured if len(row[1]) == len(self.measured[-1][1])]
        total = max(1, sum(step_ns for step_ns, _, _ in rows))
        count = len(rows[-1][1]) if rows else 0
        return [sum(busy[worker] or 0 for _, busy, _ in rows) / total for worker in range(count)]


@dataclass(kw_only=True)
class EventsSummary:
    """What ``events.jsonl`` showed so far; the incidents in all are counted and their losses are summed.

    ``stopped`` has segment and exit code of the last start that ended before its last step.
    """

    messages: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_EVENTS))
    checkpoint: str | None = None
    incidents: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_LAST_INCIDENTS))
    num_incidents: int = 0
    seconds_lost: float = 0.0
    steps_lost: int = 0
    stopped: tuple[int, int] | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of the file."""
        self.messages.append(str(line["message"]))
        if line.get("kind") == "checkpoint":
            self.checkpoint = str(line["message"])
        if line.get("kind") == "stopped":
            self.stopped = int(line["segment"]), int(line["exit_code"])
        if line.get("kind") == "incident":
            seconds, steps = float(line["seconds_lost"]), int(line["steps_lost"])
            self.incidents.append(dict(line))
            self.num_incidents += 1
            self.seconds_lost += seconds
            self.steps_lost += steps
