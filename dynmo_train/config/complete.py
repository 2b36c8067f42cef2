"""Resolve and validate a ``Config``, and report all problems in one error.

An invalid value must not hide conflicts between other options. It is therefore replaced by several valid values in
turn; a conflict whose message is the same for each of them does not depend on the invalid value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from .._common.console import print_message
from .._common.document import DocumentError, Problem
from .._common.errors import UsageError
from .options import DefaultContext, OptionSpec
from .resolve import ALTERNATIVES, option_specs, resolve
from .rules.effect import effect_warnings
from .schema import Config
from .validate import check, validate

_NUMBERS = (1, 12, 5040)


def resolve_checked(
    *,
    flags: Mapping[str, Any],
    file: Mapping[str, Any],
    checkpoint: Mapping[str, Any] | None = None,
    command: Mapping[str, Any],
    context: DefaultContext,
) -> Config:
    """Resolve and check a configuration; rank 0 warns of options without effect.

    Args:
        flags: option name to value from the command line; None means not given.
        file: option name to value from a ``--config`` file; flags have precedence.
        checkpoint: option name to value of the model of ``--load``; the file has precedence.
        command: option name to value, set by the subcommand.
        context: what derived defaults depend on.

    Raises:
        DocumentError: missing values, wrong types, values out of bounds, and all conflicts between options.
    """
    try:
        config = resolve(flags=flags, file=file, checkpoint=checkpoint, command=command, context=context)
    except DocumentError as error:
        given = {
            **(checkpoint or {}),
            **file,
            **{name: value for name, value in flags.items() if value is not None},
            **command,
        }
        hidden = _independent(given, error.problems, context)
        raise DocumentError(error.source, [*error.problems, *hidden]) from error
    check(config, context.world_size)
    if (warnings := effect_warnings(config)) and os.environ.get("RANK", "0") == "0":
        print_message("\n  ".join(["warning: options without effect:", *warnings]))
    return config


def _independent(given: Mapping[str, Any], problems: list[Problem], context: DefaultContext) -> list[Problem]:
    """Conflicts that do not depend on the invalid values of ``problems``."""
    by_flag = {spec.flag: spec for spec in option_specs().values()}
    bad = [by_flag[problem.path] for problem in problems if problem.path in by_flag]
    known = {name: value for name, value in given.items() if name in option_specs()}
    found: list[list[Problem]] = []
    for at in range(len(_NUMBERS)):
        values = {**known, **{spec.name: _allowed(spec, at) for spec in bad}}
        for first, *others in ALTERNATIVES:
            if not any(values.get(name) for name in (first, *others)):
                spec = option_specs()[first]
                values[first] = "x" if spec.kind is str else _allowed(spec, at)
        try:
            config = resolve(flags=values, context=context)
        except UsageError:
            return []
        found.append(validate(config, context.world_size))
    flags = {spec.flag for spec in bad}
    return [
        problem
        for problem in found[0]
        if all(problem in others for others in found[1:]) and flags.isdisjoint(_flags_in(problem))
    ]


def _flags_in(problem: Problem) -> set[str]:
    """The flags in the text of a problem."""
    return set(re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", f"{problem.path} {problem.message}"))


def _allowed(spec: OptionSpec, at: int) -> Any:
    """A valid value of an option, selected by ``at``; None leaves an option at its default."""
    if spec.choices:
        return spec.choices[at % len(spec.choices)]
    if spec.kind is bool:
        return bool(at % 2)
    if spec.kind is str:
        return None if spec.default is not MISSING else "x"
    return _number(spec, at)


def _number(spec: OptionSpec, at: int) -> float:
    limits = spec.declaration
    value: float = spec.kind(_NUMBERS[at])
    if limits.minimum is not None:
        value = max(value, spec.kind(limits.minimum))
    if limits.above is not None and value <= limits.above:
        value = spec.kind(limits.above + 1)
    highest = limits.maximum if limits.maximum is not None else limits.below
    lowest = limits.minimum if limits.minimum is not None else limits.above
    if highest is not None and value >= highest:
        lowest = 0 if lowest is None else lowest
        middle = lowest + (highest - lowest) * (at + 1) / (len(_NUMBERS) + 1)
        value = spec.kind(middle)
    return value
