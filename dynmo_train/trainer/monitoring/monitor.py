"""A run as it goes on, read from its directory alone: loss, tokens per second, load of the stages, bubble, plans."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._common.document import DocumentError, UnreadableError, read_any_json, read_records
from ..._common.errors import UsageError
from ...formats.os_errors import reason

RECENT = 20
_TICKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class PlanStatus:
    """One plan of the run: its number, what came of it, after which step, and the planner's reason."""

    plan_id: int
    result: str
    step: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class View:
    """What the files say now; figures are means of the last steps, None where nothing was measured yet.

    Attributes:
        loads: share of the last measured steps that each worker computed, 0 to 1.
        bubble: 1 less the mean of the loads.
        losses: of the last steps, for a curve.
        events: the last sentences of ``events.jsonl``.
    """

    run: str
    step: int
    train_iters: int | None
    loss: float | None
    validation_loss: float | None
    learning_rate: float | None
    step_ms: float | None
    tokens_per_s: float | None
    skipped: int
    loads: list[float]
    bubble: float | None
    peak_memory_bytes: list[int]
    losses: list[float]
    plans: list[PlanStatus]
    events: list[str]

    @property
    def is_done(self) -> bool:
        """Whether the last step of the run is done."""
        return self.train_iters is not None and self.step >= self.train_iters


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return list(read_records(path))
    except UnreadableError:
        return []


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _plans(run: Path, results: Sequence[Mapping[str, Any]]) -> list[PlanStatus]:
    by_id = {each["plan_id"]: each for each in results}
    seen = []
    for path in sorted((run / "plans").glob("plan-*.json")):
        plan = read_any_json(path)
        number = plan["plan_id"]
        told = by_id.get(number)
        result = "initial" if plan["balancer"] == "initial" else str(told["result"]) if told else "waiting"
        step = int(told["step"]) if told else plan.get("read_to_step")
        seen.append(PlanStatus(plan_id=number, result=result, step=step, reason=str(plan.get("reason") or "")))
    return seen


def read_run_status(run: Path) -> View:
    """The state of the run in ``run``.

    Raises:
        UsageError: it is not the directory of a run.
    """
    try:
        about = read_any_json(run / "run.json")
    except DocumentError as error:
        raise UsageError(f"{run} is not the directory of a run: {reason(error)}") from error
    metrics = _lines(run / "metrics.jsonl")
    steps = [line for line in metrics if "step_ns" in line]
    recent = steps[-RECENT:]
    profile = _lines(run / "profile.jsonl")
    segment = max((at for at, line in enumerate(profile) if line["record"] == "header"), default=0)
    measured = [line for line in profile[segment:] if line["record"] == "step"][-RECENT:]
    loads = [
        sum(line["busy_ns"][worker] for line in measured) / max(1, sum(line["step_ns"] for line in measured))
        for worker in range(len(measured[-1]["busy_ns"]) if measured else 0)
    ]
    mean_load = _mean(loads)
    seconds = sum(line["step_ns"] for line in recent) / 1e9
    validations = [line["validation_loss"] for line in metrics if "validation_loss" in line]
    return View(
        run=str(run),
        step=steps[-1]["step"] if steps else 0,
        train_iters=about.get("config", {}).get("training", {}).get("train_iters"),
        loss=_mean([line["lm_loss"] for line in recent if line.get("lm_loss") is not None]),
        validation_loss=validations[-1] if validations else None,
        learning_rate=steps[-1]["learning_rate"] if steps else None,
        step_ms=_mean([line["step_ns"] / 1e6 for line in recent]),
        tokens_per_s=sum(line["tokens"] for line in recent) / seconds if seconds else None,
        skipped=sum(not line.get("updated", True) for line in steps),
        loads=loads,
        bubble=None if mean_load is None else 1.0 - mean_load,
        peak_memory_bytes=list(measured[-1]["peak_memory_bytes"]) if measured else [],
        losses=[line["lm_loss"] for line in steps[-60:] if line.get("lm_loss") is not None],
        plans=_plans(run, [line for line in profile[segment:] if line["record"] == "plan_result"]),
        events=[line["message"] for line in _lines(run / "events.jsonl")[-5:]],
    )


def document_of(view: View) -> dict[str, Any]:
    """The view for JSON."""
    return asdict(view)


def curve(values: Sequence[float]) -> str:
    """A line of blocks, lowest to highest: 1, 2, 3 is three rising ticks."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_TICKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_TICKS[round((value - low) * scale)] for value in values)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def format_status(view: View) -> str:
    """The view as plain text, one fact a line."""
    of = f" of {view.train_iters}" if view.train_iters is not None else ""
    lines = [
        f"{view.run}: step {view.step}{of}{', done' if view.is_done else ''}",
        f"loss {_number(view.loss, '.4f')}  validation {_number(view.validation_loss, '.4f')}"
        f"  learning rate {_number(view.learning_rate, '.3E')}  skipped {view.skipped}",
        f"{_number(view.tokens_per_s, ',.0f')} tokens/s  {_number(view.step_ms, '.1f')} ms a step"
        f"  bubble {_number(view.bubble, '.1%')}",
    ]
    if view.losses:
        lines.append(f"{curve(view.losses)}  last {len(view.losses)} losses")
    for worker, load in enumerate(view.loads):
        memory = view.peak_memory_bytes[worker] / 1e9
        lines.append(f"worker {worker:3d} {'#' * round(load * 40):<40} {load:6.1%}  {memory:.2f} GB")
    for plan in view.plans[-6:]:
        reason = f": {plan.reason}" if plan.reason else ""
        lines.append(f"plan {plan.plan_id} {plan.result} at step {plan.step}{reason}")
    lines += [f"  {event}" for event in view.events]
    return "\n".join(lines)


def watch(run: Path, every_s: float) -> None:
    """Show the run in place, anew every ``every_s`` seconds, until its last step is done or somebody interrupts."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    view = read_run_status(run)
    with Live(Text(format_status(view)), console=Console(), auto_refresh=False) as live:
        while not view.is_done:
            time.sleep(every_s)
            view = read_run_status(run)
            live.update(Text(format_status(view)), refresh=True)
