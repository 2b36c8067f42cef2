"""The command line of ``dynmo-plan``: one file in ``commands`` for each command, and this list.

A command imports what it needs when it runs, so that help is instant.
"""

from __future__ import annotations

import typer

from ._common.console import add_version, command_list, run_app
from .commands.calibrate import calibrate
from .commands.compare import compare
from .commands.explain import explain
from .commands.export import export
from .commands.partition import partition
from .commands.profile import app as profile
from .commands.recipe import recipe
from .commands.repack import repack
from .commands.replay import replay
from .commands.report import report
from .commands.simulate import simulate
from .commands.verify import verify
from .commands.watch import watch
from .commands.what_if import what_if

ORDER_OF_WORK = (
    "profile",
    "partition",
    "compare",
    "verify",
    "explain",
    "simulate",
    "what-if",
    "watch",
    "report",
    "replay",
    "repack",
    "export",
    "calibrate",
    "recipe",
)

app = typer.Typer(
    cls=command_list(*ORDER_OF_WORK),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help never cuts the name of an option, and needs no rich
    help="Plan pipeline partitions: balance, simulate, ask what if, and watch a run.",
)
add_version(app)
app.add_typer(profile, name="profile")
app.command()(partition)
app.command()(compare)
app.command()(simulate)
app.command("what-if")(what_if)
app.command()(calibrate)
app.command()(export)
app.command()(recipe)
app.command()(repack)
app.command()(replay)
app.command()(report)
app.command()(explain)
app.command()(verify)
app.command()(watch)


def main() -> None:
    """The console script."""
    run_app(app, "dynmo-plan")
