"""A rank that outlives others, is joined by others or joins: leaves process groups, and trains on with other ranks.

::

    train(config) --> error of a collective, since a rank died, or since the launcher's notice shut its connections down
      | SurvivorLink.wait         notice: members of the next generation; None: an error of another kind
      |                           or GenerationEndedError: others join (``growth.py``)
      v
    PeerCopies.leave, enter_generation, configuration with another number of pipeline ranks
      v
    train(config) --> join_same     world of these ranks, with a new prefix of the keys
                      MemoryCheckpoint --> setup_run, as after a restart, but without a file and without a process start
                      first copy, SurvivorLink.confirm

An error between notice and confirmation ends this process. The launcher then ends the round, and the run restarts from
its last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..._common.errors import EXIT_RELAUNCH, DynmoError, UsageError
from ...config import Config
from ...config.validate import check
from ...formats.incident import Incident
from ...launch.elastic.continuation import CONTINUATION_VARIABLE, Notice, SurvivorLink, enter_generation
from ...launch.elastic.growth import Joining, Proposal
from ...launch.elastic.restart import pipeline_size
from ...launch.failure_record import forget_failure
from ...launch.incident_log import read_progress
from ...models.registry import family_of
from ...parallel.connections import connected_sockets, shut_down
from ...parallel.process_groups import World
from ..checkpoint.engine_checkpoint import progress_manifest
from ..checkpoint.metadata import CheckpointMetadata
from ..engine import Engine
from ..failures import lost_connection
from ..fingerprint import config_properties, installed
from ..garbage_collection import release_engine
from .growth import GenerationEndedError, ProposalWatch, join_generation, synchronize_at_boundary
from .memory_checkpoint import MemoryCheckpoint, find_memory_checkpoint
from .peer_copies import PeerCopies

# Seconds to wait for the launcher's notice after an error that is not a lost connection, but may be its result.
_OTHER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Continued:
    """How a generation began.

    Attributes:
        notice: notice of the launcher.
        memory: state that it continues from.
        last_step: last step that the generation before completed.
    """

    notice: Notice
    memory: MemoryCheckpoint
    last_step: int

    def incident(self, now: float) -> Incident:
        """The incident, at Unix time ``now``; after a loss the seconds and the steps since the copy were lost."""
        if self.notice.joined:
            return self._growth(now)
        notice, steps = self.notice, max(0, self.last_step - self.memory.step)
        ranks = ", ".join(map(str, notice.lost))
        return Incident(
            incident="continued",
            message=(
                f"continued from step {self.memory.step:,} without rank {ranks} ({notice.cause}): paused for"
                f" {max(0.0, now - notice.since):.1f} s, lost {steps:,} step{'s'[: steps != 1]}"
            ),
            cause=notice.cause,
            step=self.memory.step,
            ranks=notice.lost,
            seconds_lost=max(0.0, now - self.memory.copied_at),
            steps_lost=steps,
        )

    def _growth(self, now: float) -> Incident:
        """The incident of ranks that joined: no step was lost, and training was paused since the copy."""
        notice, paused_s = self.notice, max(0.0, now - self.memory.copied_at)
        ranks = f"rank{'s'[: len(notice.joined) != 1]} {', '.join(map(str, notice.joined))}"
        return Incident(
            incident="growth",
            message=f"{ranks} joined after step {self.memory.step:,} without a restart: paused for {paused_s:.1f} s",
            cause=notice.cause,
            step=self.memory.step,
            ranks=notice.joined,
            seconds_lost=paused_s,
        )


def continued_config(config: Config, processes: int, run_dir: Path, workers: int = 0) -> Config:
    """The configuration of a run that continues on other processes: with the parallel sizes of a restart with these.

    Args:
        config: configuration of the first generation.
        processes: number of processes.
        run_dir: run directory.
        workers: number of pipeline ranks; 0: that of a restart.

    Raises:
        DocumentError: its options do not allow this number.
    """
    place = str(run_dir)
    before = config.parallel.pipeline_model_parallel_size * config.parallel.data_parallel_size
    if not workers:
        pipeline = pipeline_size({"parallel": vars(config.parallel)}, before, processes)
        workers = config.parallel.pipeline_model_parallel_size if pipeline is None else pipeline
    parallel = replace(
        config.parallel, pipeline_model_parallel_size=workers, data_parallel_size=max(1, processes // workers)
    )
    changed = replace(
        config,
        parallel=parallel,
        run=replace(config.run, run_dir=place, save=place, load=place),
        # Of the former number of ranks.
        balance=replace(config.balance, plan=None),
    )
    check(changed, processes)
    return changed


class Survivor:
    """What a rank keeps when others die or join: its copies, and the connection to the launcher.

    Args:
        interval: ``--peer-checkpoint-interval``.
        link: connection to the launcher.
        notice_s: seconds from a lost connection until a notice of the launcher, at most.
        joining: what a rank that joins a running training knows; None for the others.

    Attributes:
        copies: copies in the memory of this rank.
        continued: how the current generation began; None in the first one.
    """

    def __init__(self, interval: int, link: SurvivorLink, notice_s: float, joining: Joining | None = None) -> None:
        self.copies = PeerCopies(interval)
        self.continued: Continued | None = None
        self.proposals = ProposalWatch(link, self._problem_of, self._properties)
        self._link, self._notice_s, self._joining = link, notice_s, joining
        self._first: Config | None = None
        self._step_of_rollback: int | None = None
        self._notice: Notice | None = None
        self._run_dir: Path | None = None
        self._before: frozenset[int] = frozenset()
        self._is_training = False

    @staticmethod
    def of(config: Config, environment: Mapping[str, str]) -> Survivor | None:
        """The survivor of a run with ``--peer-checkpoint-interval``; None without.

        Raises:
            UsageError: no launcher.
        """
        interval = config.run.peer_checkpoint_interval
        if interval is None or config.training.skip_train:
            return None
        if CONTINUATION_VARIABLE not in environment:
            raise UsageError(
                f"--peer-checkpoint-interval {interval}: requires dynmo-train launch, which notifies the other ranks;"
                " remove it"
            )
        joining, notice_s = Joining.of(environment), float(environment[CONTINUATION_VARIABLE])
        return Survivor(interval, SurvivorLink(environment), notice_s, joining)

    def run(self, train: Callable[[Config], int], config: Config) -> int:
        """Train, and again with the remaining ranks after each loss, and with more after a growth; the exit code.

        Args:
            train: trains one generation.
            config: configuration of the first one.
        """
        self._first = config
        if self._joining is not None:
            outcome = join_generation(self._link, self._joining, self._properties())
            if outcome.notice is None:
                return EXIT_RELAUNCH
            self._notice, self._run_dir = outcome.notice, Path(self._joining.run_dir)
            config = self._enter(outcome.notice, config)
        while True:
            try:
                return train(config)
            except GenerationEndedError as ended:
                self._notice = ended.notice
            except (RuntimeError, DynmoError) as error:
                if not self._is_training:
                    raise
                self._notice = self._link.wait(_OTHER_S if lost_connection(error) is None else self._notice_s)
                if self._notice is None:
                    raise
            # Here the traceback, which holds the former engine, is freed.
            config = self._enter(self._notice, self._first)

    def _enter(self, notice: Notice, first: Config) -> Config:
        """Leave the former generation and enter the next one; its configuration, from that of the first one."""
        if self._run_dir is None:
            raise DynmoError("the run has no directory yet")
        self._is_training = False
        forget_failure(os.environ)
        self.copies.leave()
        release_engine()
        self._link.generation = notice.generation
        enter_generation(notice, self._link.first_rank)
        return continued_config(first, len(notice.ranks), self._run_dir, notice.workers)

    def _problem_of(self, proposal: Proposal) -> str | None:
        """Why the options do not allow the sizes of a proposal; None where they do."""
        if self._first is None or self._run_dir is None:
            return "the run has no directory yet"
        try:
            continued_config(self._first, proposal.processes, self._run_dir, proposal.workers)
        except DynmoError as error:
            return str(error)
        return None

    def _properties(self) -> dict[str, str]:
        """What must be equal on all ranks; it takes as long as reading the files of the options."""
        if self._first is None:
            return {}
        return {**config_properties(self._first), **installed()}

    def begin(self) -> None:
        """Record which connections exist before those of the generation."""
        self._before = frozenset(connected_sockets())

    def join(self, config: Config, world: World) -> MemoryCheckpoint | None:
        """The state that the generation continues from; None in the first one. Every rank calls this.

        Raises:
            IncompleteCopiesError: on every rank, if the copies lack items.
            UsageError: the device is not the CPU.
        """
        if world.device.type != "cpu":
            raise UsageError(
                f"--peer-checkpoint-interval {self.copies.interval}: is supported on the CPU only (gloo); give"
                " --device cpu, or remove it"
            )
        memory = None
        if self._notice is not None and self._run_dir is not None:
            items = [item.name for item in family_of(config).items]
            memory = find_memory_checkpoint(world, self.copies.copies, items)
            last_step = read_progress(self._run_dir).step
            # No step has been completed since a rollback: the last one in the log was before that.
            last_step = memory.step if last_step == self._step_of_rollback else last_step
            self._step_of_rollback = None
            self.continued = Continued(notice=self._notice, memory=memory, last_step=last_step)
        if memory is None:
            self.copies.join(world, 0, None)
        else:
            self.copies.join(world, memory.next_branch, memory.tag)
        return memory

    def roll_back(self) -> None:
        """Let the copies of a run that returns to a checkpoint precede those before. Every rank calls this."""
        self.copies.branch += 1
        self.continued = None
        if self._run_dir is not None:
            self._step_of_rollback = read_progress(self._run_dir).step

    def watch(self, run_dir: Path) -> None:
        """Shut down the connections of this generation when the launcher reports a death.

        Args:
            run_dir: run directory.
        """
        self._run_dir = run_dir
        found = connected_sockets().items()
        connections = {inode for inode, port in found if inode not in self._before and port != self._link.store_port}

        def leave() -> None:
            shut_down(connections)

        self._link.watch(leave)

    def confirm(self, world: World) -> None:
        """Report that the generation trains; its first copy has been started. Every rank calls this."""
        self._is_training = True
        if world.is_rank0:
            self.proposals.start()
            self._link.confirm()

    def grow(self, world: World) -> str:
        """Continue with the ranks that wait to join. Every rank calls this, after it has started a copy.

        Returns:
            Why they do not join.

        Raises:
            GenerationEndedError: on every rank, if they join.
            RuntimeError: another rank has ended.
        """
        self.copies.wait()
        outcome = synchronize_at_boundary(self._link, world, self.proposals.pending)
        if outcome.notice is not None:
            raise GenerationEndedError(outcome.notice)
        return outcome.reason

    def copy(self, engine: Engine, metadata: CheckpointMetadata, now: float, *, is_needed: bool = False) -> None:
        """Start a copy of the state after a step. Every rank calls this at the same boundary.

        Args:
            engine: engine of this rank.
            metadata: contents of a checkpoint that the engine does not know.
            now: Unix time.
            is_needed: whether others receive it, also where this is the only rank.
        """
        progress: dict[str, Any] = {"manifest": progress_manifest(engine, metadata), "copied_at": now}
        self.copies.start(engine, metadata.step, progress, is_needed=is_needed)
