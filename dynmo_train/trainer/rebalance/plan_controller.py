"""The trainer's side of the handshake with the planner: at boundaries, find a plan, check it, agree, move, tell.

Worker 0 alone reads plans and writes results; what it decided is broadcast, and all workers move, or none does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..._common.document import DocumentError, Problem
from ...formats.plan import Plan, plan_ids, plan_path, read_plan
from ...formats.profile import plan_request_record, plan_result_record
from ...parallel.process_groups import broadcast_object
from ...parallel.shrink import without_workers
from ...pipeline.migration import MoveError
from ...pipeline.partition import Partition
from ..engine import Engine
from .planner_process import PlannerProcess

POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class AppliedPlan:
    """A plan that came into force at a boundary.

    Attributes:
        moves: (item, source, target, bytes) of each item that changed worker; workers by their ids.
        pause_ns: how long training stood still for it.
        released: ids of the workers that left with it.
        left: whether this process is of one of them, and has no more to do.
        way: how many workers are to compress between their replicas, where the plan says it.
    """

    plan_id: int
    moves: list[tuple[str, int, int, int]]
    pause_ns: int
    released: tuple[int, ...] = ()
    left: bool = False
    way: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanControllerSettings:
    """How worker 0 deals with the planner.

    Attributes:
        interval: steps between boundaries at which plans are looked for.
        lockstep: whether to ask at each boundary and wait for the answer.
        timeout_s: how long to wait for an answer.
    """

    interval: int
    lockstep: bool
    timeout_s: float


class PlanController:
    """Looks for plans at boundaries and makes them active.

    Args:
        append: appends a record to the profile.
        problems_of: why a plan cannot be taken by the run, given the number of the active plan; empty where it can.
        active_plan_id: number of the plan that the run starts with; plans up to it are not looked at.
        log_event: writes a line in ``events.jsonl``.
        settle: ends what all processes have begun together, before some of them leave.
        planner: the planner's process, where this trainer started it.
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
        settle: Callable[[], None],
        planner: PlannerProcess | None = None,
    ) -> None:
        self.engine, self.settings = engine, settings
        self.plans, self._append, self._problems_of, self._log_event = plans, append, problems_of, log_event
        self._settle = settle
        self.active_plan_id = self._seen = active_plan_id
        self._answered: set[int] = set()
        self._planner = planner

    def boundary(self, step: int) -> AppliedPlan | None:
        """Act at the boundary after ``step``; every worker calls this after every step."""
        if step % self.settings.interval:
            return None
        world = self.engine.world
        chosen = broadcast_object(world, self._choose(step) if world.is_rank0 else None)
        if chosen is None:
            return None
        started = time.perf_counter_ns()
        ids = world.worker_ids
        leaving = [position for position, worker in enumerate(ids) if worker in chosen["released"]]
        if leaving:
            self._settle()
        try:
            report = self.engine.repartition(self._after(chosen["stages"], leaving))
        except MoveError as error:
            self._result(chosen["plan_id"], step, "rolled_back", time.perf_counter_ns() - started, 0, str(error))
            return None
        self.active_plan_id = chosen["plan_id"]
        moves = [(m.item, ids[m.source], ids[m.target], report.bytes_by_item[m.item]) for m in report.moves]
        taken = AppliedPlan(
            plan_id=self.active_plan_id, moves=moves, pause_ns=0, released=tuple(chosen["released"]), way=chosen["way"]
        )
        if leaving:
            staying = without_workers(world, leaving)
            if staying is None:
                return replace(taken, left=True)
            self.engine.set_world(staying)
        self.engine.pipeline()
        pause = time.perf_counter_ns() - started
        moved = [{"item": item, "from": source, "to": to, "bytes": size} for item, source, to, size in moves]
        more: dict[str, Any] = {"released_workers": chosen["released"]} if leaving else {}
        self._result(
            self.active_plan_id, step, "applied", pause, report.total_bytes, chosen["reason"], moves=moved, **more
        )
        return replace(taken, pause_ns=pause)

    def _after(self, stages: Sequence[Sequence[str]], leaving: Sequence[int]) -> Partition:
        """The partition of a plan, at the pipeline positions of now."""
        before = self.engine.partition
        staying = tuple(position for position in range(before.workers) if position not in leaving)
        return replace(
            before,
            stages=tuple(tuple(stage) for stage in stages),
            workers=len(staying),
            places=staying if leaving else (),
        )

    def _choose(self, step: int) -> dict[str, Any] | None:
        """On worker 0: the highest valid plan that wants to move; the others are answered on the way."""
        self._look_after_planner(step)
        if self.settings.lockstep:
            self._append(plan_request_record(step))
            self._wait(step)
        chosen: Plan | None = None
        # Listed once: a plan that is written from here on is not in the list, and belongs to the next decision.
        listed = [plan_id for plan_id in plan_ids(self.plans) if plan_id > self._seen]
        for plan_id in sorted(set(listed) - self._answered, reverse=True):
            plan = self._read(plan_id, step)
            if plan is None:
                continue
            if chosen is None and plan.apply_at_step is not None and plan.apply_at_step > step:
                return None  # the newest plan is for a later boundary: it is looked at again there
            if chosen is not None:
                self._result(plan_id, step, "superseded", 0, 0, f"plan {chosen.plan_id} is newer")
                continue
            problems = self._problems_of(plan, self.active_plan_id, self.engine.partition.stages)
            if problems:
                self._result(plan_id, step, "refused", 0, 0, "; ".join(map(str, problems)))
                self._answered.add(plan_id)
            else:
                chosen = plan
        self._seen = max([self._seen, *listed])
        self._answered.clear()
        if chosen is None:
            return None
        if chosen.action == "keep":
            self._result(chosen.plan_id, step, "unchanged", 0, 0, chosen.reason)
            return None
        return {
            "plan_id": chosen.plan_id,
            "stages": chosen.stages,
            "released": sorted(chosen.released_workers),
            "way": chosen.selective_grad_comp_way,
            "reason": chosen.reason,
        }

    def _read(self, plan_id: int, step: int) -> Plan | None:
        try:
            return read_plan(plan_path(self.plans, plan_id))
        except DocumentError as error:
            self._result(plan_id, step, "refused", 0, 0, str(error))
            self._answered.add(plan_id)
            return None

    def _wait(self, step: int) -> None:
        """Until a new plan has read up to ``step``, the time is out, or the planner is gone for good."""
        deadline = time.monotonic() + self.settings.timeout_s
        while time.monotonic() < deadline:
            for plan_id in plan_ids(self.plans):
                if plan_id > self._seen and self._answers(plan_id, step):
                    return
            if self._planner is not None and self._planner.pid is None:
                return
            time.sleep(POLL_S)
            if self._look_after_planner(step):
                deadline = time.monotonic() + self.settings.timeout_s  # the new one reads the same ask
        words = f"no answer from the planner within {self.settings.timeout_s:g} s; training continues"
        self._log_event("planner_late", words, step=step)

    def _answers(self, plan_id: int, step: int) -> bool:
        try:
            return read_plan(plan_path(self.plans, plan_id)).read_to_step >= step
        except DocumentError:
            return False

    def _look_after_planner(self, step: int) -> bool:
        """Report what happened to the planner; whether anything did."""
        happened = self._planner.check() if self._planner is not None else None
        if happened:
            self._log_event("planner", happened, step=step)
        return happened is not None

    def _result(
        self, plan_id: int, step: int, result: str, pause_ns: int, num_bytes: int, reason: str, **extra: Any
    ) -> None:
        if not self.engine.world.is_rank0:
            return
        record = plan_result_record(
            plan_id=plan_id,
            step=step,
            result=result,  # type: ignore[arg-type] # one of the outcomes, all written in this file
            pause_ns=pause_ns,
            num_bytes=num_bytes,
            reason=reason,
        )
        self._append(record)
        figures = {"plan_id": plan_id, "pause_ns": pause_ns, "bytes": num_bytes, **extra}
        self._log_event(f"plan_{result}", f"plan {plan_id} {result.replace('_', ' ')}: {reason}", step=step, **figures)
