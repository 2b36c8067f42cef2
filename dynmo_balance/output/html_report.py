"""One self-contained HTML file of a run: steps, loads, plans, migrations, timelines, predicted and measured gains."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..formats.plan import Plan
from ..formats.profile_records import COST_NEUTRAL_EVENTS
from ..inputs.run_history import PlanHistory, RunHistory
from ..partition.problem import PartitionProblem
from ..simulation.simulator import predict
from .svg import line_chart
from .timeline import as_svg

STYLE = (
    "body{font-family:sans-serif;max-width:1040px;margin:2em auto;color:#222}table{border-collapse:collapse}"
    "td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child,"
    "td.text{text-align:left}svg{width:100%;height:auto}"
)


def _ms(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], text_column: int | None = None) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = []
    for row in rows:
        cells = (f"<td{' class=text' if at == text_column else ''}>{escape(cell)}</td>" for at, cell in enumerate(row))
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _plan_row(plan_history: PlanHistory) -> list[str]:
    plan, result = plan_history.plan, plan_history.result
    return [
        str(plan.plan_id),
        plan.action,
        "pending" if result is None else result.result,
        str(plan.read_to_step),
        str(len(plan.migration.moves)),
        f"{plan.migration.bytes / 1e6:.1f}",
        "-" if result is None else _ms(result.pause_ns),
        _share(plan.predicted.gain_fraction if plan.predicted is not None else None),
        _share(plan_history.realized),
        plan.reason,
    ]


_PLAN_COLUMNS = ("plan", "action", "result", "read to", "items", "MB", "pause ms", "predicted", "measured", "reason")


def _summary(history: RunHistory) -> str:
    steps = history.steps
    quarter = max(1, len(steps) // 10)
    first = sum(step.step_ns for step in steps[:quarter]) // quarter
    last = sum(step.step_ns for step in steps[-quarter:]) // quarter
    pauses = sum(plan_history.result.pause_ns for plan_history in history.moves if plan_history.result is not None)
    rows = [
        ["run", history.header.run_id],
        ["model", f"{history.header.model.family}, {history.header.model.num_layers} layers"],
        ["steps", f"{steps[0].step} to {steps[-1].step}"],
        ["plans, of these applied", f"{len(history.plan_histories)}, {len(history.moves)}"],
        ["mean step, first and last tenth", f"{_ms(first)} ms, {_ms(last)} ms"],
        ["total pause of moves", f"{_ms(pauses)} ms"],
    ]
    return _table(["", ""], rows)


def _charts(history: RunHistory) -> list[str]:
    xs = [step.step for step in history.steps]
    marks = [
        (plan_history.result.step, f"plan {plan_history.plan.plan_id}: {plan_history.plan.reason}")
        for plan_history in history.moves
        if plan_history.result is not None
    ]
    marks += [(event.step, event.kind) for event in history.events if event.kind not in COST_NEUTRAL_EVENTS]
    parts = [
        "<h2>Steps</h2>",
        line_chart("step time", xs, [("measured", [step.step_ns / 1e6 for step in history.steps])], "ms", marks),
    ]
    if history.loads and len({len(row) for row in history.loads}) == 1:
        count = len(history.loads[0])
        series = [(f"stage {s}", [row[s] / 1e6 for row in history.loads]) for s in range(count)]
        parts += ["<h2>Stage loads per microbatch</h2>", line_chart("stage loads", xs, series, "ms", marks)]
    return parts


def _timelines(problem: PartitionProblem, first: Plan, last: Plan) -> list[str]:
    workers = [slot.worker for slot in problem.slots]
    parts = ["<h2>Step before and after, simulated with the newest costs</h2>"]
    for name, plan in (("the initial partition", first), (f"plan {last.plan_id}", last)):
        if len(plan.stages) == problem.num_stages:
            parts.append(as_svg(predict(problem, plan.boundaries), workers, name))
    return parts


def html(history: RunHistory, problem: PartitionProblem | None) -> str:
    """The HTML page; ``problem`` has the newest costs, for the timelines."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(history.header.run_id)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(history.header.run_id)}</h1>",
        _summary(history),
        *_charts(history),
        "<h2>Plans</h2>",
        _table(_PLAN_COLUMNS, [_plan_row(plan_history) for plan_history in history.plan_histories], text_column=9),
    ]
    initial = [plan for plan in history.plans.values() if plan.balancer == "initial"]
    newest = history.plans.get(history.steps[-1].plan_id)
    if problem is not None and initial and newest is not None:
        parts += _timelines(problem, initial[-1], newest)
    return "\n".join([*parts, "</body></html>\n"])
