"""The command line of ``dynmo-train``: one module per command, listed in the order of a workflow.

Modules import torch only inside their commands, so that ``--help`` is instant. Names that end in ``_app`` keep the
modules importable under their own names: ``from dynmo_train.cli import launch``.
"""

from __future__ import annotations

from .._common.console import command_line, run_app
from ..config.task_command import TaskCommand
from . import cluster as _cluster  # noqa: F401 - registers commands of launch
from . import cluster_batch as _cluster_batch  # noqa: F401 - registers commands of launch
from .cache import cache as cache_app
from .doctor.command import doctor
from .evaluate import evaluate as evaluate_app
from .explain_flags.command import explain_flags
from .export_adapter import export_adapter
from .finetune import finetune as finetune_app
from .generate import generate_text
from .launch import launch as launch_app
from .measure import measure_costs, tune_sparse
from .pretrain import pretrain as pretrain_app
from .replay import compare_digests, replay_step
from .run_script.command import SCRIPT_LAST, run_script
from .tasks import EvaluateGroup
from .tasks import tasks as tasks_command
from .tools import compare, monitor

COMMAND_ORDER = (
    "doctor",
    "explain-flags",
    "run",
    "measure-costs",
    "tune-sparse",
    "pretrain",
    "launch",
    "monitor",
    "compare",
    "replay-step",
    "compare-digests",
    "evaluate",
    "finetune",
    "generate",
    "export-adapter",
    "tasks",
    "cache",
)

app = command_line(
    *COMMAND_ORDER,
    help="Train models with dynamic layer costs on a balanced pipeline.",
)
app.add_typer(pretrain_app, name="pretrain")
app.add_typer(launch_app, name="launch")
app.add_typer(evaluate_app, name="evaluate", cls=EvaluateGroup)
app.add_typer(finetune_app, name="finetune")
app.command("tasks", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(tasks_command)
app.command("generate", cls=TaskCommand)(generate_text)
app.command("export-adapter")(export_adapter)
app.add_typer(cache_app, name="cache")
app.command("measure-costs")(measure_costs)
app.command("tune-sparse")(tune_sparse)
app.command("doctor")(doctor)
app.command("explain-flags")(explain_flags)
app.command("run", context_settings=SCRIPT_LAST)(run_script)
app.command("compare")(compare)
app.command("replay-step")(replay_step)
app.command("compare-digests")(compare_digests)
app.command("monitor")(monitor)


def main() -> None:
    """Entry point of the console script ``dynmo-train``."""
    run_app(app, "dynmo-train")
