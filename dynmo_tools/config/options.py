"""Settings declared once: a dataclass field with a help sentence becomes a flag, a TOML key and a line of help.

    setting(...) ─> field of a dataclass ─┬─ parameters ─> flags and help ─> build ────────┐
                                          └─ keys of a recipe ─> from_mapping ─────────────┴─> settings of a Job
    settings ─> jsonable, files_of ─> digest of the task manifest, sidecar of the dataset

A flag, its recipe key and its line of help therefore never differ.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from .._common.document import MAX_INTEGER, parse_toml
from .._common.errors import UsageError
from .._common.panel import OTHER, Panel


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    names: Sequence[str] = (),
    file: bool = False,
    data: bool = True,
    output: bool = False,
    folder: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    rare: bool = False,
    panel: str | None = None,
) -> Any:
    """Declare a field of a settings dataclass.

    Args:
        default: value without the flag; without a default the flag is required.
        help: one sentence, with the unit.
        names: further names of the flag, such as those of Megatron's tools.
        file: the value names a file whose content determines the result; its size and date are part of the manifest.
        data: the value determines the result; a run is not resumed with another value.
        output: the value names a file or folder that is written.
        folder: the output is a folder.
        minimum: smallest value of a number.
        maximum: largest value of a number; integers are limited to 63 bits by default.
        rare: only ``--help-all`` shows the option.
        panel: section of help pages; None for the options that belong to the step alone.

    Raises:
        TypeError: the default is a list or dict.
    """
    metadata = {
        "help": help,
        "names": tuple(names),
        "file": file,
        "data": data,
        "output": output,
        "folder": folder,
        "minimum": minimum,
        "maximum": maximum,
        "panel": Panel(panel or OTHER, rare=rare),
    }
    # dataclasses refuse both as well, but ask for a default_factory, which has no value to show in the help.
    if isinstance(default, list | dict):
        raise TypeError("a default must be immutable")
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """The flag of a field: ``--min-tokens`` for ``min_tokens``."""
    return "--" + field_name.replace("_", "-")


def hints(kind: type) -> dict[str, Any]:
    """The resolved types of the fields of a settings dataclass."""
    # With ``from __future__ import annotations``, the types of fields are strings.
    return typing.get_type_hints(kind)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(member for member in typing.get_args(hint) if member is not type(None))
    return hint


def _violated_rule(value: float, minimum: float | None, maximum: float | None) -> str:
    """The rule that a number violates; empty if none."""
    # NaN passes every comparison below.
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if minimum is not None and value < minimum:
        return f"at least {minimum:,}"
    most = MAX_INTEGER if maximum is None and isinstance(value, int) else maximum
    return f"at most {most:,}" if most is not None and value > most else ""


def number(
    *names: str, help: str, minimum: float | None = None, maximum: float | None = None, panel: str | None = None
) -> Any:
    """A typer option of a number within bounds, which the help states; NaN and infinity are refused.

    Args:
        names: names of the flag; without any, typer derives one from the parameter.
        help: one sentence, with the unit.
        minimum: smallest value; None has no limit.
        maximum: largest value; None has no limit for floats, and is 63 bits for integers.
        panel: section of help pages; None is the default one.

    Raises:
        typer.BadParameter: later, when the option is parsed and its value is outside the bounds.
    """
    import typer

    # typer's own bounds let NaN pass, and do not limit integers to 63 bits.
    def check(context: Any, parameter: Any, value: Any) -> Any:
        """Return a value within the bounds.

        Raises:
            typer.BadParameter: the value is outside.
        """
        if value is not None and (rule := _violated_rule(value, minimum, maximum)):
            raise typer.BadParameter(f"{value} must be {rule}.", ctx=context, param=parameter)
        return value

    return typer.Option(*names, help=help, min=minimum, max=maximum, callback=check, rich_help_panel=panel)


def check_numbers(settings: Any, where: str = "") -> None:
    """Refuse numbers outside their bounds, all in one message.

    Args:
        settings: an object of a settings dataclass.
        where: the recipe table of the settings; empty for flags.

    Raises:
        UsageError: with each setting, its value and its rule.
    """
    violations = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            rule = _violated_rule(value, field.metadata["minimum"], field.metadata["maximum"])
            name = f"{where}.{field.name.replace('_', '-')}" if where else flag_name(field.name)
            violations += [f"{name} {value}: must be {rule}"] if rule else []
    if violations:
        raise UsageError("; ".join(violations))


def parameters(kind: type) -> list[inspect.Parameter]:
    """The settings of ``kind`` as typer parameters, one flag per field."""
    import typer  # not at the top: workers import settings but parse no flags

    found = []
    resolved = hints(kind)
    for field in dataclasses.fields(kind):
        hint = resolved[field.name]
        default = ... if field.default is dataclasses.MISSING else field.default
        # typer knows lists for repeated flags, settings are frozen and have tuples; ``build`` converts them back.
        if _is_tuple(hint):
            hint = list[typing.get_args(hint)[0]]  # type: ignore[misc]
            default = list(default) if default is not ... else ...
        names = [flag_name(field.name), *field.metadata["names"]]
        if _without_none(hint) is bool:
            names[0] += f"/--no-{field.name.replace('_', '-')}"
        if _without_none(hint) in (int, float):
            option = number(
                *names,
                help=field.metadata["help"],
                minimum=field.metadata["minimum"],
                maximum=field.metadata["maximum"],
                panel=field.metadata["panel"],
            )
        else:
            option = typer.Option(*names, help=field.metadata["help"], rich_help_panel=field.metadata["panel"])
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[hint, option],
                default=inspect.Parameter.empty if default is ... else default,
            )
        )
    return found


def command(
    name: str, help: str, params: Sequence[inspect.Parameter], body: Callable[..., None]
) -> Callable[..., None]:
    """A function with these parameters for ``typer.Typer.command``; it passes all values to ``body``."""

    def run(**values: Any) -> None:
        body(**values)

    # typer reads name, docstring and signature of a function; this one gets those of the settings.
    run.__name__ = name.replace("-", "_")
    run.__doc__ = help
    run.__signature__ = inspect.Signature(list(params))  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in params}
    return run


def build(kind: type, values: Mapping[str, Any]) -> Any:
    """A settings object from parsed flags; lists become tuples.

    Args:
        kind: dataclass of the settings.
        values: values of all flags of the command; those of other settings are ignored.

    Raises:
        UsageError: see ``check_numbers`` and the rules of the dataclass.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    settings = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})
    check_numbers(settings)
    return settings


