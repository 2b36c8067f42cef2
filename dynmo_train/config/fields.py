"""Options of commands other than ``pretrain``: their specifications, and an instance from given values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache
from typing import Any, TypeVar

from .._common.document import DocumentError, Problem
from .options import DefaultContext, OptionSpec, concern_specs

Values = TypeVar("Values")


@cache
def specs_of(*kinds: type) -> tuple[OptionSpec, ...]:
    """The options that the dataclasses declare, in order."""
    return tuple(spec for kind in kinds for spec in concern_specs(kind.__name__, kind))


def values_of(kind: type[Values], given: Mapping[str, Any]) -> Values:
    """Create an instance of ``kind``.

    Args:
        kind: dataclass of options.
        given: option name to value; None means not given. Other names are ignored.

    Raises:
        DocumentError: missing values, wrong types or values out of bounds; reports all of them.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    derived = []
    for spec in concern_specs(kind.__name__, kind):
        raw = given.get(spec.name)
        if raw is not None:
            values[spec.name], problem = spec.convert(raw)
            problems.extend([problem] if problem else [])
        elif spec.default is not MISSING:
            values[spec.name] = spec.default
        elif spec.declaration.derive is not None:
            derived.append(spec)
        else:
            problems.append(Problem(spec.flag, "missing", f"is required: {spec.declaration.help}"))
    if problems:
        raise DocumentError("the command line", problems)
    for spec in derived:
        if spec.declaration.derive is not None:
            values[spec.name] = spec.declaration.derive(values, DefaultContext())
    return kind(**values)
