"""The lines of ``metrics.jsonl`` and ``events.jsonl``, checked before they are written. ``run.md`` describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.checks import Check, array, integer, number, string
from .._common.document import Problem, WriterError, append_line
from .._common.log_parts import NO_ROTATION, Rotation, rotate
from .incident import INCIDENT_KINDS

_METRICS: Mapping[str, Check] = {"step": integer()}
_EVENT: Mapping[str, Check] = {"time_utc": string(), "step": integer(), "kind": string(), "message": string()}

_INCIDENT: Mapping[str, Check] = {
    **_EVENT,
    "incident": string(*INCIDENT_KINDS),
    "cause": string(),
    "ranks": array(integer()),
    "hosts": array(string()),
    "seconds_lost": number(0.0),
    "steps_lost": integer(),
}


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _append(path: Path, record: Mapping[str, Any], rules: Mapping[str, Check], rotation: Rotation) -> None:
    problems = [Problem(name, "missing", "is missing") for name in rules if name not in record]
    for name, check in rules.items():
        if name in record:
            check(record[name], name, problems)
    if problems:
        raise WriterError(str(path), problems)
    rotate(path, rotation)
    try:
        append_line(path, _finite(record))
    except (TypeError, ValueError) as error:  # a tensor or another value that JSON does not have
        raise WriterError(str(path), [Problem("", "json", str(error))]) from error


def append_metrics(path: Path, record: Mapping[str, Any], rotation: Rotation = NO_ROTATION) -> None:
    """Append the metrics of a step; numbers that are not finite become null.

    Args:
        path: ``metrics.jsonl``.
        record: the line.
        rotation: when to start a new part.

    Raises:
        WriterError: ``step`` is missing, or a value is not JSON; nothing is written.
        OSError: See ``append_line``.
    """
    _append(path, record, _METRICS, rotation)


def append_event(path: Path, record: Mapping[str, Any], rotation: Rotation = NO_ROTATION) -> None:
    """Append an event, which has ``time_utc``, ``step``, ``kind`` and ``message``; raises as :func:`append_metrics`."""
    _append(path, record, _INCIDENT if record.get("kind") == "incident" else _EVENT, rotation)
