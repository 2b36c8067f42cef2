"""The status of a run, from the files of its directory, which the run may be writing at the same time.

Data flow of one poll::

    run.json --------------> configuration, devices; another run_id discards everything below
    metrics.jsonl --tail---> losses, step times, active plan
    profile.jsonl --tail---> workers, busy times, memory, results of plans
    events.jsonl ---tail---> last messages, last checkpoint
    plans/plan-*.json -----> partition, the plan that waits          } -> RunStatus

``RunFollower`` keeps sums and the last few records only, so that its memory does not grow with the run. It never fails
on the contents of a line: the files of a run that was killed, or of another version, still show what they have.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._common.document import DocumentError, read_any_json
from ..._common.errors import EXIT_RELAUNCH, UsageError
from ...formats.os_errors import reason
from ...formats.plan import plan_path
from ...launch.run_lock import is_locked
from .jsonl_tail import JsonlTail
from .run_records import EventsSummary, MetricsSummary, ProfileSummary, mean

PROFILE_MARKERS = (b'"header"', b'"plan_result"', b'"event"')
_MAX_PLANS = 1_000
_PLAN_NAME = re.compile(r"plan-(\d{6,})\.json")
# What a line of another version or a damaged one can raise where it is read.
_BAD_RECORD = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)

# Of --exit-interval and time limits; of a model that is not finite; of SIGINT and SIGTERM.
FINAL_EXIT_CODES = (0, 3, 130, 143)
# Peak of dense products without sparsity, in FLOP/s; NVIDIA's data sheets of the SXM modules (PCIe modules have less).
# float32 is that of products without TF32, which is the default of torch.
PEAK_FLOPS_PER_S: Mapping[str, Mapping[str, float]] = {
    "A100": {"half": 312e12, "float32": 19.5e12},
    "H100": {"half": 989e12, "float32": 67e12},
    "H200": {"half": 989e12, "float32": 67e12},
}


@dataclass(frozen=True, kw_only=True)
class PlanStatus:
    """A plan of the run: its number, its result, the step of the result, and the planner's reason."""

    plan_id: int
    result: str
    step: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class NextMigration:
    """A plan that waits for its step boundary.

    Attributes:
        plan_id: number of the plan.
        step: number of completed steps at which it is applied.
        moves: number of items that move.
        bytes: bytes that move.
        gain_fraction: predicted gain of the step time; None where unknown.
        pause_ns: predicted pause in nanoseconds; None where unknown.
        released: ids of the workers that it releases.
    """

    plan_id: int
    step: int
    moves: int
    bytes: int
    gain_fraction: float | None
    pause_ns: int | None
    released: list[int]


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A pipeline rank.

    Attributes:
        worker: its id.
        stages: stages on it, by the active plan.
        layers: first and last item of each of its stages.
        num_layers: number of items on it; None where the plan is unknown.
        load: fraction of the measured step time that it computed, 0 to 1; None before the first measurement.
        peak_memory_bytes: peak memory; None where unknown.
        memory_bytes: memory of the device; None where unknown.
        relative_speed: measured speed; 1 is normal.
    """

    worker: int
    stages: list[int]
    layers: str
    num_layers: int | None
    load: float | None
    peak_memory_bytes: int | None
    memory_bytes: int | None
    relative_speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run. Measurements are means of the last 20 steps, None before the first one.

    Attributes:
        run: run directory.
        model: model family.
        segment: number of the start, from 0; None while the profile has no header.
        step: number of completed steps.
        train_iters: number of steps of the run.
        loss: mean training loss.
        validation_loss: last validation loss.
        learning_rate: learning rate of the last step.
        step_ms: mean step time, in milliseconds.
        tokens_per_s: mean throughput.
        mfu: model FLOPs utilization, 0 to 1; None where the peak of the devices is unknown.
        time_left_s: time of the remaining steps, in seconds.
        idle_s: seconds since the last line of the metrics.
        skipped: number of steps without an update.
        skipped_is_minimum: whether earlier steps of a long run were not counted.
        loads: fraction of the measured step time that each worker computed, 0 to 1.
        bubble: 1 minus the mean load; None of one pipeline rank, which waits for no other.
        peak_memory_bytes: peak memory of each worker.
        workers: active workers.
        released: ids of the workers that were released since the last start.
        joined: ids of the workers that the last start added.
        requested_workers: number of workers of a request that waits for the next boundary.
        losses: losses of the last 60 steps.
        loss_curve: losses of the whole run, as means of equal numbers of steps.
        tokens_per_s_curve: throughput of the whole run, as means of equal numbers of steps.
        active_plan_id: number of the active plan.
        next_boundary: next number of completed steps at which a plan can be applied; None without online balancing.
        next_migration: the plan that will be applied there.
        next_event: kind and step of the next announced change of costs.
        plans: plans of the run, in order.
        last_checkpoint: message of the last save.
        events: last messages of ``events.jsonl``.
        incidents: last 20 incidents, as in ``events.jsonl``.
        num_incidents: number of incidents of the run.
        seconds_lost: time that they cost, in seconds.
        steps_lost: number of steps that they cost.
        invalid_lines: number of lines that could not be read.
        exit_code: exit code of the last start, where it ended before the last step; None while it runs.
        has_processes: whether a process executes the run; None where this machine does not know.
    """

    run: str
    model: str | None
    segment: int | None
    step: int
    train_iters: int | None
    loss: float | None
    validation_loss: float | None
    learning_rate: float | None
    step_ms: float | None
    tokens_per_s: float | None
    mfu: float | None
    time_left_s: float | None
    idle_s: float | None
    skipped: int
    skipped_is_minimum: bool
    loads: list[float]
    bubble: float | None
    peak_memory_bytes: list[int]
    workers: list[WorkerStatus]
    released: list[int]
    joined: list[int]
    requested_workers: int | None
    losses: list[float]
    loss_curve: list[float]
    tokens_per_s_curve: list[float]
    active_plan_id: int | None
    next_boundary: int | None
    next_migration: NextMigration | None
    next_event: tuple[str, int] | None
    plans: list[PlanStatus]
    last_checkpoint: str | None
    events: list[str]
    incidents: list[dict[str, Any]]
    num_incidents: int
    seconds_lost: float
    steps_lost: int
    invalid_lines: int
    exit_code: int | None
    has_processes: bool | None

    @property
    def is_done(self) -> bool:
        """Whether the last step of the run is done."""
        return self.train_iters is not None and self.step >= self.train_iters

    @property
    def is_over(self) -> bool:
        """Whether no launcher continues the run: it is done, was stopped or killed, or its model is not finite."""
        # After exit code 75 a scheduler starts the run again.
        was_killed = self.has_processes is False and self.exit_code != EXIT_RELAUNCH
        return self.is_done or self.exit_code in FINAL_EXIT_CODES or was_killed


