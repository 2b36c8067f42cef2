"""Output of all commands: data on stdout, messages on stderr, one boundary that turns errors into exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType, TracebackType
from typing import Annotated, Any, NoReturn, Protocol

import typer

from .. import __version__
from .completion import SHELLS, current_shell, install, run_completion, script, variable_of
from .errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_TERMINATED, DynmoError
from .help import CommandLine, HelpGroup
from .streams import encoding_of, escaped, is_terminal, keep_running, printable

LOG_EVERY_S = 5.0
# Errors of writing to an open file, which do not have its name.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS)
DISTRIBUTION = "dynmo-toolkit"


class Format(StrEnum):
    """How a command reports: for a person, or for a program."""

    TEXT = "text"
    JSON = "json"


class Tick(Protocol):
    """Advances a progress display by ``amount`` units, with a short note on what was just done."""

    def __call__(self, amount: float, note: str = "") -> None:
        """Count ``amount`` more units as done."""


def print_message(text: str = "") -> None:
    """Print a message for a person on stderr, with control characters escaped; markup is not interpreted."""
    if sys.stderr is None:
        return
    # A message that cannot be written ends no command (``keep_running``), also where a library replaced the stream.
    with contextlib.suppress(OSError):
        sys.stderr.write(printable(text, sys.stderr, is_message=True) + "\n")
        sys.stderr.flush()


def emit(text: str, end: str = "\n", *, pattern: str = "\\x{:02x}") -> None:
    """Print data on stdout; on a terminal, control characters are escaped.

    Args:
        text: the data.
        end: what follows it.
        pattern: format of the number of a control character.
    """
    sys.stdout.write(printable(text, sys.stdout, pattern=pattern) + end)
    sys.stdout.flush()


def emit_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print ``document`` as indented JSON on stdout."""
    # Escaped here where the stream is not UTF-8: escapes of ``emit`` are not those of JSON.
    ensure_ascii = not encoding_of(sys.stdout).lower().startswith("utf")
    emit(json.dumps(document, indent=2, ensure_ascii=ensure_ascii, allow_nan=False), pattern="\\u{:04x}")


_NUMBER = re.compile(r"[-+~<]?\d[\d,.]*(e[-+]?\d+)?(/\d[\d,.]*)? ?[A-Za-z%]*")


