"""The trainer's side of the handshake with the planner.

At every ``--rebalance-interval`` steps, on all ranks::

    rank 0                                                   all ranks
    [lockstep: write a plan_request, wait for the answer]
    list plans/plan-*.json newer than the active plan
    read and check each, newest first
      |-- invalid:          result "refused"
      |-- older than chosen: result "superseded"
      |-- action "keep":    result "unchanged"
      `-- action "move" ------------ broadcast ------------> Engine.repartition
                                                               |-- MoveError: result "rolled_back"
                                                               v
                                                             active plan = this plan
                                                             released ranks leave the world
                                                             Engine.pipeline: stages are rebuilt
    result "applied", with moves, bytes, pause <-------------- v
                                                             AppliedPlan -> trainer/loop.py

Invariants:

* Rank 0 alone reads plans and writes results; all ranks act on its broadcast, and either all of them move or none.
* Each plan that rank 0 lists gets exactly one result in the profile. The planner relies on it.
* A plan names pipeline ranks by their ids at the start of the run. Positions change when ranks are released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..._common.document import DocumentError, Problem
from ...dynamics.technique import Event
from ...formats.incident import Incident
from ...formats.plan import Plan, plan_ids, plan_path, read_plan
from ...formats.profile import plan_request_record, plan_result_record
from ...launch.watch.heartbeat import Phase
from ...parallel.process_groups import broadcast_object
from ...parallel.shrink import without_workers
from ...pipeline.expert_migration import ExpertMoveReport, placements_of
from ...pipeline.migration import MoveError, MoveReport
from ...pipeline.partition import Partition
from ..engine import Engine
from .expert_rebalance import experts_moved
from .planner_process import PlannerProcess

# Seconds between two listings of the plan folder while a lockstep run waits, short against a step.
POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class AppliedPlan:
    """A plan that became active at a boundary.

    Attributes:
        plan_id: number of the plan.
        moves: (item, source, target, bytes) of each moved item; source and target are ids of pipeline ranks.
        pause_ns: time for which training was paused, in nanoseconds.
        released: ids of the released pipeline ranks.
        is_released: whether this rank is released and has to exit.
        num_compressing_stages: number of pipeline ranks that compress between their replicas; None where the plan
            does not set it.
        predicted_ns: predicted step time, in nanoseconds; None where the plan has none.
    """

    plan_id: int
    moves: list[tuple[str, int, int, int]]
    pause_ns: int
    released: tuple[int, ...] = ()
    is_released: bool = False
    num_compressing_stages: int | None = None
    predicted_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanControllerSettings:
    """When rank 0 reads plans, and whether it waits for them.

    Attributes:
        interval: number of steps between boundaries at which plans are read.
        lockstep: whether to request a plan at each such boundary and wait for it.
        timeout_s: maximum time to wait for a plan, in seconds.
    """

    interval: int
    lockstep: bool
    timeout_s: float


class PlanController:
    """Reads plans at boundaries and applies them. Every rank has one.

    Args:
        engine: engine of this rank.
        settings: when plans are read.
        plans: folder of the plans.
        append: appends a record to the profile.
        problems_of: problems of a plan, given the number and the stages of the active plan; empty for a valid plan.
        active_plan_id: number of the plan that the run starts with; plans up to this number are ignored.
        log_event: appends a line to ``events.jsonl``.
        log_incident: appends an incident to ``events.jsonl``.
        log_change: appends an event that changes the costs of layers, to the profile too.
        finish_saves: completes collective work in progress, before some ranks are released.
        planner: process of the planner, where this trainer started it.
    """

    def __init__(
        self,
        engine: Engine,
        settings: PlanControllerSettings,
        *,
        plans: Path,
        append: Callable[[Mapping[str, Any]], None],
        problems_of: Callable[[Plan, int, Sequence[Sequence[str]]], list[Problem]],
        active_plan_id: int,
        log_event: Callable[..., None],
        log_incident: Callable[[Incident], None],
        log_change: Callable[[Event], None],
        finish_saves: Callable[[], None],
        planner: PlannerProcess | None = None,
    ) -> None:
        self.engine, self.settings = engine, settings
        self.plans, self._append, self._problems_of, self._log_event = plans, append, problems_of, log_event
        self._log_incident = log_incident
        self._log_change, self._finish_saves, self._planner = log_change, finish_saves, planner
        self.active_plan_id = self._newest_id = active_plan_id
        # Refused plans newer than a plan that waits for its ``apply_at_step``.
        self._refused: set[int] = set()

    def at_boundary(self, step: int) -> AppliedPlan | None:
        """Apply the newest valid plan at the boundary after ``step``. Every rank calls this after every step.

        Returns:
            The plan that became active; None where the partition is unchanged.
        """
        if step % self.settings.interval:
            return None
        world = self.engine.world
        self.engine.heartbeat.enter(Phase.PLAN_WAIT)
        chosen = broadcast_object(world, self._choose(step) if world.is_rank0 else None)
        self.engine.heartbeat.enter(Phase.BOUNDARY)
        if chosen is None:
            return None
        started = time.perf_counter_ns()
        ids = world.worker_ids
        released = [position for position, worker in enumerate(ids) if worker in chosen["released"]]
        # A save in progress contains collectives of all ranks, which a released rank could not complete.
        if released:
            self._finish_saves()
        try:
            experts, report = self._move(chosen)
        # Every rank gets this error or none does: all continue with the old partition, and the plan has its result.
        except MoveError as error:
            pause_ns = time.perf_counter_ns() - started
            self._result(chosen["plan_id"], step, "rolled_back", pause_ns, 0, str(error))
            self._log_incident(
                Incident(
                    incident="migration_failed",
                    message=f"plan {chosen['plan_id']} was rolled back: {error}",
                    cause=str(error) or "a transfer failed",
                    step=step,
                    seconds_lost=pause_ns / 1e9,
                )
            )
            return None
        self.active_plan_id = chosen["plan_id"]
        moves = [(m.item, ids[m.source], ids[m.target], report.bytes_by_item[m.item]) for m in report.moves]
        applied = AppliedPlan(
            plan_id=self.active_plan_id,
            moves=moves,
            pause_ns=0,
            released=tuple(chosen["released"]),
            num_compressing_stages=chosen["num_compressing_stages"],
            predicted_ns=chosen["predicted_ns"],
        )
        # Released ranks take part in the move above, since they send their layers away.
        if released:
            remaining = without_workers(world, released)
            if remaining is None:
                return replace(applied, is_released=True)
            # From here on ``ids`` and positions differ: positions are renumbered, ids are those of the start.
            self.engine.set_world(remaining)
        # Built here, so that the pause includes it and the next step does not.
        self.engine.pipeline()
        pause_ns = time.perf_counter_ns() - started
        num_bytes = report.total_bytes + (experts.num_bytes if experts is not None else 0)
        detail: dict[str, Any] = {"released_workers": chosen["released"]} if released else {}
        detail["moves"] = [{"item": item, "from": source, "to": to, "bytes": size} for item, source, to, size in moves]
        self._result(self.active_plan_id, step, "applied", pause_ns, num_bytes, chosen["reason"], **detail)
        if experts is not None and (experts.num_moves or experts.num_copies):
            self._log_change(experts_moved(experts, step))
        return replace(applied, pause_ns=pause_ns)

    def _move(self, chosen: Mapping[str, Any]) -> tuple[ExpertMoveReport | None, MoveReport]:
        """Move experts, then layers; both or none.

        Raises:
            MoveError: on every rank, where one of them failed.
        """
        placements = chosen["experts"]
        if not placements:
            return None, self.engine.repartition(self._partition_of(chosen))
        former = placements_of(self.engine.item_store.sharding)
        experts = self.engine.place_experts(placements)
        try:
            return experts, self.engine.repartition(self._partition_of(chosen))
        except MoveError:
            self.engine.place_experts({item: former[item] for item in placements})
            raise

    def _partition_of(self, chosen: Mapping[str, Any]) -> Partition:
        """The partition of a plan over the current pipeline ranks; released ranks have no stages."""
        ids = self.engine.world.worker_ids
        return Partition(
            stages=tuple(tuple(stage) for stage in chosen["stages"]),
            stage_ranks=tuple(ids.index(worker) for worker in chosen["stage_workers"]),
        )

    def _choose(self, step: int) -> dict[str, Any] | None:
        """On rank 0: the newest valid plan if it moves layers; the other plans get their results."""
        self._supervise_planner(step)
        if self.settings.lockstep:
            self._append(plan_request_record(step))
            self._wait(step)
        chosen: Plan | None = None
        # Listed once: a plan that is written after this line is left to the next boundary.
        listed = [plan_id for plan_id in plan_ids(self.plans) if plan_id > self._newest_id]
        # Newest first: a newer valid plan has been made from later costs.
        for plan_id in sorted(set(listed) - self._refused, reverse=True):
            plan = self._read(plan_id, step)
            if plan is None:
                continue
            # Read again at a later boundary: ``_newest_id`` stays, and so do the older plans without a result.
            if chosen is None and plan.apply_at_step is not None and plan.apply_at_step > step:
                return None
            if chosen is not None:
                self._result(plan_id, step, "superseded", 0, 0, f"plan {chosen.plan_id} is newer")
                continue
            # Among others, whether it is based on the active plan: its moves would start from the wrong ranks else.
            problems = self._problems_of(plan, self.active_plan_id, self.engine.partition.stages)
            if problems:
                self._result(plan_id, step, "refused", 0, 0, "; ".join(map(str, problems)))
                self._refused.add(plan_id)
            else:
                chosen = plan
        # All listed plans have a result now, or get one from the caller: none is read a second time.
        self._newest_id = max([self._newest_id, *listed])
        self._refused.clear()
        if chosen is None:
            return None
        if chosen.action == "keep":
            self._result(chosen.plan_id, step, "unchanged", 0, 0, chosen.reason)
            return None
        return {
            "plan_id": chosen.plan_id,
            "stages": chosen.stages,
            "stage_workers": chosen.stage_workers,
            "released": sorted(chosen.released_workers),
            "num_compressing_stages": chosen.selective_grad_comp_way,
            "experts": chosen.expert_ranks,
            "predicted_ns": (chosen.predicted or {}).get("step_ns"),
            "reason": chosen.reason,
        }

    def _read(self, plan_id: int, step: int) -> Plan | None:
        try:
            return read_plan(plan_path(self.plans, plan_id))
        except DocumentError as error:
            self._result(plan_id, step, "refused", 0, 0, str(error))
            self._refused.add(plan_id)
            return None

    def _wait(self, step: int) -> None:
        """Wait for a plan that is based on the profile up to ``step``, or for the timeout."""
        deadline = time.monotonic() + self.settings.timeout_s
        while time.monotonic() < deadline:
            for plan_id in plan_ids(self.plans):
                if plan_id > self._newest_id and self._is_answer(plan_id, step):
                    return
            # The planner has no restarts left: no plan will come.
            if self._planner is not None and self._planner.pid is None:
                return
            time.sleep(POLL_S)
            if self._supervise_planner(step):
                deadline = time.monotonic() + self.settings.timeout_s  # a restarted planner reads the same request
        message = f"no plan within {self.settings.timeout_s:g} s (--planner-timeout-s); training continues"
        self._log_event("planner_late", message, step=step)

    def _is_answer(self, plan_id: int, step: int) -> bool:
        try:
            return read_plan(plan_path(self.plans, plan_id)).read_to_step >= step
        # Invalid plans do not end the wait; ``_choose`` refuses them afterwards.
        except DocumentError:
            return False

    def _supervise_planner(self, step: int) -> bool:
        """Log what happened to the planner process, such as a restart; whether anything did."""
        message = self._planner.check() if self._planner is not None else None
        if message:
            self._log_event("planner", message, step=step)
            cause = message.partition(";")[0]
            self._log_incident(Incident(incident="planner_restart", message=message, cause=cause, step=step))
        return message is not None

    def _result(
        self, plan_id: int, step: int, result: str, pause_ns: int, num_bytes: int, reason: str, **extra: Any
    ) -> None:
        if not self.engine.world.is_rank0:
            return
        # Into the profile, the only file that the planner reads, and into the events, for people.
        record = plan_result_record(
            plan_id=plan_id,
            step=step,
            result=result,  # type: ignore[arg-type] # one of the outcomes, all written in this file
            pause_ns=pause_ns,
            num_bytes=num_bytes,
            reason=reason,
        )
        self._append(record)
        detail = {"plan_id": plan_id, "pause_ns": pause_ns, "bytes": num_bytes, **extra}
        self._log_event(f"plan_{result}", f"plan {plan_id} {result.replace('_', ' ')}: {reason}", step=step, **detail)