class RunFollower:
    """Follows a run directory.

    Args:
        run: run directory; it need not exist yet.
        peak_flops_per_s: peak FLOP/s of a device; None: known for some devices.
        now: seconds since the epoch.
    """

    def __init__(
        self, run: Path, *, peak_flops_per_s: float | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self.run, self._peak, self._now = run, peak_flops_per_s, now
        self._document: dict[str, Any] = {}
        self._document_state: tuple[int, int, int] | None = None
        self._metrics, self._profile, self._events = MetricsSummary(), ProfileSummary(), EventsSummary()
        self._plans: dict[int, dict[str, Any]] = {}
        self._metrics_tail = JsonlTail(run / "metrics.jsonl", markers=(b"false", b'"validation_loss"'))
        self._profile_tail = JsonlTail(run / "profile.jsonl", markers=PROFILE_MARKERS)
        # All incidents are counted: a run writes few events per checkpoint.
        self._events_tail = JsonlTail(run / "events.jsonl", markers=(b'"incident"',), marked_bytes=None)

    def poll(self) -> RunStatus:
        """Read what was written since the last poll.

        Raises:
            UsageError: ``run`` is not a run directory, or not yet.
        """
        self._read_document()
        if self._metrics_tail.has_restarted():
            self._metrics = MetricsSummary()
        if self._profile_tail.has_restarted():
            self._profile = ProfileSummary()
        if self._events_tail.has_restarted():
            self._events = EventsSummary()
        # The plan of a metrics line was published before it: plans are read last, so that the active one is there.
        for tail, target in (
            (self._metrics_tail, self._metrics),
            (self._profile_tail, self._profile),
            (self._events_tail, self._events),
        ):
            for record in tail.read():
                try:
                    target.add(record)
                except _BAD_RECORD:
                    tail.invalid_lines += 1
        self._read_plans()
        if self._profile_tail.is_partial and not self._has_last_header():
            self._read_whole_profile()
        return self._status()

    def _has_last_header(self) -> bool:
        """Whether the header that was found is that of the last steps; what was left out may have a newer one."""
        profile = self._profile
        segment = self._document.get("segment")
        is_old = isinstance(segment, int) and (profile.segment is None or profile.segment < segment)
        return not is_old and (not profile.measured or len(profile.measured[-1][1]) == len(profile.workers))

    def _read_whole_profile(self) -> None:
        """Search all of the profile for headers, which takes seconds per gigabyte."""
        self._profile = ProfileSummary()
        self._profile_tail = JsonlTail(self.run / "profile.jsonl", markers=PROFILE_MARKERS, marked_bytes=None)
        for record in self._profile_tail.read():
            try:
                self._profile.add(record)
            except _BAD_RECORD:
                self._profile_tail.invalid_lines += 1

    def _read_document(self) -> None:
        path = self.run / "run.json"
        try:
            found = os.stat(path)
            state = (found.st_ino, found.st_size, found.st_mtime_ns)
            if state == self._document_state:
                return
            document = read_any_json(path)
        except (DocumentError, OSError) as error:
            raise UsageError(f"{self.run} is not a run directory: {reason(error)}") from error
        if not isinstance(document, dict):
            raise UsageError(f"{self.run} is not a run directory: run.json must be an object")
        if self._document and document.get("run_id") != self._document.get("run_id"):
            self._plans.clear()
        self._document, self._document_state = document, state

    def _option(self, concern: str, name: str) -> Any:
        return _table(_table(self._document, "config"), concern).get(name)

    def _read_plans(self) -> None:
        try:
            names = os.listdir(self.run / "plans")
        except OSError:
            names = []
        numbers = sorted(int(match[1]) for name in names if (match := _PLAN_NAME.fullmatch(name)))[-_MAX_PLANS:]
        self._plans = {number: plan for number, plan in self._plans.items() if number in numbers}
        # A published plan never changes, so that each is read once.
        for number in numbers:
            if number not in self._plans and (plan := self._read_plan(number)) is not None:
                self._plans[number] = plan

    def _read_plan(self, number: int) -> dict[str, Any] | None:
        try:
            plan = read_any_json(plan_path(self.run / "plans", number))
            migration, predicted = plan.get("migration") or {}, plan.get("predicted") or {}
            return {
                "plan_id": int(plan["plan_id"]),
                "balancer": plan["balancer"],
                "read_to_step": plan.get("read_to_step"),
                "reason": str(plan.get("reason") or ""),
                "action": plan.get("action"),
                "apply_at_step": plan.get("apply_at_step"),
                "stages": [_stage_summary(stage) for stage in plan.get("stages") or ()],
                "released": list(plan.get("released_workers") or ()),
                "moves": len(migration.get("moves") or ()),
                "bytes": int(migration.get("bytes") or 0),
                "pause_ns": migration.get("pause_ns"),
                "gain_fraction": predicted.get("gain_fraction"),
            }
        except (DocumentError, *_BAD_RECORD):
            return None

    def _status(self) -> RunStatus:
        metrics, profile = self._metrics, self._profile
        loads = profile.loads()
        mean_load = mean(loads)
        last = metrics.recent[-1] if metrics.recent else {}
        train_iters = self._option("training", "train_iters")
        step_ms = metrics.mean(lambda each: each["step_ns"] / 1e6)
        active = self._active_plan_id(last)
        boundary = self._next_boundary(train_iters)
        # Of this start: a later one continues the run.
        segment, stopped_with = self._events.stopped or (None, None)
        exit_code = stopped_with if segment == self._document.get("segment") else None
        has_processes = is_locked(self.run)
        return RunStatus(
            run=str(self.run),
            model=self._option("model", "family"),
            segment=profile.segment,
            step=metrics.step,
            train_iters=train_iters,
            loss=metrics.mean(lambda each: each.get("lm_loss")),
            validation_loss=metrics.validation_loss,
            learning_rate=last.get("learning_rate"),
            step_ms=step_ms,
            tokens_per_s=metrics.per_s("tokens"),
            mfu=self._mfu(),
            time_left_s=None
            if train_iters is None or step_ms is None or exit_code is not None or has_processes is False
            else (train_iters - metrics.step) * step_ms / 1e3,
            idle_s=self._idle_s(),
            skipped=metrics.num_skipped,
            skipped_is_minimum=self._metrics_tail.is_partial,
            loads=loads,
            bubble=None if mean_load is None or len(loads) < 2 else 1.0 - mean_load,
            peak_memory_bytes=[each or 0 for each in profile.measured[-1][2]] if profile.measured else [],
            workers=self._workers(loads, active),
            released=profile.released,
            joined=profile.joined,
            requested_workers=self._requested_workers(),
            losses=[loss for _, loss in metrics.losses],
            loss_curve=metrics.loss_curve.values(),
            tokens_per_s_curve=metrics.rate_curve.values(),
            active_plan_id=active,
            next_boundary=boundary,
            next_migration=self._next_migration(active, boundary),
            next_event=min(
                ((kind, step) for kind, step in profile.expected.items() if step > metrics.step),
                key=lambda each: each[1],
                default=None,
            ),
            plans=self._plan_statuses(active),
            last_checkpoint=self._events.checkpoint,
            events=list(self._events.messages),
            incidents=list(self._events.incidents),
            num_incidents=self._events.num_incidents,
            seconds_lost=self._events.seconds_lost,
            steps_lost=self._events.steps_lost,
            exit_code=exit_code,
            has_processes=has_processes,
            invalid_lines=sum(
                tail.invalid_lines for tail in (self._metrics_tail, self._profile_tail, self._events_tail)
            ),
        )

    def _idle_s(self) -> float | None:
        try:
            return max(0.0, self._now() - os.stat(self.run / "metrics.jsonl").st_mtime)
        except OSError:
            return None

    def _mfu(self) -> float | None:
        """Model FLOPs utilization (PaLM, arXiv:2204.02311, appendix B): model FLOP/s over the peak of all devices."""
        flops_per_s = self._metrics.per_s("model_flops")
        name = str(_table(self._document, "engine").get("device_name") or "")
        is_half = self._option("precision", "bf16") or self._option("precision", "fp16")
        known = next((peaks for device, peaks in PEAK_FLOPS_PER_S.items() if device in name), {})
        peak = self._peak or known.get("half" if is_half else "float32")
        devices = sum(each["ranks"] for each in self._profile.workers) or self._document.get("world_size")
        return flops_per_s / (peak * devices) if flops_per_s is not None and peak and devices else None

    def _active_plan_id(self, last: Mapping[str, Any]) -> int | None:
        applied = [number for number, (result, _, _) in self._profile.results.items() if result == "applied"]
        # The result of a plan is written before the first step with it.
        found = [number for number in (last.get("plan_id"), *applied[-1:]) if number is not None]
        return max(found) if found else next(iter(self._plans), None)

    def _next_boundary(self, train_iters: int | None) -> int | None:
        interval = self._option("balance", "rebalance_interval")
        if self._option("balance", "balance") != "online" or not interval or len(self._profile.workers) < 2:
            return None
        boundary = (self._metrics.step // int(interval) + 1) * int(interval)
        # After the last step nothing moves.
        return boundary if train_iters is None or boundary < train_iters else None

    def _next_migration(self, active: int | None, boundary: int | None) -> NextMigration | None:
        """The plan that the trainer will read at the next boundary: the newest one without a result."""
        waiting = [number for number in self._plans if number > (active or 0) and number not in self._profile.results]
        if not waiting or boundary is None or (plan := self._plans[max(waiting)])["action"] != "move":
            return None
        interval, earliest = int(self._option("balance", "rebalance_interval")), int(plan["apply_at_step"] or 0)
        return NextMigration(
            plan_id=plan["plan_id"],
            step=max(boundary, -(-earliest // interval) * interval),
            moves=plan["moves"],
            bytes=plan["bytes"],
            gain_fraction=plan["gain_fraction"],
            pause_ns=plan["pause_ns"],
            released=plan["released"],
        )

    def _workers(self, loads: Sequence[float], active: int | None) -> list[WorkerStatus]:
        stages = self._plans[active]["stages"] if active in self._plans else []
        memory = self._profile.measured[-1][2] if self._profile.measured else []
        known = self._profile.workers or [{"worker": at, "memory_bytes": None} for at in range(len(loads))]
        found = []
        for at, each in enumerate(known):
            own = [stage for stage in stages if stage["worker"] == each["worker"]]
            found.append(
                WorkerStatus(
                    worker=each["worker"],
                    stages=[stage["stage"] for stage in own],
                    layers=", ".join(stage["layers"] for stage in own),
                    num_layers=sum(stage["num_layers"] for stage in own) if stages else None,
                    load=loads[at] if at < len(loads) else None,
                    peak_memory_bytes=memory[at] if at < len(memory) else None,
                    memory_bytes=each["memory_bytes"],
                    relative_speed=each.get("relative_speed", 1.0),
                )
            )
        return found

    def _requested_workers(self) -> int | None:
        """Number of workers of ``requests/resize.json``, which the run has not taken yet."""
        try:
            return int(read_any_json(self.run / "requests" / "resize.json")["workers"])
        except (DocumentError, *_BAD_RECORD):
            return None

    def _plan_statuses(self, active: int | None) -> list[PlanStatus]:
        statuses = []
        for number, plan in self._plans.items():
            result = self._profile.results.get(number)
            # The initial plan has no result: the trainer wrote it itself. A later one has not been read yet.
            without = "waiting" if active is None or number > active else "no result"
            text = "initial" if plan["balancer"] == "initial" else result[0] if result else without
            step = result[1] if result else plan["read_to_step"]
            statuses.append(PlanStatus(plan_id=number, result=text, step=step, reason=plan["reason"]))
        return statuses


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object within a document; empty where it is missing or of another type."""
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _stage_summary(stage: Mapping[str, Any]) -> dict[str, Any]:
    items: Sequence[str] = list(stage["items"])
    layers = "(empty)" if not items else items[0] if len(items) == 1 else f"{items[0]} .. {items[-1]}"
    return {
        "stage": int(stage["stage"]),
        "worker": int(stage["worker"]),
        "layers": layers,
        "num_layers": len(items),
    }


def read_run_status(run: Path, peak_flops_per_s: float | None = None) -> RunStatus:
    """Read the status of a run once.

    Args:
        run: run directory.
        peak_flops_per_s: peak FLOP/s of a device; None: known for some devices.

    Raises:
        UsageError: ``run`` is not a run directory.
    """
    return RunFollower(run, peak_flops_per_s=peak_flops_per_s).poll()


def status_document(status: RunStatus) -> dict[str, Any]:
    """The status as a JSON document."""
    return asdict(status)


def as_text(values: Iterable[int]) -> str:
    """Numbers as ``0, 2, 3``."""
    return ", ".join(map(str, values))
