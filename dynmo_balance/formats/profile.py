"""The profile of a trainer: typed records, the rules of each line, and the rules across lines.

The specification is ``profile.md`` of the format's owner. A line becomes one frozen record. Every problem of every
line is reported with its path (``line 7.forward_ns[3]``) and its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .._common.document import DocumentError, Problem, own_document, parse_json, short_repr, write_whole
from .._common.log_parts import read_part_lines
from .profile_lines import line_problems
from .profile_records import Event, Header, Item, Link, Model, PlanRequest, PlanResult, Record, Samples, Step, Worker

__all__ = [
    "PlanRequest",
    "Event",
    "Header",
    "Item",
    "LineParser",
    "Link",
    "Model",
    "PlanResult",
    "Record",
    "Samples",
    "Segment",
    "Step",
    "Worker",
    "line_problems",
    "parse_profile",
    "read_profile",
]


CONTINUES = "x_continues"
"""Key of a header that begins a part of a rotated profile and repeats the header of the part before."""


def _known(kind: type, value: Mapping[str, Any], **replaced: Any) -> dict[str, Any]:
    # Keys that begin with ``x_`` are permitted by the format; those without a field here are ignored.
    names = {field.name for field in fields(kind)}
    plain = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items() if key in names}
    return {**plain, **replaced}


def _build(value: Mapping[str, Any]) -> Record:
    match value["record"]:
        case "header":
            link = value["link"]
            return Header(
                **_known(
                    Header,
                    value,
                    model=Model(**_known(Model, value["model"])),
                    link=None if link is None else Link(**_known(Link, link)),
                    workers=tuple(Worker(**_known(Worker, worker)) for worker in value["workers"]),
                    items=tuple(Item(**_known(Item, item)) for item in value["items"]),
                )
            )
        case "step":
            return Step(**_known(Step, value))
        case "event":
            return Event(**_known(Event, value))
        case "plan_request":
            return PlanRequest(**_known(PlanRequest, value))
        case _:
            return PlanResult(**_known(PlanResult, value))


def _header_problems(header: Header, before: Header | None) -> list[Problem]:
    problems = []
    names: set[str] = set()
    layers: set[str] = set()
    for index, item in enumerate(header.items):
        if item.name in names:
            problems.append(Problem(f"items[{index}].name", "duplicate", f"{short_repr(item.name)} occurs twice"))
        names.add(item.name)
        if (index == 0 or item.layer != header.items[index - 1].layer) and item.layer in layers:
            problems.append(
                Problem(f"items[{index}].layer", "order", f"the items of {short_repr(item.layer)} must be adjacent")
            )
        layers.add(item.layer)
    for index, item in enumerate(header.items):
        if item.tied_to is not None and (item.tied_to not in names or item.tied_to == item.name):
            problems.append(
                Problem(
                    f"items[{index}].tied_to",
                    "reference",
                    f"{short_repr(item.tied_to)} is not another item of the list",
                )
            )
    ids = [worker.worker for worker in header.workers]
    if len(set(ids)) < len(ids):
        problems.append(Problem("workers", "duplicate", f"worker ids must differ, are {ids}"))
    if before is not None and header.segment != before.segment + 1:
        problems.append(Problem("segment", "order", f"must be {before.segment + 1}, is {header.segment}"))
    if before is not None and header.run_id != before.run_id:
        problems.append(Problem("run_id", "reference", f"must be {before.run_id!r}, is {short_repr(header.run_id)}"))
    return problems


def _step_problems(step: Step, header: Header, last_step: int) -> list[Problem]:
    problems = []
    lengths = {"busy_ns": len(header.workers), "peak_memory_bytes": len(header.workers)}
    for name in ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns", "activation_bytes"):
        lengths[name] = len(header.items)
    for name, expected in lengths.items():
        samples = getattr(step, name)
        if samples is not None and len(samples) != expected:
            problems.append(Problem(name, "length", f"must have {expected} elements, has {len(samples)}"))
    if step.step <= last_step:
        problems.append(Problem("step", "order", f"must be above {last_step}, is {step.step}"))
    return problems


class LineParser:
    """Turns lines into records, one after another, and keeps the state that the rules across lines need.

    Attributes:
        header: the last header; None before the first one.
        lines: number of lines so far.
        last_step: last step of the segment.
        is_copy: whether the last line was the header at the begin of a part, which repeats the one before; it is no
            record.
    """

    def __init__(self) -> None:
        self.header: Header | None = None
        self.lines = 0
        self.last_step = 0
        self.is_copy = False

    def parse(self, line: bytes) -> tuple[Record | None, list[Problem]]:
        """The record of the next line and its problems; None as the record if there is a problem."""
        self.lines += 1
        try:
            value = parse_json(line)
        except ValueError as error:
            return None, [Problem(f"line {self.lines}", "json", str(error))]
        problems = line_problems(value)
        record = None
        self.is_copy = False
        if not problems:
            record = _build(value)
            if isinstance(record, Header) and value.get(CONTINUES) and self._continues(record):
                self.is_copy = True
                return None, []
            # Only for a line that is valid by itself: rules across lines need its fields.
            problems = self._across(record)
        where = f"line {self.lines}"
        located = [Problem(f"{where}.{p.path}" if p.path else where, p.kind, p.message) for p in problems]
        return (None if located else record), located

    def _continues(self, header: Header) -> bool:
        """Whether a copy of a header is of the current segment."""
        before = self.header
        return before is not None and (header.run_id, header.segment) == (before.run_id, before.segment)

    def _across(self, record: Record) -> list[Problem]:
        if isinstance(record, Header):
            problems = _header_problems(record, self.header)
            # An invalid header still replaces the former one, so that its lines are checked against their own header.
            self.header, self.last_step = record, 0
            return problems
        if self.header is None:
            return [Problem("record", "order", "must not be before the first valid header")]
        if isinstance(record, Step):
            problems = _step_problems(record, self.header, self.last_step)
            # The maximum: after one step that goes back, the following ones are compared with the highest.
            self.last_step = max(self.last_step, record.step)
            return problems
        return []


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One start of the run: its header and the records after it, in order."""

    header: Header
    records: tuple[Record, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The step records, in order."""
        return tuple(record for record in self.records if isinstance(record, Step))


def parse_profile(lines: Iterable[bytes], source: str) -> tuple[Segment, ...]:
    """The segments of a profile.

    Raises:
        DocumentError: with every problem of every line.
    """
    parser, problems = LineParser(), []
    segments: list[tuple[Header, list[Record]]] = []
    for line in lines:
        record, found = parser.parse(line)
        problems.extend(found)
        if isinstance(record, Header):
            segments.append((record, []))
        elif record is not None and segments:
            segments[-1][1].append(record)
    if not parser.lines:
        problems.append(Problem("", "length", "is empty: the first line must be a header"))
    if problems:
        raise DocumentError(source, problems)
    return tuple(Segment(header=header, records=tuple(records)) for header, records in segments)


def write_profile(path: Path, lines: Sequence[bytes]) -> None:
    """Write a complete profile.

    Raises:
        WriterError: a line violates the format that readers check.
    """
    # Read back before it is written: a fault of a writer here is reported as such, not to whoever reads the file next.
    with own_document():
        parse_profile(lines, str(path))
    write_whole(path, b"".join(line.rstrip(b"\n") + b"\n" for line in lines))


def read_profile(path: Path) -> tuple[Segment, ...]:
    """Read a complete profile.

    Raises:
        DocumentError: it cannot be read or violates a rule.
    """
    return parse_profile(read_part_lines(path), str(path))
