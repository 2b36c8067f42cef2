"""One self-contained HTML file of a run: charts over steps, plans with predicted and measured gain, simulated steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import __version__
from .._common.report import charts, facts
from .._common.report.page import Block, Chart, Note, Page, Section, Table, TraceButton
from .._common.report.run_data import RunData
from .._common.report.units import NONE, plural, share_text, size_text, time_text
from ..formats.plan import Plan
from ..inputs.problem_from_options import problem_under_plan
from ..inputs.run_history import PlanHistory, RunHistory
from ..partition.problem import PartitionProblem
from ..schedules.operations import SHARD_KINDS
from ..schedules.registry import Kind
from ..simulation.operation_times import Span
from ..simulation.simulator import Timeline, predict

MAX_PLANS = 200
"""Rows of the table of plans; the newest of a longer run, and all that were applied."""
MAX_OPERATIONS = 8000
"""Operations of a timeline on the page; a longer step ends earlier."""
QUANTA = 100_000
"""Times of a timeline are written in parts of the step."""
KINDS = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.SHARD_FORWARD,
    Kind.SHARD_WEIGHT,
)
NAMES = ("forward", "backward", "input gradient", "weight gradient", "output shards", "their gradient")


def _plan_row(each: PlanHistory, data: RunData) -> list[str]:
    plan, result = each.plan, each.result
    predicted = plan.predicted
    return [
        str(plan.plan_id),
        f"{plan.read_to_step:,}" if result is None else f"{result.step:,}",
        "not answered yet" if result is None else result.result.replace("_", " "),
        f"{data.count(move.item for move in plan.migration.moves):,}",
        size_text(plan.migration.bytes) if plan.migration.moves else NONE,
        time_text(plan.migration.pause_ns),
        NONE if result is None else time_text(result.pause_ns),
        NONE if predicted is None else time_text(predicted.step_ns),
        time_text(each.after_ns),
        share_text(predicted.gain_fraction if predicted is not None else None, signed=True),
        share_text(each.realized, signed=True),
        plan.reason,
    ]


_PLAN_COLUMNS = (
    "plan",
    "step",
    "result",
    "moved: {}s",
    "moved: size",
    "pause: predicted",
    "pause: measured",
    "step time: predicted",
    "step time: measured",
    "gain: predicted",
    "gain: measured",
)


def _plans(history: RunHistory, window: int) -> Section:
    found = history.plan_histories
    if not found:
        text = "The planner made no plan: the run kept its first partition."
        if not history.plans:
            text = "There is no plan of this run, so predictions cannot be compared with measurements."
        return Section(title="Plans", blocks=[Note(text=text)])
    applied = {each.plan.plan_id for each in history.moves}
    newest = {each.plan.plan_id for each in found[-MAX_PLANS:]}
    shown = [each for each in found if each.plan.plan_id in applied | newest][-2 * MAX_PLANS :]
    left_out = f" The table has {len(shown):,} of {plural(len(found), 'plan')}." if len(shown) < len(found) else ""
    text = (
        "Predicted: by the planner, from costs before the move."
        f" Measured: mean of up to {plural(window, 'step')} on each side of the move.{left_out}"
    )
    caption = f"{plural(len(found), 'plan')}, of these {len(applied):,} applied"
    rows = [_plan_row(each, history.data) for each in shown]
    columns = [column.format(history.data.noun) for column in _PLAN_COLUMNS]
    table = Table(columns=columns, rows=rows, text_columns=(2,), caption=caption)
    return Section(title="Plans", text=text, blocks=[table])


def timeline_spec(timeline: Timeline, workers: Sequence[int], end_ns: int) -> tuple[dict[str, Any], bool]:
    """The data of a timeline, and whether operations at the end were left out.

    Args:
        timeline: the simulated step.
        workers: id of each row.
        end_ns: end of the time axis, the same for all timelines of a page.
    """
    spans = sorted((span.start_ns, span.end_ns) for row in timeline.spans for span in row)
    is_cut = len(spans) > MAX_OPERATIONS
    last_ns = spans[MAX_OPERATIONS][0] if is_cut else timeline.step_ns
    quantum = max(1.0, end_ns / QUANTA)
    rows = [_flat([span for span in row if span.start_ns < last_ns], quantum) for row in timeline.spans]
    kinds = sorted({KINDS.index(span.kind) for row in timeline.spans for span in row if span.end_ns > span.start_ns})
    spec = {
        "kind": "timeline",
        "group": "time",
        "range": (0, end_ns),
        "end": timeline.step_ns,
        "quantum": quantum,
        "rows": [f"worker {worker}" for worker in workers],
        "kinds": kinds,
        "spans": rows,
        "marks": [[timeline.step_ns, "event", f"end: {time_text(timeline.step_ns)}", "end of the step"]],
    }
    return spec, is_cut


def _flat(spans: Sequence[Span], quantum: float) -> list[int]:
    """Gap from the previous operation, duration, kind, microbatch and stage of each; times in quanta."""
    flat: list[int] = []
    clock = 0
    for span in spans:
        start, end = round(span.start_ns / quantum), round(span.end_ns / quantum)
        flat += [start - clock, end - start, KINDS.index(span.kind), span.microbatch, span.stage]
        clock = end
    return flat


def _timeline_table(timeline: Timeline, workers: Sequence[int]) -> Table:
    rows = []
    occurring = {span.kind for spans in timeline.spans for span in spans}
    shown = [kind for kind in KINDS if kind not in SHARD_KINDS or kind in occurring]
    for worker, spans, busy in zip(workers, timeline.spans, timeline.busy_ns, strict=True):
        times = [sum(span.end_ns - span.start_ns for span in spans if span.kind is kind) for kind in shown]
        idle = timeline.step_ns - busy
        rows.append([f"worker {worker}", *(time_text(ns) if ns else NONE for ns in times), time_text(idle)])
    caption = f"Time of each worker in a step of {time_text(timeline.step_ns)}"
    return Table(columns=["", *(NAMES[KINDS.index(kind)] for kind in shown), "idle"], rows=rows, caption=caption)


def simulated_steps(history: RunHistory, problem: PartitionProblem) -> list[tuple[str, str, Plan, Timeline]]:
    """Name, title, plan and simulation of the first and of the active partition, both with the newest costs."""
    header, data = history.header, history.data
    active = [history.plans[number] for _, number in data.active if number in history.plans]
    if header is None or not active:
        return []
    titles = [("timeline-after", f"With plan {active[-1].plan_id}", active[-1])]
    if active[0].plan_id != active[-1].plan_id:
        first = "With the first partition" if active[0].balancer == "initial" else f"With plan {active[0].plan_id}"
        titles.insert(0, ("timeline-before", first, active[0]))
    else:
        titles = [("timeline-after", "With the active partition", active[-1])]
    steps = []
    for name, title, plan in titles:
        own = problem_under_plan(problem, header, plan)
        if own is not None and len(plan.stages) == own.num_stages:
            steps.append((name, title, plan, predict(own, plan.boundaries)))
    return steps


def trace(history: RunHistory, problem: PartitionProblem | None) -> dict[str, Any]:
    """The simulated steps before and after the moves in the Trace Event Format, one process each; times in us."""
    from .timeline import as_trace

    events: list[dict[str, Any]] = []
    for process, (_, title, plan, timeline) in enumerate(simulated_steps(history, problem) if problem else []):
        events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": title}})
        events += [{**event, "pid": process} for event in as_trace(timeline, plan.workers)["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _timelines(history: RunHistory, problem: PartitionProblem | None) -> Section:
    title = "Timeline of a step"
    if problem is None:
        return Section(title=title, blocks=[Note(text=f"No step can be simulated: {history.without_costs}.")])
    steps = simulated_steps(history, problem)
    if not steps:
        text = "No step can be simulated: there is no plan of this run that fits the newest profile."
        return Section(title=title, blocks=[Note(text=text)])
    end_ns = max(timeline.step_ns for *_, timeline in steps)
    blocks: list[Block] = []
    for name, heading, plan, timeline in steps:
        spec, is_cut = timeline_spec(timeline, plan.workers, max(1, end_ns))
        text = f"{time_text(timeline.step_ns)} per step, bubble {share_text(timeline.bubble_fraction)}."
        if is_cut:
            text += f" The first {MAX_OPERATIONS:,} operations are shown."
        table = _timeline_table(timeline, plan.workers)
        blocks.append(Chart(name=name, title=heading, text=text, spec=spec, table=table))
    blocks.append(TraceButton(charts=[name for name, *_ in steps], file_name=f"{history.data.name}-step.json"))
    text = (
        "Simulated with the newest costs of layers, so that only the partition differs. Numbers are microbatches; the"
        " one under the cursor is highlighted on all workers."
    )
    if len(steps) == 1:
        text = "Simulated with the newest costs of layers; no other partition was active. Numbers are microbatches."
    return Section(title=title, text=text, blocks=blocks)


def html(history: RunHistory, problem: PartitionProblem | None, window: int = 8) -> str:
    """The HTML page.

    Args:
        history: the run.
        problem: has the newest costs, for the timelines.
        window: steps before and after a move that were compared.
    """
    return page(history, problem, window).html()


def page(history: RunHistory, problem: PartitionProblem | None, window: int = 8) -> Page:
    """The page of a run; plans are compared over ``window`` steps before and after them."""
    data, runs = history.data, [history.data]
    marks = charts.marks_of(runs, [""])
    sections = [
        Section(title="Training", blocks=[charts.loss_and_step_time(data, marks)]),
        Section(
            title="Layers and stages",
            text="Color is cost. The lines show which stage executes a layer.",
            blocks=[charts.layer_costs(data, runs, marks, name="layers", title="Cost of each layer", top=None)],
        ),
        Section(
            title="Balance",
            blocks=[
                charts.stage_loads(data, runs, marks, name="loads", title="Load of each stage"),
                charts.bubble(runs, [""], marks, name="bubble"),
            ],
        ),
        Section(
            title="Workers and memory",
            blocks=[
                charts.peak_memory(data, runs, marks, name="memory", title="Peak memory of each worker"),
                charts.workers_in_use(runs, [""], marks, name="workers"),
            ],
        ),
        _plans(history, window),
        _timelines(history, problem),
    ]
    if data.notes:
        sections.append(Section(title="Missing data", blocks=[Note(text=" ".join(data.notes))]))
    return Page(
        title=data.name,
        subtitle=facts.model_text(data),
        kind="Run report",
        facts=facts.facts(data),
        tiles=facts.tiles(data),
        sections=sections,
        footer=f"Written by dynmo-plan {__version__} from {data.name}.",
    )
