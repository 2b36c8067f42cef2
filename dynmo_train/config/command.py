"""The command-line options of the declared fields: the signature that typer reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from .options import OptionSpec
from .resolve import option_specs


def _parameter(spec: OptionSpec) -> inspect.Parameter:
    names = f"{spec.flag}/{spec.negative}" if spec.negative else spec.flag
    ending = "" if spec.default is None else " [required]" if spec.required else f" [default: {spec.default_text}]"
    declared = typer.Option(
        names,
        help=spec.declaration.help + ending,
        metavar=spec.value_text or None,
        show_default=False,
    )
    # None stands for "not given": the values of a file and the defaults are merged in afterwards.
    kind: Any = spec.kind
    annotation = Annotated[kind | None, declared]
    return inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give ``function``, which ends in ``**flags``, an explicit parameter for every declared option."""
    own = [
        parameter
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = own + [_parameter(spec) for spec in option_specs().values() if spec.is_flag]

    @wraps(function)
    def command(**values: Any) -> None:
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
