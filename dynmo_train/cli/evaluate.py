"""``dynmo-train evaluate``: how good a trained model is."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import typer

from .._common.console import Format, emit, emit_json, emit_table
from ..config.command import with_specs
from ..config.evaluation import ClassifyConfig, HarnessConfig, InferenceConfig, LambadaConfig, WikitextConfig
from ..config.fields import specs_of, values_of
from ..config.task_command import TaskCommand, model_flags
from .common import is_rank0, need_torch, world_size

evaluate = typer.Typer(no_args_is_help=True, help="Measure how good a trained model is.")

Report = Annotated[Format, typer.Option("--format", help="How to report.")]


class _Figure(Protocol):
    """What an evaluation found."""

    def document(self) -> dict[str, Any]: ...


def _tell(found: _Figure, line: str, report: Format) -> None:
    """Report once, whatever the number of processes."""
    if not is_rank0():
        return
    if report is Format.JSON:
        emit_json(found.document())
    else:
        emit(line)


def _place(flags: dict[str, Any]) -> InferenceConfig:
    """Where the model is and how it is to run, as the command line says."""
    need_torch()
    return values_of(InferenceConfig, flags)


@evaluate.command("wikitext", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, WikitextConfig))
def wikitext(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """Word-level perplexity of WikiText-103, or of another text with words between spaces."""
    place, task = _place(flags), values_of(WikitextConfig, flags)
    from ..evaluation.model_checkpoint import evaluation_world
    from ..evaluation.wikitext import evaluate_wikitext

    with evaluation_world(place, task, world_size()) as world:
        found = evaluate_wikitext(place, task, world, model_flags(ctx))
    _tell(found, found.line(), report)


@evaluate.command("lambada", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, LambadaConfig))
def lambada(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """The share of LAMBADA's passages whose last word the model says."""
    place, task = _place(flags), values_of(LambadaConfig, flags)
    from ..evaluation.lambada import evaluate_lambada
    from ..evaluation.model_checkpoint import evaluation_world

    with evaluation_world(place, task, world_size()) as world:
        found = evaluate_lambada(place, task, world, model_flags(ctx))
    _tell(found, found.line("LAMBADA"), report)


def _classify(name: str, ctx: typer.Context, report: Format, flags: dict[str, Any]) -> None:
    place, task = _place(flags), values_of(ClassifyConfig, flags)
    from ..evaluation.classification import evaluate_task
    from ..evaluation.model_checkpoint import evaluation_world

    with evaluation_world(place, task, world_size()) as world:
        found = evaluate_task(name, place, task, world, model_flags(ctx))
    _tell(found, "\n".join(found.lines(0)), report)


@evaluate.command("mnli", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, ClassifyConfig))
def mnli(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """The accuracy on pairs of texts of a model that `finetune mnli` made."""
    _classify("mnli", ctx, report, flags)


@evaluate.command("race", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, ClassifyConfig))
def race(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """The accuracy on questions with four answers of a model that `finetune race` made."""
    _classify("race", ctx, report, flags)


@evaluate.command("lm-eval")
@with_specs(specs_of(HarnessConfig))
def lm_eval(report: Report = Format.TEXT, **flags: Any) -> None:
    """Tasks of lm-evaluation-harness on local data, on an export of the model, without a network."""
    task = values_of(HarnessConfig, flags)
    from ..evaluation.lm_eval import run_harness

    if not is_rank0():
        return
    found = run_harness(task)
    if report is Format.JSON:
        emit_json(found.document())
    else:
        emit_table(f"lm-evaluation-harness, {task.load}", ("task", "items", "metric", "value"), found.rows())
