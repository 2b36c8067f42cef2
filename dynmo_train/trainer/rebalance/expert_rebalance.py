"""Experts move to other ranks of their group: at the start by ``--expert-plan``, during training by ``dynmo-plan``.

At every ``--expert-rebalance-interval`` steps::

    rank 0:    dynmo-plan experts RUN --current LAST      tokens per expert, from the profile
    all ranks: broadcast -> Engine.place_experts          two phases: announce, send, verify, commit
                              |-- MoveError: event "experts_kept", the old placement stays
                              v
               event "experts_moved", also in the profile: layers cost something else now

With ``--moe-expert-slots`` plans have replicas of hot experts, which use all slots of all ranks.

Results, norms and weights have the same bits on any placement, so that a resumed run may start from another one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from ..._common.document import DocumentError
from ...config.sections.balance import BalanceConfig
from ...dynamics.technique import Event
from ...formats.expert_plan import read_placements
from ...launch.find_command import program_path
from ...parallel.process_groups import broadcast_object
from ...pipeline.expert_migration import ExpertMoveReport, experts_by_item
from ...pipeline.migration import MoveError
from ..engine import Engine
from ..monitoring.profile_writer import RunLogger
from ..run_directory import RunDirectory

PLANNER_TIMEOUT_S = 120.0
Placements = dict[str, tuple[tuple[int, ...], ...]]


class ExpertRebalance:
    """Moves experts at boundaries. Every rank has one.

    Args:
        engine: Engine of this rank.
        run: Run directory.
        plans: Folder of the plans.
        interval: Steps between possible moves; None moves none after the start.
        initial: Expert plan of the start; None: experts in order.
        log_event: Appends a line to ``events.jsonl``.
        log_change: Appends an event that changes the costs of layers, to the profile too.
    """

    def __init__(
        self,
        engine: Engine,
        run: Path,
        plans: Path,
        *,
        interval: int | None,
        initial: str | None,
        log_event: Callable[..., None],
        log_change: Callable[[Event], None],
    ) -> None:
        self._engine, self._run, self._plans, self._interval = engine, run, plans, interval
        self._log_event, self._log_change = log_event, log_change
        self._active = None if initial is None else Path(initial)

    @classmethod
    def of(
        cls, options: BalanceConfig, engine: Engine, directory: RunDirectory, logger: RunLogger
    ) -> ExpertRebalance | None:
        """What the options of a run request; None where no expert moves."""
        interval, initial = options.expert_rebalance_interval, options.expert_plan
        if engine.world.dims.expert == 1 or (interval is None and initial is None):
            return None
        return cls(
            engine,
            directory.path,
            directory.plans,
            interval=interval,
            initial=initial,
            log_event=logger.log_event,
            log_change=logger.log_technique_event,
        )

    def start(self, step: int) -> str | None:
        """Apply the initial plan before the first step; every rank calls this. Returns a line for the log, or None.

        Raises:
            DocumentError: The plan does not fit the run.
        """
        return None if self._active is None else self._apply(self._read(self._active), step)

    def is_due(self, step: int) -> bool:
        """Whether experts may move at the boundary after ``step``."""
        return self._interval is not None and step % self._interval == 0

    def at_boundary(self, step: int) -> str | None:
        """Move experts at the boundary after ``step``; every rank calls this.

        Returns:
            A line for the log; None where nothing moved.
        """
        if not self.is_due(step):
            return None
        world = self._engine.world
        placements = broadcast_object(world, self._plan(step) if world.is_rank0 else None)
        return None if placements is None else self._apply(placements, step)

    def _apply(self, placements: Placements, step: int) -> str | None:
        try:
            report = self._engine.place_experts(placements)
        # Every rank gets this error or none does: all continue with the old placement.
        except MoveError as error:
            self._log_event("experts_kept", str(error), step=step)
            return str(error)
        if not report.num_moves and not report.num_copies:
            return None
        event = experts_moved(report, step)
        self._log_change(event)
        return event.message

    def _plan(self, step: int) -> Placements | None:
        """On rank 0: the placements of a new plan; None where it moves nothing or failed."""
        output = self._plans / f"experts-{step:06d}.json"
        command = program_path("dynmo-plan")
        if command is None:
            self._keep("dynmo-plan is not installed next to dynmo-train", step)
            return None
        words = [command, "experts", str(self._run), "--output", str(output), "--format", "json"]
        ranks, slots = self._engine.world.dims.expert, self._engine.settings.expert_slots
        words += ["--ranks", str(ranks)]
        if slots is not None:
            # Layers of one run have the same number of experts.
            experts = max(experts_by_item(self._engine.family.items).values())
            # Even shares: plans for these use all slots, and each microbatch finds its own shares among the replicas.
            words += ["--replicas", str(ranks * slots - experts), "--shares", "even"]
        words += [] if self._active is None else ["--current", str(self._active)]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PLANNER_TIMEOUT_S, check=False
            )
            if done.returncode == 0:
                placements = self._read(output)
                self._active = output
                return placements
            self._keep(f"no expert plan: {done.stderr.strip() or f'exit code {done.returncode}'}", step)
        except (subprocess.TimeoutExpired, DocumentError) as error:
            self._keep(f"no expert plan: {error}", step)
        return None

    def _keep(self, reason: str, step: int) -> None:
        self._log_event("experts_kept", reason, step=step)

    def _read(self, path: Path) -> Placements:
        engine = self._engine
        experts, slots = experts_by_item(engine.family.items), engine.settings.expert_slots
        return read_placements(path, experts, engine.world.dims.expert, slots)


def experts_moved(report: ExpertMoveReport, step: int) -> Event:
    """The event of a migration of experts, after which layers cost something else.

    Args:
        report: The migration.
        step: Number of completed steps.
    """
    experts = f"{report.num_moves:,} expert{'s'[: report.num_moves != 1]}"
    milliseconds = report.duration_ns / 1e6
    message = f"Moved {experts} ({report.num_bytes / 1e6:,.1f} MB) in {milliseconds:,.0f} ms"
    if report.num_copies:
        message += f"; {report.num_copies:,} new {'copies' if report.num_copies > 1 else 'copy'}"
    detail = {
        "moves": report.num_moves,
        "copies": report.num_copies,
        "bytes": report.num_bytes,
        "pause_ns": report.duration_ns,
    }
    return Event(kind="experts_moved", step=step, message=message, detail=detail)
