"""The lines of ``metrics.jsonl`` and ``events.jsonl``, checked before they are written. ``run.md`` describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.checks import Check, integer, string
from .._common.document import Problem, WriterError, append_line

_METRICS: Mapping[str, Check] = {"step": integer()}
_EVENT: Mapping[str, Check] = {"time_utc": string(), "step": integer(), "kind": string(), "message": string()}


def _finite(value: Any) -> Any:
    """The value with null in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _append(path: Path, record: Mapping[str, Any], rules: Mapping[str, Check]) -> None:
    problems = [Problem(name, "missing", "is missing") for name in rules if name not in record]
    for name, check in rules.items():
        if name in record:
            check(record[name], name, problems)
    if problems:
        raise WriterError(str(path), problems)
    try:
        append_line(path, _finite(record))
    except (TypeError, ValueError) as error:  # a tensor or another value that JSON does not have
        raise WriterError(str(path), [Problem("", "json", str(error))]) from error


def append_metrics(path: Path, record: Mapping[str, Any]) -> None:
    """Append the numbers of a step; those that are not finite become null.

    Raises:
        WriterError: there is no step, or a value is not JSON; nothing is written.
        OSError: see ``append_line``.
    """
    _append(path, record, _METRICS)


def append_event(path: Path, record: Mapping[str, Any]) -> None:
    """Append an event, as ``append_metrics``; it has a time, a step, a kind and a message."""
    _append(path, record, _EVENT)
