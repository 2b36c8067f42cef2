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
from .extensions import FAMILIES, base_family, installed_families
from .options import OptionSpec
from .resolve import built_in_specs, installed_specs

# In ``ctx.meta``: values of the options of installed packages, by name.
INSTALLED_KEY = "dynmo.installed_options"


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
    """Give ``function``, which ends in ``**flags``, an explicit parameter for every option of training.

    ``MegatronCommand`` adds those of installed packages when it runs.
    """
    return with_specs(built_in_specs().values())(function)


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
    """A command that takes the flags of Megatron's scripts as well; its name is the model's family.

    The options of installed packages are added when the command runs, so that other commands need not load them.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Add the options of installed packages, and parse the words."""

        def take(**flags: Any) -> None: ...

        alone = typer.Typer(add_completion=False)
        alone.command()(with_specs(installed_specs().values())(take))
        known = {parameter.name for parameter in self.params}
        self.params += [option for option in typer.main.get_command(alone).params if option.name not in known]
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; typer passes on only the values of the function's own parameters."""
        ctx.meta[INSTALLED_KEY] = {name: ctx.params.pop(name) for name in installed_specs() if name in ctx.params}
        return super().invoke(ctx)

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
        # `finetune mnli` and `finetune race` are named after their task, not after a family.
        name = self.name or ""
        family = base_family(name) if name in {*FAMILIES, *installed_families()} else name
        made = translate(args, family, declared | {"--help": 0})
        first = os.environ.get("RANK", "0") == "0"
        if made.problems:
            raise DocumentError("the command line", list(made.problems))
        if made.notes and first:
            say(f"taken without effect: {'; '.join(made.notes)}")
        return super().parse_args(ctx, list(made.arguments))
