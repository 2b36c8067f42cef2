"""``dynmo-train evaluate``: perplexity and accuracy of a trained model."""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeVar

import typer

from .._common.console import Format, emit, emit_json, emit_table, print_message
from .._common.help import CommandLine
from ..config.command import with_specs
from ..config.fields import specs_of, values_of
from ..config.panels import TASK
from ..config.rules.task_effect import task_warnings
from ..config.sections.evaluation import (
    ClassifyConfig,
    ExitsConfig,
    HarnessConfig,
    InferenceConfig,
    LambadaConfig,
    WikitextConfig,
)
from ..config.task_command import TaskCommand, model_flags
from .common import is_rank0, need_torch, world_size

evaluate = CommandLine(help="Evaluate a trained model.")

Task = TypeVar("Task")
Report = Annotated[Format, typer.Option("--format", help="Output format.", rich_help_panel=TASK)]


class _Result(Protocol):
    """Result of an evaluation."""

    def document(self) -> dict[str, Any]: ...


def _report(found: _Result, line: str, report: Format) -> None:
    """Print the result on rank 0."""
    if not is_rank0():
        return
    if report is Format.JSON:
        emit_json(found.document())
    else:
        emit(line)


def _configs(task: type[Task], flags: dict[str, Any]) -> tuple[InferenceConfig, Task]:
    """The options of the model and of the task; rank 0 warns of options without effect."""
    need_torch()
    configs = values_of(InferenceConfig, flags), values_of(task, flags)
    for line in task_warnings(*configs) if is_rank0() else ():
        print_message(f"warning: {line}")
    return configs


@evaluate.command("wikitext", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, WikitextConfig))
def wikitext(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """Word-level perplexity on WikiText-103, or another text with words between spaces."""
    config, task = _configs(WikitextConfig, flags)
    from ..evaluation.model_checkpoint import evaluation_world
    from ..evaluation.wikitext import evaluate_wikitext

    with evaluation_world(config, task, world_size()) as world:
        found = evaluate_wikitext(config, task, world, model_flags(ctx))
    _report(found, found.line(), report)


@evaluate.command("lambada", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, LambadaConfig))
def lambada(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """Accuracy of the last word of LAMBADA passages."""
    config, task = _configs(LambadaConfig, flags)
    from ..evaluation.lambada import evaluate_lambada
    from ..evaluation.model_checkpoint import evaluation_world

    with evaluation_world(config, task, world_size()) as world:
        found = evaluate_lambada(config, task, world, model_flags(ctx))
    _report(found, found.line("LAMBADA"), report)


@evaluate.command("exits", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, ExitsConfig))
def exits(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """Quality, exit shares, layers per token and decoding speed at several thresholds of early exit."""
    config, task = _configs(ExitsConfig, flags)
    from ..evaluation.exits import evaluate_exits
    from ..evaluation.model_checkpoint import evaluation_world

    with evaluation_world(config, task, world_size()) as world:
        found = evaluate_exits(config, task, world, model_flags(ctx))
    if report is Format.JSON:
        emit_json(found.document())
    else:
        title = f"exits of {config.load}: {found.measure}, keys and values: {found.key_values}, {found.tokens:,} tokens"
        emit_table(title, found.columns(), found.rows())


def _classify(name: str, ctx: typer.Context, report: Format, flags: dict[str, Any]) -> None:
    config, task = _configs(ClassifyConfig, flags)
    from ..evaluation.classification import evaluate_task
    from ..evaluation.model_checkpoint import evaluation_world

    with evaluation_world(config, task, world_size()) as world:
        found = evaluate_task(name, config, task, world, model_flags(ctx))
    _report(found, "\n".join(found.lines(0)), report)


@evaluate.command("mnli", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, ClassifyConfig))
def mnli(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """Accuracy of a model from `finetune mnli` on sentence pairs."""
    _classify("mnli", ctx, report, flags)


@evaluate.command("race", cls=TaskCommand)
@with_specs(specs_of(InferenceConfig, ClassifyConfig))
def race(ctx: typer.Context, report: Report = Format.TEXT, **flags: Any) -> None:
    """Accuracy of a model from `finetune race` on multiple-choice questions."""
    _classify("race", ctx, report, flags)


@evaluate.command("lm-eval")
@with_specs(specs_of(HarnessConfig))
def lm_eval(report: Report = Format.TEXT, **flags: Any) -> None:
    """Tasks of lm-evaluation-harness on local data, without network access."""
    task = values_of(HarnessConfig, flags)
    from ..evaluation.lm_eval import run_harness

    if not is_rank0():
        return
    found = run_harness(task)
    if report is Format.JSON:
        emit_json(found.document())
    else:
        emit_table(f"lm-evaluation-harness, {task.load}", ("task", "items", "metric", "value"), found.rows())