def _coerce(value: Any, hint: Any, where: str) -> Any:
    if value is None and _without_none(hint) is not hint:
        return None
    hint = _without_none(hint)
    if _is_tuple(hint):
        inner = typing.get_args(hint)[0]
        return tuple(_coerce(element, inner, where) for element in (value if isinstance(value, list) else [value]))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise UsageError(f"{where} {value}: must be below 2^1024") from error
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        choices = [member.value for member in hint]
        if value not in choices:
            raise UsageError(f"{where} {value!r}: must be one of {', '.join(map(str, choices))}")
        return hint(value)
    # Not isinstance: a bool is an int, and ``workers = true`` must not be 1.
    if type(value) is not hint:
        raise UsageError(f"{where} {value!r}: must be of type {hint.__name__}")
    return value


def from_mapping(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """A settings object from a TOML table whose keys are the flags without dashes.

    Raises:
        UsageError: a key is unknown, a required key is missing, or a value is invalid.
    """
    by_key = {field.name.replace("_", "-"): field for field in dataclasses.fields(kind)}
    resolved = hints(kind)
    chosen: dict[str, Any] = {}
    for key, value in values.items():
        field = by_key.get(key.replace("_", "-"))
        if field is None:
            raise UsageError(f"{where}: unknown key {key!r}; known keys are {', '.join(sorted(by_key))}")
        chosen[field.name] = _coerce(value, resolved[field.name], f"{where}.{key}")
    missing = [
        key for key, field in by_key.items() if field.default is dataclasses.MISSING and field.name not in chosen
    ]
    if missing:
        raise UsageError(f"{where}: required keys are missing: {', '.join(missing)}")
    settings = kind(**chosen)
    check_numbers(settings, where)
    return settings


def parse_assignment(text: str) -> tuple[str, str, Any]:
    """Split ``step.key=value`` into step, key and value; the value is parsed as TOML, else used as text.

    Raises:
        UsageError: the text does not have this form.
    """
    left, equals, right = text.partition("=")
    step, dot, key = left.strip().rpartition(".")
    if not equals or not dot or not step or not key:
        raise UsageError(f"--set {text!r} must have the form step.key=value")
    # As TOML first, so that numbers and lists keep their type; a path or a name needs no quotes on the command line.
    try:
        value = parse_toml(f"value = {right}")["value"]
    except ValueError:
        value = right.strip()
    return step, key, value


def jsonable(settings: Any, *, data_only: bool = False) -> dict[str, Any]:
    """The settings as JSON values, for manifests and summaries.

    Args:
        settings: an object of a settings dataclass.
        data_only: only the settings that determine the result.
    """
    result: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        if data_only and not field.metadata["data"]:
            continue
        value = getattr(settings, field.name)
        if isinstance(value, tuple):
            value = [str(v) if isinstance(v, Path) else v for v in value]
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, enum.Enum):
            value = value.value
        result[field.name] = value
    return result


def files_of(settings: Any) -> list[Path]:
    """The files that the settings name and whose content determines the result."""
    more = getattr(settings, "named_files", None)  # files named within other values
    return [*_named(settings, "file"), *(more() if more is not None else [])]


def outputs_of(settings: Any) -> list[Path]:
    """The files and folders that the settings name and that are written."""
    return _named(settings, "output")


def output_folders_of(settings: Any) -> list[Path]:
    """The outputs that are folders."""
    return _named(settings, "folder")


def _named(settings: Any, kind: str) -> list[Path]:
    found: list[Path] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.metadata[kind] and value is not None:
            found.extend(value if isinstance(value, tuple) else [value])
    return found
