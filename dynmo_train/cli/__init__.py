"""The command line of ``dynmo-train``: its subcommands, put together."""

from __future__ import annotations

import typer

from .._common.console import add_version, command_list, run_app
from ..config.task_command import TaskCommand
from . import cluster as _cluster  # noqa: F401 - adds its commands to launch
from . import cluster_batch as _cluster_batch  # noqa: F401 - and so does this
from .cache import cache
from .evaluate import evaluate
from .explain_flags.command import explain_flags
from .finetune import finetune
from .generate import generate_text
from .launch import launch
from .pretrain import pretrain
from .tasks import EvaluateGroup, tasks
from .tools import compare, monitor, tune_sparse

ORDER_OF_WORK = (
    "explain-flags",
    "tune-sparse",
    "pretrain",
    "launch",
    "monitor",
    "compare",
    "evaluate",
    "finetune",
    "generate",
    "tasks",
    "cache",
)

app = typer.Typer(
    cls=command_list(*ORDER_OF_WORK),
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help never cuts the name of an option
    help="Train models whose layers change cost while they train, with the pipeline kept in balance.",
)
add_version(app)
app.add_typer(pretrain, name="pretrain")
app.add_typer(launch, name="launch")
app.add_typer(evaluate, name="evaluate", cls=EvaluateGroup)
app.add_typer(finetune, name="finetune")
app.command("tasks", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(tasks)
app.command("generate", cls=TaskCommand)(generate_text)
app.add_typer(cache, name="cache")
app.command("tune-sparse")(tune_sparse)
app.command("explain-flags")(explain_flags)
app.command("compare")(compare)
app.command("monitor")(monitor)


def main() -> None:
    """Entry point of the console script ``dynmo-train``."""
    run_app(app, "dynmo-train")
