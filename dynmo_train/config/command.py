"""The command-line options of the declared fields: the signature that typer reads, and the flags of other programs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .._common.console import say
from .._common.document import DocumentError
from .compat import translate
from .options import OptionSpec
from .resolve import option_specs


def _parameter(spec: OptionSpec) -> inspect.Parameter:
    names = f"{spec.flag}/{spec.negative}" if spec.negative else spec.flag
    bounds = f" [{spec.bounds_text}]" if spec.bounds_text else ""
    ending = "" if spec.default is None else " [required]" if spec.required else f" [default: {spec.default_text}]"
    declared = typer.Option(
        names,
        help=spec.declaration.help + bounds + ending,
        metavar=spec.value_text or None,
        show_default=False,
    )
    # None stands for "not given": the values of a file and the defaults are merged in afterwards.
    kind: Any = spec.kind
    annotation = Annotated[kind | None, declared]
    return inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give ``function``, which ends in ``**flags``, an explicit parameter for every declared option of training."""
    return with_specs(option_specs().values())(function)


def with_specs(specs: Iterable[OptionSpec]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function that ends in ``**flags`` an explicit parameter for each of these options."""
    declared = [_parameter(spec) for spec in specs if spec.is_flag]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in inspect.signature(function, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        parameters = own + declared

        @wraps(function)
        def command(**values: Any) -> None:
            function(**values)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


class MegatronCommand(TyperCommand):
    """A command that takes the flags of Megatron's scripts as well; its name is the model's family."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words in this package's own terms.

        Raises:
            DocumentError: flags that cannot be taken; all of them at once.
        """
        declared = {
            name: 0 if getattr(option, "is_flag", False) else option.nargs
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        }
        made = translate(args, self.name or "", declared | {"--help": 0})
        first = os.environ.get("RANK", "0") == "0"
        if made.problems:
            raise DocumentError("the command line", list(made.problems))
        if made.notes and first:
            say(f"taken without effect: {'; '.join(made.notes)}")
        return super().parse_args(ctx, list(made.arguments))