def _right_aligned(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, with or without a unit; empty cells and dashes may stand between."""
    values = [cell for cell in cells if cell not in ("", "-")]
    return any(cells) and all(_NUMBER.fullmatch(cell) for cell in values)


def emit_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout: boxed on a terminal, aligned columns in a pipe. Numbers align right, words left."""
    right = [_right_aligned([row[i] for row in rows]) for i in range(len(columns))]
    if is_terminal(sys.stdout):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        # As Text, so that rich does not read brackets as markup.
        table = Table(title=Text(escaped(title)), title_justify="left")
        for column, numeric in zip(columns, right, strict=True):
            table.add_column(Text(escaped(column)), justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(Text(escaped(cell)) for cell in row))
        Console(file=sys.stdout).print(table)
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    emit(title)
    for row in [columns, *rows]:
        cells = zip(row, widths, right, strict=True)
        emit("  " + "  ".join(c.rjust(width) if numeric else c.ljust(width) for c, width, numeric in cells).rstrip())


def human_bytes(count: float) -> str:
    """``count`` bytes with a decimal unit: 1234567 is ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextmanager
def progress(label: str, total: float, unit: str) -> Iterator[Tick]:
    """Show progress on stderr: a bar on a terminal, a plain line every few seconds elsewhere.

    Args:
        label: what is being done, in a few words.
        total: the number of units in all; 0 when it is not known.
        unit: the name of a unit in the plural, such as ``documents`` or ``MB``.
    """
    if is_terminal(sys.stderr):
        # Loaded here: it would be an eighth of the time that --help takes
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task(escaped(label), total=total or None, unit=unit, note="")

            def tick_bar(amount: float, note: str = "") -> None:
                """Advance the bar by ``amount`` in its unit."""
                bar.update(task, advance=amount, note=escaped(note))

            yield tick_bar
        return
    started = time.monotonic()
    state = {"done": 0.0, "reported": started}

    def tick_line(amount: float, note: str = "") -> None:
        """Add ``amount`` in the unit of the total; prints a line now and then."""
        state["done"] += amount
        now = time.monotonic()
        if now - state["reported"] < LOG_EVERY_S:
            return
        state["reported"] = now
        rate = state["done"] / (now - started)
        left = f", {(total - state['done']) / rate:.0f} s left" if total and rate else ""
        of = f"/{total:,.0f}" if total else ""
        print_message(f"{label}: {state['done']:,.0f}{of} {unit} ({rate:,.1f} {unit}/s{left}) {note}".rstrip())

    yield tick_line


def version_text(prog: str) -> str:
    """Versions of the command and of what it computes with; reads metadata and imports none of them."""
    from importlib import metadata

    found = []
    for name in ("numpy", "torch"):
        try:
            found.append(f"{name}: {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name}: not installed")
    python = ".".join(map(str, sys.version_info[:3]))
    return " | ".join([f"{prog} {__version__}", f"distribution: {DISTRIBUTION}", f"python: {python}", *found])


def _show_version(ctx: typer.Context, requested: bool) -> None:
    if requested:
        emit(version_text(ctx.find_root().info_name or DISTRIBUTION))
        raise typer.Exit


def _show_completion(ctx: typer.Context, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        emit(script(ctx.find_root().info_name or "", ctx.meta.get(_SHELL) or current_shell()).rstrip())
        raise typer.Exit


def _install_completion(ctx: typer.Context, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        shell = ctx.meta.get(_SHELL) or current_shell()
        for path in install(ctx.find_root().info_name or "", shell):
            print_message(f"wrote {path}")
        print_message(f"Completion starts with the next {shell}.")
        raise typer.Exit


_SHELL = "dynmo.shell"


class _Root(HelpGroup):
    """The root of a command line; ``--install-completion`` and ``--show-completion`` may name a shell."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the name of the shell, then parse."""
        if args[:1] in (["--install-completion"], ["--show-completion"]) and args[1:] and args[1] in SHELLS:
            ctx.meta[_SHELL] = args[1]
            args = [args[0], *args[2:]]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


def command_line(*order: str, help: str) -> CommandLine:
    """A root command line with ``--version``, completion and its commands in this order.

    Args:
        order: names of the commands that help lists first.
        help: what the program does.
    """
    app = CommandLine(cls=type("Root", (_Root,), {"first": order}), help=help)

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                callback=_show_version,
                is_eager=True,
                help="Show versions of command, Python, numpy, torch.",
            ),
        ] = False,
        show: Annotated[
            bool,
            typer.Option(
                "--show-completion",
                callback=_show_completion,
                is_eager=True,
                help="Print the completion script for bash, zsh, fish, or this shell.",
            ),
        ] = False,
        install_: Annotated[
            bool,
            typer.Option(
                "--install-completion",
                callback=_install_completion,
                is_eager=True,
                help="Install completion for bash, zsh, fish, or this shell.",
            ),
        ] = False,
    ) -> None:
        pass

    return app


def _raise_on_sigterm(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that no command foresaw, as Python does; its message may quote data."""
    import traceback

    print_message("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def run_app(app: typer.Typer, prog: str) -> NoReturn:
    """Run a command line to its exit: the one place where errors become exit codes and one-line messages.

    Set ``DYNMO_TRACEBACK=1`` to see the traceback of an error that is normally one message.
    """
    signal.signal(signal.SIGTERM, _raise_on_sigterm)
    keep_running("stderr")
    if sys.stdout is None:  # closed by the caller, who wants no data
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives until the process ends
    try:
        _run_to_exit(app, prog)
    except Exception:
        sys.excepthook = _print_traceback  # typer has set one of its own
        raise


def _run_to_exit(app: typer.Typer, prog: str) -> NoReturn:
    try:
        if (shell := os.environ.get(variable_of(prog))) in SHELLS:
            run_completion(app, prog, shell, sys.argv[1:])
        else:
            app(prog_name=prog)
    except DynmoError as error:
        if os.environ.get("DYNMO_TRACEBACK") == "1":
            raise
        print_message(f"{prog}: error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_message(f"{prog}: interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives until the process ends
        sys.exit(EXIT_FAILURE)
    except OSError as error:
        # Of a disk or a folder, whoever used it. Others without a file name are those of a socket or a process.
        place = error.filename if isinstance(error.filename, str) else "a file" if error.errno in DISK_ERRORS else None
        if os.environ.get("DYNMO_TRACEBACK") == "1" or place is None:
            raise
        print_message(f"{prog}: error: {place}: {error.strerror}")
        sys.exit(EXIT_FAILURE)
    sys.exit(0)
