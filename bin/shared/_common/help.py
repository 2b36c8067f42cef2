"""Help pages: options grouped by concern, required ones first, at the full width of the terminal.

A command with more than ``UNGROUPED`` options has one section per panel. ``--help`` leaves out the rare options and
reports their number; ``--help-all`` shows them. An option declares both where it is declared::

    typer.Option("--window", help="...", rich_help_panel=Panel("Costs", rare=True))

    width       layout
    100 ...     flags | value or choices | default | help
    60 ... 99   flags and value | help [bounds; default]
    ... 59      flags and value, the help below

The pages are drawn without rich, whose import would be a third of the time of ``--help``.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from .completion import complete_choices
from .panel import OTHER, Panel

UNGROUPED = 12
REQUIRED, HELP = "Required", "Help"
Function = TypeVar("Function", bound=Callable[..., Any])
_WIDE, _MEDIUM = 100, 60
# A bound that is as large as this one has no information.
_UNBOUNDED = 2**31 - 1
# A default that depends on other values ends the help: "... Default: as in the profile." or "... [default: 4 x ...]"
_DEFAULT_AT_END = re.compile(r"\s*(?:\[default: (.+)\]|;? ?(?<!\[)\b[Dd]efault: (.+?))\.?$")
_TYPES = {
    **{"int": "INTEGER", "int range": "INTEGER", "integer": "INTEGER", "integer range": "INTEGER"},
    **{"float": "NUMBER", "float range": "NUMBER", "str": "TEXT", "text": "TEXT", "bool": ""},
    **{"path": "PATH", "file": "PATH", "directory": "PATH", "Path": "PATH"},
}
_BOLD, _NAME, _DIM, _END = "\x1b[1m", "\x1b[36m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class OptionHelp:
    """What a help page states about an option or an argument.

    Attributes:
        names: flags, such as ``-o, --output``; ``--[no-]verify`` for a flag and its negative.
        flags: the same flags, each by itself.
        value: type or choices; empty for a flag.
        text: help, without default and bounds.
        bounds: allowed range of a number, or empty.
        default: default value or its description, or empty.
        envvar: environment variable that sets the option, or empty.
        panel: section of the option.
        required: whether a value must be given.
        rare: whether only ``--help-all`` shows it.
        table: table of the option in a configuration file, or empty.
    """

    names: str
    flags: tuple[str, ...] = ()
    value: str = ""
    text: str = ""
    bounds: str = ""
    default: str = ""
    envvar: str = ""
    panel: str = OTHER
    required: bool = False
    rare: bool = False
    table: str = ""

    def notes(self, *, default: bool = True) -> str:
        """Bounds, environment variable and default in brackets; empty if there are none."""
        # Every count is at least 0 or 1.
        bounds = "" if self.bounds in ("at least 0", "at least 1") else self.bounds
        shown = [bounds, f"env: {self.envvar}" if self.envvar else ""]
        if default and self.default:
            shown.append(self.default if self.required else f"default: {self.default}")
        notes = "; ".join(filter(None, shown))
        return f"[{notes}]" if notes else ""


def _names(option: Any) -> str:
    negatives = list(option.secondary_opts)
    names = []
    for name in option.opts:
        negative = f"--no-{name.removeprefix('--')}"
        if negative in negatives:
            negatives.remove(negative)
            name = f"--[no-]{name.removeprefix('--')}"
        names.append(name)
    return ", ".join(sorted([*names, *negatives], key=lambda each: each.startswith("--")))


def _value(option: Any, ctx: Any) -> str:
    """Type or choices of an option; empty for a flag."""
    if getattr(option, "is_flag", False) or getattr(option, "count", False):
        return ""
    if option.metavar is not None:
        return str(option.metavar)
    if hasattr(option, "display_type"):
        label = str(option.display_type(ctx)).strip("<>")
    else:  # typer with the types of click
        label = "|".join(map(str, getattr(option.type, "choices", ()))) or str(option.type.name)
    label = label.removeprefix("list[").removesuffix("]") if label.startswith("list[") else label
    return _TYPES.get(label, label)


def _bounds(option: Any) -> str:
    """The bounds of a number; those without information are left out."""
    kind = getattr(option, "type", None)
    low, high = (getattr(option, name, getattr(kind, name, None)) for name in ("min", "max"))
    if high is not None and high >= _UNBOUNDED:
        high = None
    low, high = (None if bound is None else f"{bound:,}".removesuffix(".0") for bound in (low, high))
    if low is not None and high is not None:
        return f"{low} to {high}"
    if low is not None:
        return f"at least {low}"
    return "" if high is None else f"at most {high}"


def _default(option: Any) -> str:
    """The default value of an option as text; empty if there is none."""
    if isinstance(option.show_default, str):
        return str(option.show_default)
    value = option.default
    # The default of a parameter that was not declared with one may be a marker of typer or a function.
    if not option.show_default or value is None or callable(value) or type(value).__name__ == "Sentinel":
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        if option.secondary_opts:
            return (
                str(value).lower()
                if option.secondary_opts[0].startswith("--no-")
                else (option.opts[0] if value else option.secondary_opts[0])
            )
        return "true" if value else ""
    if isinstance(value, list | tuple):
        return " ".join(str(each.value if isinstance(each, Enum) else each) for each in value)
    return f"{value:,}" if type(value) is int and abs(value) >= 10_000 else str(value)


def describe(option: Any, ctx: Any) -> OptionHelp:
    """The help of one option or argument of a command."""
    panel = getattr(option, "rich_help_panel", None)
    panel = panel if isinstance(panel, Panel) else Panel(panel or OTHER)
    text = " ".join((option.help or "").split())
    default = panel.default or _default(option)
    if at_end := _DEFAULT_AT_END.search(text):
        text = text[: at_end.start()]
        text = text if not text or text.endswith((".", "?", "!", ")")) else text + "."
        default = at_end[1] or at_end[2]
    if option.param_type_name == "argument":
        metavar = option.metavar or str(option.name).upper() + ("..." if option.nargs == -1 else "")
        return OptionHelp(names=metavar, text=text, default=default, required=option.required)
    envvar = option.envvar if isinstance(option.envvar, str) else " ".join(option.envvar or ())
    return OptionHelp(
        names=_names(option),
        flags=(*option.opts, *option.secondary_opts),
        value=_value(option, ctx),
        text=text,
        bounds=panel.bounds or _bounds(option),
        default=default,
        envvar=envvar,
        panel=str(panel),
        required=option.required or panel.required,
        rare=panel.rare,
        table=panel.table,
    )


def _is_grouped(rows: Sequence[OptionHelp]) -> bool:
    return sum(row.panel != HELP for row in rows) > UNGROUPED


def sections(rows: Iterable[OptionHelp], order: Sequence[str] = ()) -> dict[str, list[OptionHelp]]:
    """Options by the title of their section.

    Required ones are first, then those without a panel, the panels in ``order`` and other panels.
    """
    shown = list(rows)
    if not _is_grouped(shown):
        return {OTHER: [*(r for r in shown if r.required), *(r for r in shown if not r.required)]}
    titles = dict.fromkeys([REQUIRED, OTHER, *order, *(row.panel for row in shown if row.panel != HELP), HELP])
    found: dict[str, list[OptionHelp]] = {title: [] for title in titles}
    for row in shown:
        found[REQUIRED if row.required else row.panel].append(row)
    return {title: each for title, each in found.items() if each}


def terminal_width() -> int:
    """Columns of the terminal, or ``COLUMNS``; 80 without a terminal."""
    return max(20, shutil.get_terminal_size().columns)


def _has_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class _Page:
    """Lines of a help page for one width of the terminal."""

    def __init__(self, width: int, *, colour: bool) -> None:
        self.width, self.colour = width, colour
        self.lines: list[str] = []

    def paint(self, text: str, style: str) -> str:
        """The text in a colour, on terminals that have colours."""
        return f"{style}{text}{_END}" if self.colour and text.strip() else text

    def heading(self, title: str) -> None:
        """Start a section."""
        self.lines += ["", self.paint(f"{title}:", _BOLD)]

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names on the left, their help on the right."""
        left = min(max((len(name) for name, _ in rows), default=0), 30 if self.width < _WIDE else 40)
        for name, text in rows:
            self._row([(name, left, _NAME)], text)

    def options(self, rows: Sequence[OptionHelp], widths: tuple[int, int, int]) -> None:
        """One option a row, in the layout of the width."""
        if self.width >= _WIDE:
            names, value, default = widths
            for row in rows:
                is_short = len(row.default) <= default and not row.required
                cells = [
                    (row.names, names, _NAME),
                    ("\n".join(_wrapped_choices(row.value, value)), value, ""),
                    (row.default if is_short else "", default, _DIM),
                ]
                self._row(cells, f"{row.text} {row.notes(default=not is_short)}".strip())
            return
        for row in rows:
            self._row([(f"{row.names} {row.value}".strip(), widths[0], _NAME)], f"{row.text} {row.notes()}".strip())

    def _row(self, cells: Sequence[tuple[str, int, str]], text: str) -> None:
        """A row of cells (text, columns, style), and a text that is wrapped in the columns that are left.

        A first cell that is too long, or any in a narrow terminal, has a line of its own.
        """
        indent = 2 + sum(columns + 2 for _, columns, _ in cells)
        if self.width < _MEDIUM:
            self._name(cells[0][0], cells[0][2])
            self.lines += textwrap.wrap(text, self.width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6)
            return
        texts = textwrap.wrap(text, max(10, self.width - indent), break_long_words=False, break_on_hyphens=False)
        columns = [[cell] if at == 0 else cell.split("\n") for at, (cell, _, _) in enumerate(cells)]
        if len(cells[0][0]) > cells[0][1]:
            self._name(cells[0][0], cells[0][2])
            columns[0] = []
        for at in range(max(len(texts), *map(len, columns))):
            line = "  "
            for content, (_, width, style) in zip(columns, cells, strict=True):
                part = content[at] if at < len(content) else ""
                line += self.paint(part, style) + " " * max(1, width - len(part) + 2)
            self.lines.append((line + (texts[at] if at < len(texts) else "")).rstrip())

    def _name(self, name: str, style: str) -> None:
        """A name in lines of its own."""
        parts = textwrap.wrap(name, self.width - 6, break_long_words=False, break_on_hyphens=False)
        first, *others = (line for part in parts for line in _wrapped_choices(part, self.width - 6))
        self.lines += [f"  {self.paint(first, style)}", *(f"      {self.paint(each, style)}" for each in others)]


