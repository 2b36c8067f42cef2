"""The command line of ``dynmo-plan``: one file per command, and the list of them.

A command imports what it needs when it runs, so that help is instant (``tests/benchmarks/help_latency.md``).

The docstring of a command is its help, so it has no ``Raises``: every error of ours ends in ``run_app``, which prints
it and exits with its code.
"""

from __future__ import annotations

from .._common.console import command_line, run_app
from . import (
    calibrate,
    compare,
    experts,
    explain,
    export,
    partition,
    profile,
    recipe,
    repack,
    replay,
    report,
    simulate,
    verify,
    watch,
    what_if,
)

# The order of the help: profile, plan, check, run, then what is rarely needed.
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
    "experts",
    "export",
    "calibrate",
    "recipe",
)

app = command_line(
    *ORDER_OF_WORK,
    help="Plan pipeline partitions: balance, simulate, sweep, and follow a run.",
)
app.add_typer(profile.app, name="profile")
app.command()(partition.partition)
app.command()(compare.compare)
app.command()(simulate.simulate)
app.command("what-if")(what_if.what_if)
app.command()(calibrate.calibrate)
app.command()(export.export)
app.command()(recipe.recipe)
app.command()(repack.repack)
app.command()(replay.replay)
app.command()(report.report)
app.command()(experts.experts)
app.command()(explain.explain)
app.command()(verify.verify)
app.command()(watch.watch)


def main() -> None:
    """The console script."""
    run_app(app, "dynmo-plan")
