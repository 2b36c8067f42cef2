"""From what a person gave to a checked ``Config``, with everything that is wrong reported at once.

A value that is missing or out of its range hides no contradiction between the others. For the rules it is replaced by
values that are allowed, one after another. A contradiction that is there in the same words with each of them does not
depend on the bad value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from .._common.console import say
from .._common.document import DocumentError, Problem
from .._common.errors import UsageError
from .options import Facts, OptionSpec
from .resolve import ALTERNATIVES, option_specs, resolve
from .rules.effect import effect_warnings
from .schema import Config
from .validate import check, validate

_NUMBERS = (1, 12, 5040)


def resolve_checked(
    *, flags: Mapping[str, Any], file: Mapping[str, Any], command: Mapping[str, Any], facts: Facts
) -> Config:
    """``resolve`` and ``check`` together; rank 0 warns of options without effect.

    Raises:
        DocumentError: missing, mistyped or out-of-range values, and all contradictions.
    """
    try:
        config = resolve(flags=flags, file=file, command=command, facts=facts)
    except DocumentError as error:
        given = {**file, **{name: value for name, value in flags.items() if value is not None}, **command}
        hidden = _independent(given, error.problems, facts)
        raise DocumentError(error.source, [*error.problems, *hidden]) from error
    check(config, facts.world_size)
    if (warnings := effect_warnings(config)) and os.environ.get("RANK", "0") == "0":
        say("\n  ".join(["warning: options without effect:", *warnings]))
    return config


def _independent(given: Mapping[str, Any], problems: list[Problem], facts: Facts) -> list[Problem]:
    """Contradictions that do not depend on the values that ``problems`` are about."""
    by_flag = {spec.flag: spec for spec in option_specs().values()}
    bad = [by_flag[problem.path] for problem in problems if problem.path in by_flag]
    known = {name: value for name, value in given.items() if name in option_specs()}
    found: list[list[Problem]] = []
    for at in range(len(_NUMBERS)):
        values = {**known, **{spec.name: _allowed(spec, at) for spec in bad}}
        for first, second in ALTERNATIVES:
            if values.get(first) is None and values.get(second) is None:
                spec = option_specs()[first]
                values[first] = "x" if spec.kind is str else _allowed(spec, at)
        try:
            config = resolve(flags=values, facts=facts)
        except UsageError:
            return []
        found.append(validate(config, facts.world_size))
    flags = {spec.flag for spec in bad}
    return [
        problem
        for problem in found[0]
        if all(problem in others for others in found[1:]) and flags.isdisjoint(_flags_in(problem))
    ]


def _flags_in(problem: Problem) -> set[str]:
    """The options that a problem names."""
    words = f"{problem.path} {problem.message}".replace(";", " ").replace(",", " ").replace(":", " ").split()
    return {word for word in words if word.startswith("--")}


def _allowed(spec: OptionSpec, at: int) -> Any:
    """One of several values that an option may have; None leaves an optional one out."""
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
