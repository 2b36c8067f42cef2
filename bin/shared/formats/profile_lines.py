"""The rules of one line of a profile; those across lines are in the reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._common.checks import Check, obj
from .._common.document import Problem, envelope_problems, short_repr
from .profile_fields import EVENT, HEADER, PLAN_REQUEST, PLAN_RESULT, STEP

FORMAT = "dynmo.profile"
VERSION = 1
_LINES: Mapping[str, Check] = {
    "header": HEADER,
    "step": STEP,
    "event": EVENT,
    "plan_request": PLAN_REQUEST,
    "plan_result": PLAN_RESULT,
}
_WHOLE, _SPLIT = ("backward_ns",), ("backward_input_ns", "backward_weight_ns")


def line_problems(value: Any) -> list[Problem]:
    """Every problem of one line by itself."""
    problems: list[Problem] = []
    if not isinstance(value, dict):
        obj({})(value, "", problems)
        return problems
    kind = value.get("record")
    if kind == "header" and (refusal := envelope_problems(value, FORMAT, VERSION)):
        return refusal
    if not isinstance(kind, str) or kind not in _LINES:
        return [Problem("record", "choice", f"must be one of {', '.join(_LINES)}; is {short_repr(kind)}")]
    _LINES[kind](value, "", problems)
    return problems + (_backward_problems(value) if kind == "step" else [])


def _backward_problems(step: Mapping[str, Any]) -> list[Problem]:
    """A step has the times of whole backward passes, or both times of split ones."""
    is_split = any(name in step for name in _SPLIT)
    missing = [name for name in (_SPLIT if is_split else _WHOLE) if name not in step]
    both = [name for name in _WHOLE if is_split and name in step]
    return [
        *(Problem(name, "missing", "is missing") for name in missing),
        *(Problem(name, "unknown", "must not stand with the times of split backward passes") for name in both),
    ]
