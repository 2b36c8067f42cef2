"""Command-line options from declared fields: typer signatures, and translation of Megatron's flags."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import Annotated, Any

import typer

from .._common.console import print_message
from .._common.document import MAX_COUNT, DocumentError
from .._common.help import HelpCommand
from .._common.panel import Panel
from .compat.translate import translate
from .extensions import base_family
from .options import OptionSpec
from .panels import PANELS
from .resolve import ALTERNATIVES, built_in_concerns, built_in_specs, installed_specs

# In ``ctx.meta``: values of the options of installed packages, by name.
INSTALLED_KEY = "dynmo.installed_options"
# In ``ctx.meta``: the command line as a list, before its translation.
WORDS_KEY = "dynmo.words"


def _panel(spec: OptionSpec, default: str | None, *, always: bool) -> Panel:
    """The section of an option, and what typer cannot know: values of a file and defaults are merged later."""
    alternatives = {first: others for first, *others in ALTERNATIVES}.get(spec.name, [])
    is_required = default is None and (spec.required or bool(alternatives))
    if default is None:
        default = "" if spec.default is None or spec.required else spec.default_text
        if alternatives:
            default = f"or {', '.join(built_in_specs()[name].flag for name in alternatives)}"
    bounds, unbounded = spec.bounds_text, f" to {MAX_COUNT:,}"
    return Panel(
        spec.panel,
        rare=not (spec.declaration.common or always or is_required),
        required=is_required,
        default=default,
        bounds=f"at least {bounds.removesuffix(unbounded)}" if bounds.endswith(unbounded) else bounds,
        table=spec.concern if spec.concern in built_in_concerns() else "",
    )


@cache
def _parameter(spec: OptionSpec, default: str | None, *, always: bool) -> inspect.Parameter:
    names = f"{spec.flag}/{spec.negative}" if spec.negative else spec.flag
    declared = typer.Option(
        names,
        help=spec.declaration.help,
        metavar=spec.value_text or None,
        show_default=False,
        rich_help_panel=_panel(spec, default, always=always),
    )
    # None means "not given": values of a file and defaults are merged later.
    kind: Any = spec.kind
    annotation = Annotated[kind | None, declared]
    return inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace ``**flags`` of a function by one typer parameter for every built-in training option.

    ``MegatronCommand`` adds those of installed packages when it runs.
    """
    return with_specs(built_in_specs().values())(function)


def with_specs(
    specs: Iterable[OptionSpec], *, defaults: Mapping[str, str] | None = None, always: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace ``**flags`` of a function by one typer parameter for each of the options.

    Args:
        specs: the options.
        defaults: option name to description of a default that the command has in place of the declared one.
        always: whether ``--help`` shows all of them, not only common ones.
    """
    other = defaults or {}
    declared = [_parameter(spec, other.get(spec.name), always=always) for spec in specs if spec.is_flag]

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

        # typer reads the signature and the annotations, not the code, to find the parameters.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


class MegatronCommand(HelpCommand):
    """A command that also accepts the flags of Megatron's scripts; its name is the model family.

    The options of installed packages are added when the command runs, so that other commands do not import them.
    """

    panel_order = PANELS

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Add the options of installed packages, then parse."""

        def collect(**flags: Any) -> None: ...

        # A command of its own, because typer makes click options from a signature only.
        extension = typer.Typer(add_completion=False)
        extension.command()(with_specs(installed_specs().values(), always=True)(collect))
        known = {parameter.name for parameter in self.params}
        # The context may be made more than once for a command; its options are added once.
        self.params += [option for option in typer.main.get_command(extension).params if option.name not in known]
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; typer passes on only the values of the function's own parameters."""
        ctx.meta[INSTALLED_KEY] = {name: ctx.params.pop(name) for name in installed_specs() if name in ctx.params}
        return super().invoke(ctx)

    def family(self) -> str:
        """The built-in family whose flags the command accepts."""
        return base_family(self.name or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate Megatron's flags, then parse.

        Raises:
            DocumentError: refused flags; reports all of them.
        """
        declared = {
            name: 0 if getattr(option, "is_flag", False) else option.nargs
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        }
        if ctx.resilient_parsing:  # completion
            return super().parse_args(ctx, args)
        ctx.meta[WORDS_KEY] = list(args)
        translation = translate(args, self.family(), declared | {"--help": 0, "--help-all": 0})
        if translation.problems:
            raise DocumentError("the command line", list(translation.problems))
        if translation.notes and os.environ.get("RANK", "0") == "0":
            print_message(f"accepted for compatibility and ignored: {'; '.join(translation.notes)}")
        return super().parse_args(ctx, list(translation.arguments))
