"""How a flag is declared: one dataclass field, from which its command-line option, TOML key and documentation come."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .._common.document import MAX_COUNT, Problem

Source = Literal["default", "derived", "file", "flag", "command"]
# What an option names. At a start all processes must have the same values, data sets ("data"), and contents of a file
# or folder ("file") or of several ("files"). A "place" may differ between hosts: a run writes to it or caches in it,
# or its contents are compared once they are open.
Reference = Literal["value", "data", "file", "files", "place"]
REQUIRED = "required"
_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a derived default may depend on beside the other values.

    ``tokenizer_vocab_size`` maps the option values to the number of ids of the tokenizer that they name, None where
    they name none; it is None where no file may be read. ``given`` names the options that
    somebody gave.
    """

    world_size: int = 1
    tokenizer_vocab_size: Callable[[Mapping[str, Any]], int | None] | None = None
    given: frozenset[str] = frozenset()


Derive = Callable[[Mapping[str, Any], Facts], Any]


@dataclass(frozen=True, kw_only=True)
class _Declaration:
    """What ``option`` stores in a field's metadata."""

    help: str
    derive: Derive | None
    derive_text: str
    minimum: float | None
    above: float | None
    maximum: float | None
    below: float | None
    flag: bool
    refers_to: Reference


_KEY = "dynmo.option"


def option(
    text: str,
    *,
    default: Any = dataclasses.MISSING,
    derive: tuple[str, Derive] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    flag: bool = True,
    refers_to: Reference = "value",
) -> Any:
    """Declare an option as a dataclass field; without ``default`` and ``derive`` it is required.

    Args:
        text: one sentence for a person, with the unit.
        default: the value where nobody gives one.
        derive: how the default follows from other values, in words and as a function.
        minimum: the smallest value allowed.
        above: values must be greater than this.
        maximum: the greatest value allowed; of integers ``MAX_COUNT`` where neither this nor ``below`` is given.
        below: values must be smaller than this.
        flag: False for a value that the subcommand itself fixes.
        refers_to: what the value names, by which processes compare it at a start.
    """
    words, function = derive if derive else ("", None)
    declaration = _Declaration(
        help=text,
        derive=function,
        derive_text=words,
        minimum=minimum,
        above=above,
        maximum=maximum,
        below=below,
        flag=flag,
        refers_to=refers_to,
    )
    if default is dataclasses.MISSING:
        return field(metadata={_KEY: declaration})
    return field(default=default, metadata={_KEY: declaration})


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """A declared option, as everything that is generated from it sees it.

    ``kind`` is the plain type (``int``, ``float``, ``bool`` or ``str``), ``choices`` the allowed strings (empty: any),
    ``optional`` whether None is a value, ``default`` the plain default (``dataclasses.MISSING`` where there is none).
    """

    name: str
    concern: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    default: Any
    declaration: _Declaration

    @property
    def flag(self) -> str:
        """The command-line option: ``--num-layers`` for ``num_layers``."""
        return "--" + self.name.replace("_", "-")

    @property
    def negative(self) -> str | None:
        """The flag that says no: ``--no-sparsify``; None where there is none, as of ``--no-load-optim``."""
        if self.kind is not bool or self.name.startswith("no_"):
            return None
        return f"--no-{self.flag.removeprefix('--')}"

    @property
    def is_flag(self) -> bool:
        """Whether a person may set it, by option or in a file."""
        return self.declaration.flag

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is dataclasses.MISSING and self.declaration.derive is None

    @property
    def default_text(self) -> str:
        """The default for a person: a value, how it is derived, ``none`` or ``required``."""
        if self.required:
            return REQUIRED
        if self.declaration.derive is not None:
            return self.declaration.derive_text
        if self.default is None:
            return "none"
        return str(self.default).lower() if self.kind is bool else str(self.default)

    @property
    def value_text(self) -> str:
        """The form of its value for a person: ``INTEGER``, or the choices."""
        if self.choices:
            return "|".join(self.choices)
        return {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: ""}[self.kind]

    @property
    def maximum(self) -> float | None:
        """The greatest value allowed; every integer has one, so that no number makes work without end."""
        declared = self.declaration
        is_open = declared.maximum is None and declared.below is None
        return MAX_COUNT if is_open and self.kind is int else declared.maximum

    @property
    def bounds_text(self) -> str:
        """The bounds of a number for a person: ``1 to 100,000``, ``above 0``, ``0 to below 1``; empty without any."""
        limits = self.declaration
        if self.kind not in (int, float):
            return ""
        low = "" if limits.minimum is None else f"{limits.minimum:,}"
        high = "" if self.maximum is None else f"{self.maximum:,}"
        high = high if limits.below is None else f"below {limits.below:,}"
        if low:
            return f"{low} to {high}" if high else f"at least {low}"
        above = "" if limits.above is None else f"above {limits.above:,}"
        at_most = high if high.startswith("below") or not high else f"at most {high}"
        return ", ".join(filter(None, (above, at_most)))

    def convert(self, value: Any) -> tuple[Any, Problem | None]:
        """The value as this option's type, and what is wrong with it, if anything."""
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            expected = _KIND_NAMES[self.kind]
            return None, Problem(self.flag, "type", f"must be {expected}, is {value!r}")
        if self.choices and value not in self.choices:
            return None, Problem(self.flag, "choice", f"must be one of {', '.join(self.choices)}; is {value!r}")
        if isinstance(value, int | float):
            return self._within_bounds(value)
        if value == "":
            return None, Problem(self.flag, "range", "must not be empty")
        return value, None

    def _within_bounds(self, value: float) -> tuple[Any, Problem | None]:
        limits, maximum = self.declaration, math.inf if self.maximum is None else self.maximum
        rules = (
            (not math.isfinite(value), "finite"),
            (limits.minimum is not None and value < limits.minimum, f"at least {limits.minimum}"),
            (limits.above is not None and value <= limits.above, f"above {limits.above}"),
            (value > maximum, f"at most {maximum:,}"),
            (limits.below is not None and value >= limits.below, f"below {limits.below}"),
        )
        broken = [words for is_broken, words in rules if is_broken]
        if broken:
            return None, Problem(self.flag, "range", f"must be {' and '.join(broken)}, is {value}")
        return value, None


def _plain_type(annotation: Any) -> tuple[type, tuple[str, ...], bool]:
    """(plain type, choices, whether None is allowed) of a field's annotation."""
    optional = False
    if isinstance(annotation, types.UnionType):
        rest = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        optional, annotation = True, rest[0]
    if typing.get_origin(annotation) is Literal:
        return str, tuple(typing.get_args(annotation)), optional
    if annotation not in _KIND_NAMES:
        raise TypeError(f"an option cannot be of type {annotation!r}")
    return annotation, (), optional


def concern_specs(concern: str, dataclass_type: type) -> tuple[OptionSpec, ...]:
    """The options that ``dataclass_type`` declares, in order of their declaration."""
    annotations = typing.get_type_hints(dataclass_type)
    specs = []
    for entry in dataclasses.fields(dataclass_type):
        kind, choices, optional = _plain_type(annotations[entry.name])
        specs.append(
            OptionSpec(
                name=entry.name,
                concern=concern,
                kind=kind,
                choices=choices,
                optional=optional,
                default=entry.default,
                declaration=entry.metadata[_KEY],
            )
        )
    return tuple(specs)
