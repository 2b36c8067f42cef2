"""The status of a run from its directory: loss, tokens per second, load of each worker, bubble, plans."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._common.document import DocumentError, UnreadableError, read_any_json, read_records
from ..._common.errors import UsageError
from ...formats.os_errors import reason

# Number of last steps that the means are over.
RECENT_STEPS = 20
_TICKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class PlanStatus:
    """A plan of the run: its number, its result, the step of the result, and the planner's reason."""

    plan_id: int
    result: str
    step: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run. Measurements are means of the last 20 steps, None before the first one.

    Attributes:
        run: run directory.
        step: number of completed steps.
        train_iters: number of steps of the run.
        loss: mean training loss.
        validation_loss: last validation loss.
        learning_rate: learning rate of the last step.
        step_ms: mean step time, in milliseconds.
        tokens_per_s: mean throughput.
        skipped: number of steps without an update.
        loads: fraction of the measured step time that each worker computed, 0 to 1.
        bubble: 1 minus the mean load.
        peak_memory_bytes: peak memory of each worker.
        losses: losses of the last 60 steps.
        plans: plans of the run, in order.
        events: last messages of ``events.jsonl``.
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics, profile or event file; none while the file does not exist or cannot be read."""
    try:
        return list(read_records(path))
    except UnreadableError:
        return []


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _plans(run: Path, results: Sequence[Mapping[str, Any]]) -> list[PlanStatus]:
    by_id = {each["plan_id"]: each for each in results}
    statuses = []
    for path in sorted((run / "plans").glob("plan-*.json")):
        plan = read_any_json(path)
        number = plan["plan_id"]
        # The initial plan has no result: the trainer wrote it itself. One without any other has not been read yet.
        record = by_id.get(number)
        result = "initial" if plan["balancer"] == "initial" else str(record["result"]) if record else "waiting"
        step = int(record["step"]) if record else plan.get("read_to_step")
        statuses.append(PlanStatus(plan_id=number, result=result, step=step, reason=str(plan.get("reason") or "")))
    return statuses


def read_run_status(run: Path) -> RunStatus:
    """Read the status of a run.

    Args:
        run: run directory.

    Raises:
        UsageError: ``run`` is not a run directory.
    """
    try:
        document = read_any_json(run / "run.json")
    except DocumentError as error:
        raise UsageError(f"{run} is not a run directory: {reason(error)}") from error
    metrics = read_lines(run / "metrics.jsonl")
    steps = [line for line in metrics if "step_ns" in line]
    recent = steps[-RECENT_STEPS:]
    profile = read_lines(run / "profile.jsonl")
    # From the last header on: an earlier start may have had other workers, and its loads are over.
    segment = max((at for at, line in enumerate(profile) if line["record"] == "header"), default=0)
    measured = [line for line in profile[segment:] if line["record"] == "step"][-RECENT_STEPS:]
    loads = [
        sum(line["busy_ns"][worker] for line in measured) / max(1, sum(line["step_ns"] for line in measured))
        for worker in range(len(measured[-1]["busy_ns"]) if measured else 0)
    ]
    mean_load = _mean(loads)
    seconds = sum(line["step_ns"] for line in recent) / 1e9
    validations = [line["validation_loss"] for line in metrics if "validation_loss" in line]
    return RunStatus(
        run=str(run),
        step=steps[-1]["step"] if steps else 0,
        train_iters=document.get("config", {}).get("training", {}).get("train_iters"),
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
        events=[line["message"] for line in read_lines(run / "events.jsonl")[-5:]],
    )


def status_document(status: RunStatus) -> dict[str, Any]:
    """The status as a JSON document."""
    return asdict(status)


def sparkline(values: Sequence[float]) -> str:
    """A sparkline of block characters, scaled from the lowest to the highest value."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_TICKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_TICKS[round((value - low) * scale)] for value in values)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def format_status(status: RunStatus) -> str:
    """The status as plain text."""
    of = f" of {status.train_iters}" if status.train_iters is not None else ""
    lines = [
        f"{status.run}: step {status.step}{of}{', done' if status.is_done else ''}",
        f"loss {_number(status.loss, '.4f')}  validation {_number(status.validation_loss, '.4f')}"
        f"  learning rate {_number(status.learning_rate, '.3E')}  skipped {status.skipped}",
        f"{_number(status.tokens_per_s, ',.0f')} tokens/s  {_number(status.step_ms, '.1f')} ms/step"
        f"  bubble {_number(status.bubble, '.1%')}",
    ]
    if status.losses:
        lines.append(f"{sparkline(status.losses)}  last {len(status.losses)} losses")
    for worker, load in enumerate(status.loads):
        memory = status.peak_memory_bytes[worker] / 1e9
        lines.append(f"worker {worker:3d} {'#' * round(load * 40):<40} {load:6.1%}  {memory:.2f} GB")
    for plan in status.plans[-6:]:
        reason = f": {plan.reason}" if plan.reason else ""
        lines.append(f"plan {plan.plan_id} {plan.result} at step {plan.step}{reason}")
    lines += [f"  {event}" for event in status.events]
    return "\n".join(lines)


def watch(run: Path, interval_s: float) -> None:
    """Show the status on the terminal, updated every ``interval_s`` seconds, until the last step or Ctrl-C.

    Raises:
        UsageError: ``run`` is not a run directory.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    status = read_run_status(run)
    with Live(Text(format_status(status)), console=Console(), auto_refresh=False) as live:
        while not status.is_done:
            time.sleep(interval_s)
            status = read_run_status(run)
            live.update(Text(format_status(status)), refresh=True)
