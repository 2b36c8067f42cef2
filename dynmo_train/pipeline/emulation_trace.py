"""The trace of an emulated run: the times of each item by step, read from a profile.

Only item names, their times and the events of techniques are used. Workers, links, sizes and step times are those of
the run that recorded the profile.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.checks import Check, array, integer, nullable
from .._common.document import DocumentError, Problem, envelope_problems, read_records
from .._common.errors import UsageError
from ..dynamics.technique import Event
from ..formats.profile_lines import FORMAT, VERSION

TIMES = ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns")
NO_TECHNIQUE = ("evaluated", "checkpoint")
"""Kinds of events that no technique emits; the emulated run emits its own."""


@dataclass(frozen=True, kw_only=True)
class ItemTimes:
    """Times of an item per microbatch, in ns."""

    forward_ns: int
    backward_input_ns: int
    backward_weight_ns: int


ZERO_TIMES = ItemTimes(forward_ns=0, backward_input_ns=0, backward_weight_ns=0)


@dataclass(frozen=True, kw_only=True)
class EmulationTrace:
    """Times by step, and events.

    Attributes:
        steps: First step of each entry of ``times``, ascending.
        times: Item name -> its times, by entry.
        events: Step -> events after it.
    """

    steps: tuple[int, ...]
    times: tuple[Mapping[str, ItemTimes], ...]
    events: Mapping[int, tuple[Event, ...]]

    def at(self, step: int) -> Mapping[str, ItemTimes]:
        """Return the times of a step: those of the latest entry up to it, or of the first entry."""
        return self.times[max(0, bisect.bisect_right(self.steps, step) - 1)]


def read_trace(path: Path, names: Sequence[str], scale: float = 1.0) -> EmulationTrace:
    """Read the trace of a profile's last segment.

    Args:
        path: The profile.
        names: Item names of the model; the trace must have the same, in any order.
        scale: Factor of all times.

    Raises:
        DocumentError: The file is not a profile, has no steps, or has other items.
    """
    records = list(read_records(path))
    headers = [at for at, record in enumerate(records) if _kind(record) == "header"]
    if not headers:
        raise DocumentError(str(path), [Problem("", "format", "has no header line of a profile")])
    header, lines = records[headers[-1]], records[headers[-1] + 1 :]
    problems = envelope_problems(header, FORMAT, VERSION)
    items = header.get("items")
    found = [item.get("name") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    if not all(isinstance(name, str) for name in found):
        problems.append(Problem("items", "type", "must have names, which are texts"))
    if not problems and set(found) != set(names):
        missing, more = [n for n in names if n not in found], [n for n in found if n not in set(names)]
        differences = "; ".join(
            f"{word} {', '.join(map(str, some))}" for word, some in (("lacks", missing), ("has", more)) if some
        )
        problems.append(Problem("items", "items", f"are not those of the model: the trace {differences}"))
    steps = [record for record in lines if _kind(record) == "step"]
    if not problems and not steps:
        problems.append(Problem("", "length", "has no step line"))
    for at, record in enumerate(steps):
        problems += [] if problems else _step_problems(record, f"step line {at + 1}", len(found))
    if problems:
        raise DocumentError(str(path), problems)
    known: dict[str, list[int]] = {name: [0] * len(found) for name in TIMES[:1] + TIMES[2:]}
    return EmulationTrace(
        steps=tuple(record["step"] for record in steps),
        times=tuple(_times(record, [str(name) for name in found], known, scale) for record in steps),
        events=_events(record for record in lines if _kind(record) == "event"),
    )


def _kind(record: Any) -> Any:
    return record.get("record") if isinstance(record, dict) else None


def _step_problems(record: Mapping[str, Any], path: str, length: int) -> list[Problem]:
    problems: list[Problem] = []
    integer(1)(record.get("step"), f"{path}, step", problems)
    times: Check = array(nullable(integer(0)), length)
    given = [name for name in TIMES if name in record]
    for name in given:
        times(record[name], f"{path}, {name}", problems)
    if given not in ([*TIMES[:2]], [TIMES[0], *TIMES[2:]]):
        words = "must have forward_ns, and backward_ns or backward_input_ns and backward_weight_ns"
        problems.append(Problem(path, "missing", words))
    return problems


def _times(
    record: Mapping[str, Any], names: Sequence[str], known: dict[str, list[int]], scale: float
) -> dict[str, ItemTimes]:
    """Return the times of a step; items that it has not sampled keep the times in ``known``, which is updated."""
    whole = record.get("backward_ns")
    for at in range(len(names)):
        if whole is not None and whole[at] is not None:
            # Halves that add up to the whole for odd numbers, too; the trace has no split of its own.
            known["backward_weight_ns"][at] = whole[at] // 2
            known["backward_input_ns"][at] = whole[at] - whole[at] // 2
        for field, values in known.items():
            given = record.get(field)
            if given is not None and given[at] is not None:
                values[at] = given[at]
    return {
        name: ItemTimes(**{field: round(values[at] * scale) for field, values in known.items()})
        for at, name in enumerate(names)
    }


def _events(records: Any) -> dict[int, tuple[Event, ...]]:
    events: dict[int, tuple[Event, ...]] = {}
    for record in records:
        kind = record.get("kind")
        if kind in NO_TECHNIQUE:
            continue
        step, following, detail = record.get("step"), record.get("next_expected_step"), record.get("detail")
        if (
            not isinstance(kind, str)
            or not isinstance(step, int)
            or not isinstance(detail, dict)
            or not isinstance(following, int | None)
        ):
            raise UsageError(f"the trace has an event without kind, step, detail or next_expected_step: {record}")
        listed = ", ".join(f"{name} {value}" for name, value in detail.items())
        event = Event(
            kind=kind,
            step=step,
            message=f"emulated: {kind} {listed}".rstrip(),
            detail=detail,
            next_expected_step=following,
        )
        events[step] = (*events.get(step, ()), event)
    return events


@dataclass(frozen=True, kw_only=True)
class SlowWorker:
    """A worker whose times are longer from a first to a last step."""

    worker: int
    factor: float
    first: int
    last: int

    def factor_at(self, step: int) -> float:
        """The factor of its times in a step."""
        return self.factor if self.first <= step <= self.last else 1.0


def parse_slow_worker(text: str) -> SlowWorker:
    """Parse the value of ``--emulate-slow``.

    Raises:
        UsageError: it has another form, or numbers out of range.
    """
    try:
        worker, factor, first, last = text.split(":")
        found = SlowWorker(worker=int(worker), factor=float(factor), first=int(first), last=int(last))
    except ValueError as error:
        raise UsageError(f"--emulate-slow {text!r}: must be WORKER:FACTOR:FIRST:LAST, such as 1:5:20:60") from error
    if found.worker < 0 or not 1.0 <= found.factor <= 1e6 or not 1 <= found.first <= found.last:
        raise UsageError(f"--emulate-slow {text}: must have WORKER >= 0, FACTOR >= 1 and 1 <= FIRST <= LAST")
    return found
