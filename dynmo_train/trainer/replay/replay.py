"""Executes steps of a run again, from a checkpoint, and digests the tensors of each step.

The engine, the data and the order of the samples are those of a resumed run; nothing is written into the run. The
position in the data is that of the run's metrics, so that batches which a rollback skipped are skipped here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..._common.errors import UsageError
from ...config import Config
from ...formats.checkpoint import step_of
from ...formats.step_digests import StepDigests, StepFigures, TensorKey, finite_or_none
from ...parallel.consensus import run_on_all_ranks
from ...parallel.process_groups import World
from ..engine import Engine
from ..setup import LoadedEngine, load_engine
from .step_digests import gathered_copies, gathered_digests, layout_of, observed_step
from .stored_run import LossyPlacement, StoredRun


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A step that was executed again.

    Attributes:
        digests: digests of its tensors.
        copies: tensors on the CPU.
    """

    digests: StepDigests
    copies: Mapping[TensorKey, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A part of a run to execute again.

    Attributes:
        run: the run.
        config: configuration of the replay, which loads ``checkpoint``.
        checkpoint: checkpoint to start from; None starts as the run did.
        first: first step to digest; those between the checkpoint and it are executed without digests.
        last: last step.
    """

    run: StoredRun
    config: Config
    checkpoint: Path | None
    first: int
    last: int

    def __post_init__(self) -> None:
        """Check that the steps exist.

        Raises:
            UsageError: the run has no such step.
        """
        limit = self.config.training.train_iters
        if self.last > limit:
            raise UsageError(f"{self.run.path} has {limit:,} steps, not {self.last:,}; give a step up to {limit:,}")

    def execute(self, world: World, copy_keys: Iterable[TensorKey] = ()) -> Iterator[ReplayedStep]:
        """Execute the steps. Every rank calls this and takes every result.

        Args:
            world: process groups.
            copy_keys: tensors to copy to the host.
        """
        loaded = load_engine(self.config, world)
        run_on_all_ranks(world, lambda: self._check_lossy(loaded.engine))
        consumed = loaded.consumed_samples
        loaded_step = 0 if self.checkpoint is None else step_of(self.checkpoint)
        for step in range(loaded.step + 1, self.last + 1):
            logged = self.run.steps.get(step)
            size = self.config.batch_sizes.at(consumed)
            if logged is not None:
                consumed, size = logged.first_sample, logged.size
            yield from self._step(loaded, world, step, consumed, size, loaded_step, tuple(copy_keys))
            consumed += size

    def _check_lossy(self, engine: Engine) -> None:
        """Refuse a replay whose lossy compression would have other bits than the run's.

        Raises:
            UsageError: with the reason.
        """
        placement = LossyPlacement(
            stages=engine.partition.stages,
            ranks=engine.world.dims.pipeline,
            schedule=engine.settings.pipeline.schedule,
        )
        problem = self.run.lossy_problem(self.checkpoint, self.last, placement)
        if problem is not None:
            raise UsageError(f"{self.run.path}: lossy gradient compression: the replay of step {self.last:,} {problem}")

    def _step(
        self,
        loaded: LoadedEngine,
        world: World,
        step: int,
        consumed: int,
        size: int,
        loaded_step: int,
        copy_keys: tuple[TensorKey, ...],
    ) -> Iterator[ReplayedStep]:
        """Execute one step; yields its digests from ``first`` on."""
        engine = loaded.engine
        batch = loaded.data.train_shard(consumed, step, world.replica, world.context_rank)
        if step < self.first:
            engine.train_step(batch, sampled=False, advance=size)
            engine.after_step(step)
            return
        result, observer = observed_step(engine, batch, size, copy_keys)
        engine.after_step(step)
        logged = self.run.steps.get(step)
        names = (*(item.name for item in engine.family.items), *engine.partition.shards)
        yield ReplayedStep(
            digests=StepDigests(
                run_id=self.run.run_id,
                step=step,
                loaded_step=loaded_step,
                tensors=gathered_digests(world, names, observer),
                figures=StepFigures(loss=finite_or_none(result.loss), grad_norm=finite_or_none(result.grad_norm)),
                updated=result.updated,
                logged=None if logged is None else logged.figures,
                layout=layout_of(engine),
            ),
            copies=gathered_copies(world, observer) if copy_keys else {},
        )