def _wrapped_choices(value: str, width: int) -> list[str]:
    """Choices in lines of at most ``width`` columns, cut at ``|``."""
    lines = [""]
    for at, choice in enumerate(value.split("|")):
        piece = choice if at == 0 else f"|{choice}"
        if lines[-1] and len(lines[-1]) + len(piece) + 1 > width:
            lines[-1] += "|"
            lines.append(choice)
        else:
            lines[-1] += piece
    return lines


def _column_widths(rows: Sequence[OptionHelp], width: int) -> tuple[int, int, int]:
    """Columns for flags, values and defaults; a few long ones may be longer, so that the help has half of the width."""
    if width < _WIDE:
        return min(max(len(f"{row.names} {row.value}".strip()) for row in rows), 32 if width >= 76 else 26), 0, 0
    most = 24 + width // 10
    names = max((len(row.names) for row in rows if len(row.names) <= most), default=most)
    values = [len(line) for row in rows for line in _wrapped_choices(row.value, width // 7)]
    defaults = [len(row.default) for row in rows if len(row.default) <= width // 9 and not row.required]
    return names, min(max(values), 24), max(defaults, default=0)


class HelpPage:
    """Mixin of typer's commands and groups: a grouped help page, and the option ``--help-all``."""

    panel_order: Sequence[str] = ()  # titles in order; others follow as they occur
    _help_all: Any = None

    def get_help_option(self, ctx: Any) -> Any:
        """The option ``--help``."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            # typer would import pydantic, a quarter of the time of --help, to convert the default None to a bool
            option.default = False
        return option

    def get_params(self, ctx: Any) -> list[Any]:
        """Parameters of the command with ``--help`` and ``--help-all``."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        if ctx.resilient_parsing:
            for param in params:
                complete_choices(param)
        if self._help_all is None:
            shown = self.get_help_option(ctx)
            if shown is None:
                return params
            self._help_all = copy.copy(shown)
            self._help_all.opts, self._help_all.name = ["--help-all"], "help_all"
            self._help_all.help, self._help_all.callback = "Show all options and exit.", _show_all
            self._help_all.hidden = True
        return [*params, self._help_all]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, arguments, commands and options."""
        width = formatter.width = terminal_width()
        self.format_usage(ctx, formatter)  # type: ignore[attr-defined]
        self.format_help_text(ctx, formatter)  # type: ignore[attr-defined]
        page = _Page(width, colour=_has_colour())
        self._write(page, ctx, show_all=bool(ctx.meta.get(_SHOW_ALL)))
        formatter.write("\n".join([*page.lines, ""]))

    def _write(self, page: _Page, ctx: Any, *, show_all: bool) -> None:
        arguments, options = option_help(self, ctx)
        if arguments:
            page.heading("Arguments")
            page.pairs([(row.names, f"{row.text} {row.notes()}".strip()) for row in arguments])
        is_grouped = _is_grouped(options)
        shown = [row for row in options if show_all or not is_grouped or row.required or not row.rare]
        num_more = len(options) - len(shown)
        titles = sections(options, self.panel_order)
        widths = _column_widths(shown, page.width)
        for title, rows in titles.items():
            visible = [row for row in rows if row in shown]
            if not is_grouped:
                # Without a section of their own, required options are marked.
                visible = [replace(row, default=row.default or "required") if row.required else row for row in visible]
            if visible:
                page.heading(title)
                page.options(visible, widths)
        if num_more:
            page.lines += ["", f"{num_more} more option{'' if num_more == 1 else 's'}: {ctx.command_path} --help-all"]


_SHOW_ALL = "dynmo.help_all"


def _show_all(ctx: Any, _param: Any, value: bool) -> None:
    """Print the whole page and exit."""
    if value and not ctx.resilient_parsing:
        ctx.meta[_SHOW_ALL] = True
        sys.stdout.write(ctx.get_help() + "\n")
        ctx.exit()


def option_help(command: Any, ctx: Any) -> tuple[list[OptionHelp], list[OptionHelp]]:
    """The arguments and the options of a command, without hidden ones; ``--help`` is in a section of its own."""
    arguments, options = [], []
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        if param.param_type_name == "argument":
            arguments.append(describe(param, ctx))
        elif param is command.get_help_option(ctx):
            options.append(OptionHelp(names=", ".join(param.opts), text=param.help, panel=HELP))
        else:
            options.append(describe(param, ctx))
    return arguments, options


class HelpCommand(HelpPage, TyperCommand):
    """A command with a grouped help page."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line; for completion, without converting values.

        typer converts the default of each option, for which it imports pydantic: half of the time of a completion.
        """
        if not ctx.resilient_parsing:
            parsed: list[str] = super().parse_args(ctx, args)
            return parsed
        values, rest, _ = self.make_parser(ctx).parse_args(args=list(args))
        source = sys.modules[type(ctx).__module__].ParameterSource.COMMANDLINE
        for name, value in values.items():
            ctx.params[name] = value
            if value is not None and type(value).__name__ != "Sentinel":
                ctx.set_parameter_source(name, source)
        ctx.args = list(rest)
        return list(rest)


_SENTENCE_END = re.compile(r"[.?](?=\s+[A-Z]|\s*$)")


def first_sentence(text: str) -> str:
    """The first sentence of a help text as one line, without its full stop."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = _SENTENCE_END.search(paragraph)
    if end is None:
        return paragraph
    return paragraph[: end.start()] + ("?" if end[0] == "?" else "")


class HelpGroup(HelpPage, TyperGroup):
    """A group with the whole first sentence of each command; typer and click cut it at the width of the terminal."""

    first: Sequence[str] = ()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, those of ``first`` in front."""
        names = super().list_commands(ctx)
        return [*(name for name in self.first if name in names), *(name for name in names if name not in self.first)]

    def _write(self, page: _Page, ctx: Any, *, show_all: bool) -> None:
        super()._write(page, ctx, show_all=show_all)
        page.heading("Commands")
        page.pairs(list(self._command_rows(ctx)))

    def _command_rows(self, ctx: Any) -> Iterator[tuple[str, str]]:
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                yield name, command.short_help or first_sentence(command.help or "")


class _Deferred:
    """Mixin of commands whose parameters are made when they are first used.

    typer inspects the signatures of all commands of a program at each start: half of the time of ``--help``.
    """

    function: Callable[..., Any]
    callback: Any
    _params: list[Any]
    _is_made = False

    @property
    def params(self) -> list[Any]:
        """Parameters of the function."""
        if not self._is_made:
            self._is_made = True
            single = typer.Typer(add_completion=False)
            single.command()(self.function)
            made = typer.main.get_command(single)
            self._params, self.callback = made.params, made.callback
        return self._params

    @params.setter
    def params(self, params: list[Any]) -> None:
        self._params = params


class CommandLine(typer.Typer):
    """A typer application whose commands and groups have grouped help pages."""

    def __init__(self, *, cls: type[TyperGroup] | None = None, **settings: Any) -> None:
        # Completion is that of completion.py, which is faster than typer's and takes no rich.
        defaults = {"no_args_is_help": True, "rich_markup_mode": None, "add_completion": False}
        defaults["pretty_exceptions_enable"] = False
        super().__init__(cls=cls or HelpGroup, **{**defaults, **settings})

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[Function], Function]:
        """Register a command, as typer does."""
        kind = cls or HelpCommand

        def register(function: Function) -> Function:
            def without_parameters() -> None: ...

            without_parameters.__name__, without_parameters.__doc__ = function.__name__, function.__doc__
            deferred = type(kind.__name__, (_Deferred, kind), {"function": staticmethod(function)})
            super(CommandLine, self).command(name, cls=deferred, **settings)(without_parameters)
            return function

        return register
