"""Records of what a tree shows, key by key, and how two of them differ.

A record is a file of JSON lines: the first describes the area and its inputs, each other one has a key and its value,
or the reason why the key is not compared. Values are texts, numbers, lists and objects; what differs in them between
two executions of one commit has been replaced by words in ``{}`` before.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

MAX_FIELDS = 4  # of a key that differs
MAX_KEYS = 20  # of an area, in the report
MAX_CHARACTERS = 240

# What differs between two executions of one commit, whatever the command.
EVERYWHERE = (
    (re.compile(r"\b([EWI])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ "), r"\1{time} "),  # a log line of torch
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\+00:00)?"), "{time}"),
    (re.compile(r"\b(dynmo-\w+|dynmo_\w+) \d+\.\d+\.\d+[\w.+-]*"), r"\1 {version}"),
    (re.compile(r"\b(pid|process|PID) \d+"), r"\1 {pid}"),
    (re.compile(r"\b(127\.0\.0\.1|localhost|0\.0\.0\.0):\d{4,5}\b"), r"\1:{port}"),
    (re.compile(r"(--master-port|MASTER_PORT=?|port) \d{4,5}\b"), r"\1 {port}"),
    (re.compile(r"\b[0-9a-f]{16}\b"), "{id}"),
)
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?"
# Of commands that measure: durations and rates.
MEASURED = (
    (re.compile(rf"\b{_NUMBER} ?(ns|us|µs|ms|s|min|h)\b"), r"{duration}"),
    (
        re.compile(
            rf"\b{_NUMBER}(?: ?[kKMGT]?i?B| ?[kKMGTP]?FLOPS| tokens| samples| documents| rows)?(?:/s| per s)\b"
        ),
        "{rate}",
    ),
    (re.compile(r"(\((?:ms|s|TFLOP/s)\): *)" + _NUMBER), r"\1{duration}"),
    (re.compile(rf"\b{_NUMBER} [kMG]i?B of memory"), "{memory} of memory"),
    (re.compile(r"\b\d+:\d\d:\d\d\b|\b\d\d:\d\d\b"), "{duration}"),
)  # fmt: skip


def normalized(text: str, names: Mapping[str, str], *, is_measured: bool = False) -> str:
    """A text without what differs between executions.

    Args:
        text: the output of a command.
        names: a word for each path of the machine; longer paths first.
        is_measured: whether durations and rates of the text are measured.
    """
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    for pattern, word in (*EVERYWHERE, *(MEASURED if is_measured else ())):
        text = pattern.sub(word, text)
    return text


def without(value: Any, fields: frozenset[str]) -> Any:
    """A JSON value without the named fields, at every depth."""
    if isinstance(value, dict):
        return {name: without(member, fields) for name, member in value.items() if name not in fields}
    return [without(member, fields) for member in value] if isinstance(value, list) else value


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(kw_only=True)
class Record:
    """What a tree shows in an area.

    Attributes:
        area: name of the area.
        inputs: digest of the inputs.
        values: key -> value.
        excluded: key -> why it is not compared.
    """

    area: str
    inputs: str
    values: dict[str, Any] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, value: Any) -> None:
        """Add a key; each has one value."""
        if key in self.values or key in self.excluded:
            raise ValueError(f"{self.area}: two values of {key}")
        self.values[key] = value

    def exclude(self, key: str, reason: str) -> None:
        """State that a key is not compared."""
        self.excluded[key] = reason

    def write(self, folder: Path) -> None:
        """Write the record to a folder."""
        lines = [{"area": self.area, "inputs": self.inputs}]
        lines += [{"key": key, "value": value} for key, value in self.values.items()]
        lines += [{"key": key, "excluded": reason} for key, reason in self.excluded.items()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{self.area}.jsonl").write_text(text, encoding="utf-8")


def read_record(path: Path) -> Record:
    """The record in a file."""
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    record = Record(area=head["area"], inputs=head["inputs"])
    for line in lines:
        if "excluded" in line:
            record.exclude(line["key"], line["excluded"])
        else:
            record.add(line["key"], line["value"])
    return record


def read_accepted(path: Path | None) -> dict[str, str]:
    """Intended differences: lines ``AREA KEY: reason``; the key may have wildcards."""
    accepted = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path else (), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, separator, reason = line.rpartition(": ")
        if not separator or not reason.strip() or " " not in pattern:
            raise ValueError(f"{path}, line {number}: must be 'AREA KEY: reason', is {line!r}")
        accepted[pattern] = reason
    return accepted


def differing_fields(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places at which two values differ, each with both members; texts differ by line."""
    if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        old, new = old.splitlines(), new.splitlines()
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from differing_fields(old.get(name, "(missing)"), new.get(name, "(missing)"), f"{path}.{name}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{path}.length", len(old), len(new)
        for at, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from differing_fields(before, after, f"{path}[{at}]")
    elif old != new or type(old) is not type(new):
        yield path or ".", old, new


@dataclass(kw_only=True)
class Comparison:
    """How two records of an area differ.

    Attributes:
        area: name of the area.
        compared: number of keys that both have.
        excluded: reason -> number of keys.
        accepted: accepted pattern -> number of keys that it covers.
        differences: key -> both values; ``None`` for a key that a record lacks.
    """

    area: str
    compared: int
    excluded: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    differences: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def report(self) -> Iterable[str]:
        """Lines for a reader: counts, then each key that differs with its first differing fields."""
        yield f"{self.area}: {self.compared} keys compared, {len(self.differences)} differ"
        yield from (f"  not compared: {count} keys: {reason}" for reason, count in self.excluded.items())
        yield from (f"  accepted: {count} keys: {pattern}" for pattern, count in self.accepted.items())
        for key, (old, new) in islice(self.differences.items(), MAX_KEYS):
            if old is None or new is None:
                yield f"  {key}: only in the {'new' if old is None else 'old'} record"
                continue
            places = list(differing_fields(old, new))
            yield f"  {key}: {len(places)} fields differ"
            for path, before, after in places[:MAX_FIELDS]:
                yield from (f"    {path}", f"      old: {_short(before)}", f"      new: {_short(after)}")
        if len(self.differences) > MAX_KEYS:
            yield f"  ... and {len(self.differences) - MAX_KEYS} more"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ... ({len(text)} characters)"


def compare(old: Record, new: Record, accepted: Mapping[str, str]) -> Comparison:
    """Compare two records of an area.

    Args:
        old: of the old commit.
        new: of the new commit.
        accepted: ``AREA KEY`` patterns of intended differences.
    """
    found = Comparison(area=old.area, compared=len(old.values.keys() & new.values.keys()))
    if old.inputs != new.inputs:
        found.differences["(inputs)"] = (old.inputs, new.inputs)
    for reason in [*old.excluded.values(), *(new.excluded[key] for key in new.excluded.keys() - old.excluded.keys())]:
        found.excluded[reason] = found.excluded.get(reason, 0) + 1
    for key in dict.fromkeys([*old.values, *new.values]):
        if key in old.excluded or key in new.excluded:
            continue
        before, after = old.values.get(key), new.values.get(key)
        # JSON texts, so that 1 and 1.0 and true differ.
        if json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True) and (before, after) != (None, None):
            continue
        covering = [pattern for pattern in accepted if fnmatch.fnmatchcase(f"{old.area} {key}", pattern)]
        if covering:
            found.accepted[covering[0]] = found.accepted.get(covering[0], 0) + 1
        else:
            found.differences[key] = (before, after)
    return found
