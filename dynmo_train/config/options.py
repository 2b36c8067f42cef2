"""Declaration of an option as a dataclass field: source of its flag, TOML key, bounds and documentation."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .._common.document import (
    MAX_COUNT,
    Problem,
    finite_number,
    short_repr,
)

Source = Literal["default", "derived", "checkpoint", "file", "flag", "command"]
# What the value of an option refers to. At startup all processes compare their values, the datasets ("data"), and the
# contents of a file or folder ("file") or of several ("files"). A "place" may differ between hosts: it is an output or
# a cache, or its contents are compared when it is opened.
Reference = Literal["value", "data", "file", "files", "place"]
REQUIRED = "required"
# Of an option that refers to a path, or to several: s3://bucket/run.
_ADDRESS = re.compile(r"(?<![^\s'\"])[A-Za-z][A-Za-z0-9+.-]+://[^\s'\"]*")
_CHECKPOINTS = frozenset({"load", "bert_load", "pretrained_checkpoint"})
_REMEDY_OF_CHECKPOINTS = "dynmo-ckpt convert ADDRESS FOLDER copies a checkpoint"
_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@dataclass(frozen=True, kw_only=True)
class DefaultContext:
    """What derived defaults depend on besides other option values.

    Attributes:
        world_size: number of processes of the run.
        tokenizer_vocab_size: maps option values to the vocabulary size of their tokenizer, None without a tokenizer;
            None if no file may be read.
        given: names of the options on the command line or in a file.
    """

    world_size: int = 1
    tokenizer_vocab_size: Callable[[Mapping[str, Any]], int | None] | None = None
    given: frozenset[str] = frozenset()


Derive = Callable[[Mapping[str, Any], DefaultContext], Any]


@dataclass(frozen=True, kw_only=True)
class _Declaration:
    """Metadata of a field that ``option`` declares."""

    help: str
    derive: Derive | None
    derive_text: str
    minimum: float | None
    above: float | None
    maximum: float | None
    below: float | None
    flag: bool
    refers_to: Reference
    common: bool
    panel: str | None
    words: bool


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
    common: bool = False,
    panel: str | None = None,
    words: bool = False,
) -> Any:
    """Declare an option as a dataclass field; it is required without ``default`` and ``derive``.

    Args:
        text: help text: a fragment of at most 12 words, with the unit.
        default: default value.
        derive: description and function of a default that depends on other values.
        minimum: inclusive lower bound.
        above: exclusive lower bound.
        maximum: inclusive upper bound; ``MAX_COUNT`` for integers without an upper bound.
        below: exclusive upper bound.
        flag: False for a value that the subcommand sets.
        refers_to: what the value refers to, which determines how processes compare it at startup.
        common: whether ``--help`` shows it; ``--help-all`` shows all options.
        panel: section of help pages; None: ``PANEL`` of the dataclass.
        words: for a string: whether files may have a number or a list instead, whose entries are joined by spaces.
    """
    description, function = derive if derive else ("", None)
    declaration = _Declaration(
        help=text,
        derive=function,
        derive_text=description,
        minimum=minimum,
        above=above,
        maximum=maximum,
        below=below,
        flag=flag,
        refers_to=refers_to,
        common=common,
        panel=panel,
        words=words,
    )
    if default is dataclasses.MISSING:
        return field(metadata={_KEY: declaration})
    return field(default=default, metadata={_KEY: declaration})


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """A declared option.

    Attributes:
        name: name of the dataclass field, which is the key in files.
        concern: name of its dataclass in ``Config``, which is the table in files.
        kind: ``int``, ``float``, ``bool`` or ``str``.
        choices: allowed strings; empty if any string is allowed.
        optional: whether None is allowed.
        default: default value; ``dataclasses.MISSING`` if there is none.
        declaration: help text and bounds.
        panel: section of help pages.
    """

    name: str
    concern: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    default: Any
    declaration: _Declaration
    panel: str

    @property
    def flag(self) -> str:
        """The command-line option: ``--num-layers`` for ``num_layers``."""
        return "--" + self.name.replace("_", "-")

    @property
    def negative(self) -> str | None:
        """The negative flag, such as ``--no-sparsify``; None for other types and for ``--no-load-optim``."""
        if self.kind is not bool or self.name.startswith("no_"):
            return None
        return f"--no-{self.flag.removeprefix('--')}"

    def words_for(self, value: Any) -> str:
        """The option with a value, as on a command line, for messages."""
        if self.kind is bool and (name := self.flag if value else self.negative):
            return name
        return f"{self.flag} {shlex.quote(str(value))}" if value is not None else f"no {self.flag}"

    @property
    def is_flag(self) -> bool:
        """Whether users can set it on the command line or in a file."""
        return self.declaration.flag

    @property
    def required(self) -> bool:
        """Whether it has neither a default nor a derived default."""
        return self.default is dataclasses.MISSING and self.declaration.derive is None

    @property
    def default_text(self) -> str:
        """The default in help texts: a value, a description, ``none`` or ``required``."""
        if self.required:
            return REQUIRED
        if self.declaration.derive is not None:
            return self.declaration.derive_text
        if self.default is None:
            return "none"
        return str(self.default).lower() if self.kind is bool else str(self.default)

    @property
    def value_text(self) -> str:
        """The metavar in help texts: ``INTEGER``, or the choices."""
        if self.choices:
            return "|".join(self.choices)
        return {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: ""}[self.kind]

    @property
    def maximum(self) -> float | None:
        """Inclusive upper bound; every integer has one, so that no value causes unbounded work."""
        declared = self.declaration
        is_open = declared.maximum is None and declared.below is None
        return MAX_COUNT if is_open and self.kind is int else declared.maximum

    @property
    def bounds_text(self) -> str:
        """The bounds of a number in help texts: ``1 to 100,000``, ``above 0``, ``0 to below 1``; else empty."""
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
        """Convert a value to the type of the option, and check its choices and bounds."""
        # TOML and JSON write 1 for 1.0.
        if self.kind is float and type(value) is int:
            value = math.inf if finite_number(value) is None else float(value)
        if self.declaration.words and not isinstance(value, bool | str):
            value = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        # Not ``isinstance``: a bool is an int in Python, and ``--num-layers true`` in a file must be an error.
        if type(value) is not self.kind:
            expected = _KIND_NAMES[self.kind]
            return None, Problem(self.flag, "type", f"must be {expected}, is {short_repr(value)}")
        if self.choices and value not in self.choices:
            return None, Problem(self.flag, "choice", f"must be one of {', '.join(self.choices)}; is {value!r}")
        if isinstance(value, int | float):
            return self._within_bounds(value)
        if value == "":
            return None, Problem(self.flag, "range", "must not be empty")
        if self.declaration.refers_to != "value" and (address := _ADDRESS.search(str(value))):
            remedy = _REMEDY_OF_CHECKPOINTS if self.name in _CHECKPOINTS else "give a folder or file of this machine"
            return None, Problem(self.flag, "address", f"{address[0]} is an address, must be a local path; {remedy}")
        return value, None

    def _within_bounds(self, value: float) -> tuple[Any, Problem | None]:
        limits, maximum = self.declaration, math.inf if self.maximum is None else self.maximum
        rules = (
            (isinstance(value, float) and not math.isfinite(value), "finite"),
            (limits.minimum is not None and value < limits.minimum, f"at least {limits.minimum}"),
            (limits.above is not None and value <= limits.above, f"above {limits.above}"),
            (value > maximum, f"at most {maximum:,}"),
            (limits.below is not None and value >= limits.below, f"below {limits.below}"),
        )
        broken = [rule for is_broken, rule in rules if is_broken]
        if broken:
            return None, Problem(self.flag, "range", f"must be {' and '.join(broken)}, is {short_repr(value)}")
        return value, None


def _plain_type(annotation: Any) -> tuple[type, tuple[str, ...], bool]:
    """Type, choices, and whether None is allowed, of a field's annotation."""
    optional = False
    # ``Literal[...] | None`` is a ``typing.Union``, other unions are not.
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        rest = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        optional, annotation = True, rest[0]
    if typing.get_origin(annotation) is Literal:
        return str, tuple(typing.get_args(annotation)), optional
    if annotation not in _KIND_NAMES:
        raise TypeError(f"an option cannot be of type {annotation!r}")
    return annotation, (), optional


def concern_specs(concern: str, dataclass_type: type) -> tuple[OptionSpec, ...]:
    """The options that ``dataclass_type`` declares, in order."""
    annotations = typing.get_type_hints(dataclass_type)
    title = getattr(dataclass_type, "PANEL", concern.replace("_", " ").capitalize())
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
                panel=entry.metadata[_KEY].panel or title,
            )
        )
    return tuple(specs)
