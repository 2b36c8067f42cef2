"""Settings declared once: a field with a sentence and a unit becomes a flag, a TOML key and a line of help."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from .errors import UsageError


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    names: Sequence[str] = (),
    file: bool = False,
    data: bool = True,
    output: bool = False,
) -> Any:
    """A field of a settings dataclass.

    Args:
        default: the value without the flag; left out, the flag is required.
        help: one sentence, with the unit.
        names: further names of the flag, such as those of the classic tools.
        file: the value names a file whose content shapes the result, so that its size and date belong to the plan.
        data: the value shapes the result; a run is not resumed under another value of it.
        output: the value names a file or folder that is written.
    """
    metadata = {"help": help, "names": tuple(names), "file": file, "data": data, "output": output}
    if isinstance(default, list | dict):
        raise TypeError("a default must be immutable")
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """``min_tokens`` is ``--min-tokens``."""
    return "--" + field_name.replace("_", "-")


def hints(kind: type) -> dict[str, Any]:
    """The resolved types of a settings dataclass."""
    return typing.get_type_hints(kind)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(member for member in typing.get_args(hint) if member is not type(None))
    return hint


def parameters(kind: type) -> list[inspect.Parameter]:
    """The settings of ``kind`` as typer parameters, one flag each."""
    import typer  # not above: workers know settings, and parse no flags

    found = []
    resolved = hints(kind)
    for field in dataclasses.fields(kind):
        hint = resolved[field.name]
        default = ... if field.default is dataclasses.MISSING else field.default
        if _is_tuple(hint):
            hint = list[typing.get_args(hint)[0]]  # type: ignore[misc]
            default = list(default) if default is not ... else ...
        names = [flag_name(field.name), *field.metadata["names"]]
        if _without_none(hint) is bool:
            names[0] += f"/--no-{field.name.replace('_', '-')}"
        option = typer.Option(*names, help=field.metadata["help"])
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
    """A function with these parameters for ``typer.Typer.command``; it hands all values to ``body``."""

    def run(**values: Any) -> None:
        body(**values)

    run.__name__ = name.replace("-", "_")
    run.__doc__ = help
    run.__signature__ = inspect.Signature(list(params))  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in params}
    return run


def build(kind: type, values: Mapping[str, Any]) -> Any:
    """A settings object from parsed flags: lists become tuples."""
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})


def _coerce(value: Any, hint: Any, where: str) -> Any:
    if value is None and _without_none(hint) is not hint:
        return None
    hint = _without_none(hint)
    if _is_tuple(hint):
        inner = typing.get_args(hint)[0]
        return tuple(_coerce(element, inner, where) for element in (value if isinstance(value, list) else [value]))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        choices = [member.value for member in hint]
        if value not in choices:
            raise UsageError(f"{where} is {value!r}; it must be one of {', '.join(map(str, choices))}")
        return hint(value)
    if type(value) is not hint:
        raise UsageError(f"{where} is {value!r}; it must be of type {hint.__name__}")
    return value


def from_mapping(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """A settings object from a TOML table whose keys are the flags without dashes; unknown keys are refused."""
    by_key = {field.name.replace("_", "-"): field for field in dataclasses.fields(kind)}
    resolved = hints(kind)
    chosen: dict[str, Any] = {}
    for key, value in values.items():
        field = by_key.get(key.replace("_", "-"))
        if field is None:
            raise UsageError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(by_key))}")
        chosen[field.name] = _coerce(value, resolved[field.name], f"{where}.{key}")
    missing = [
        key for key, field in by_key.items() if field.default is dataclasses.MISSING and field.name not in chosen
    ]
    if missing:
        raise UsageError(f"{where}: needs {', '.join(missing)}")
    return kind(**chosen)


def parse_assignment(text: str) -> tuple[str, str, Any]:
    """``step.key=value`` as (step, key, value); the value is read as TOML, or as text where it is none."""
    left, equals, right = text.partition("=")
    step, dot, key = left.strip().rpartition(".")
    if not equals or not dot or not step or not key:
        raise UsageError(f"--set {text!r} must have the form step.key=value")
    try:
        value = tomllib.loads(f"value = {right}")["value"]
    except tomllib.TOMLDecodeError:
        value = right.strip()
    return step, key, value


def jsonable(settings: Any, *, data_only: bool = False) -> dict[str, Any]:
    """The settings as JSON values, for plans and summaries."""
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
    """The files that the settings name and that shape the result."""
    more = getattr(settings, "named_files", None)  # those that are named within other values
    return [*_named(settings, "file"), *(more() if more is not None else [])]


def outputs_of(settings: Any) -> list[Path]:
    """The files and folders that the settings name and that are written."""
    return _named(settings, "output")


def _named(settings: Any, kind: str) -> list[Path]:
    found: list[Path] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.metadata[kind] and value is not None:
            found.extend(value if isinstance(value, tuple) else [value])
    return found
