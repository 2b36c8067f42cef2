"""Detects loss spikes, and decides which samples a run skips after it returns to its last checkpoint.

A loss is a spike if it exceeds ``median + threshold x deviation`` of the last losses, itself excluded. The deviation is
``1.4826 x MAD``, the median absolute deviation scaled to a normal distribution's standard deviation, but at least a
hundredth of the median: on a plateau the MAD tends to 0, and noise would be a spike. Nothing is a spike until the
window is half full. Every finite loss enters the window, spikes too: less than half of the window cannot move the
median far, and after a lasting change of the level the rule adapts. Steps without an update (fp16 overflows, values
that are not finite) are not spikes and do not enter the window; ``FiniteCheck`` counts those that are not finite.

A rollback is a resume within the processes of the run: engine and data are built again from the last checkpoint. The
step numbers are executed again, on other samples::

    step             c | c+1 ... s-K | s-K+1 ... s |
    before             |   batches   |   spike     |            c: last checkpoint, s: spike
    after the rollback |   batches   |             skipped, c+1 <= s-K+1
                                     | following batches  ...

Which losses are compared and which samples are skipped follows from results that are equal on all ranks and from the
state in the checkpoint, so that a resume, on any placement, skips the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import TrainingConfig
from ..config.batch_schedule import Range, merged_ranges
from ..formats.incident import Incident
from .step_result import StepResult, UnloggedStep

# Standard deviations per median absolute deviation of a normal distribution: 1 / (quantile function at 3/4).
_DEVIATIONS_PER_MAD = 1.4826
_LEAST_DEVIATION = 0.01


def spike_limit(losses: list[float], threshold: float) -> float:
    """The loss above which a step is a spike.

    Args:
        losses: losses of the window, at least one.
        threshold: number of deviations above the median.

    Example: losses 1, 2, 3, 4, 5 have the median 3 and the MAD 1: the limit at threshold 10 is 17.826.
    """
    median = statistics.median(losses)
    deviation = _DEVIATIONS_PER_MAD * statistics.median([abs(loss - median) for loss in losses])
    return median + threshold * max(deviation, _LEAST_DEVIATION * abs(median))


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """A return to a checkpoint.

    Attributes:
        step: step that caused it, the last completed one.
        checkpoint_step: completed steps of the checkpoint.
        skipped: samples that the run skips from now on.
        ranges: all samples that it skips, with those of earlier rollbacks that no checkpoint has yet.
        cause: ``loss spike``, or that steps were not finite.
        attempts: number of rollbacks to this checkpoint, with this one.
        seconds: time of the steps since the checkpoint, in seconds.
    """

    step: int
    checkpoint_step: int
    skipped: Range
    ranges: tuple[Range, ...]
    cause: str
    attempts: int
    seconds: float

    @property
    def message(self) -> str:
        """One sentence for a person."""
        begin, end = self.skipped
        return (
            f"returned from step {self.step:,} to the checkpoint of step {self.checkpoint_step:,} ({self.cause});"
            f" samples {begin:,} to {end - 1:,} are skipped"
        )

    def incident(self, skipped_steps: int) -> Incident:
        """The record of ``events.jsonl``.

        Args:
            skipped_steps: number of its steps without an update, whose incidents count them.
        """
        return Incident(
            incident="rollback",
            message=self.message,
            cause=self.cause,
            step=self.step,
            seconds_lost=self.seconds,
            steps_lost=self.step - self.checkpoint_step - skipped_steps,
            skipped_samples=self.skipped,
        )


@dataclass(kw_only=True)
class LossSpikes:
    """The losses of the last steps, and where their batches began; equal on all ranks.

    Attributes:
        threshold: deviations above the median; None detects no spikes.
        is_rolling_back: whether a spike returns the run to its last checkpoint.
        skip_batches: number of batches to skip.
        max_rollbacks: number of rollbacks to one checkpoint.
        losses: last losses.
        batches: last steps: number, first sample, samples, seconds.
        last: the rollback that this start of the run began with; None without one.
        found: step of the first spike that a rollback is due for; None without one.
    """

    threshold: float | None
    is_rolling_back: bool
    skip_batches: int
    max_rollbacks: int
    losses: deque[float]
    batches: deque[tuple[int, int, int, float]] = field(default_factory=deque)
    last: Rollback | None = None
    found: int | None = None

    @classmethod
    def of(cls, training: TrainingConfig, state: Mapping[str, Any], last: Rollback | None) -> LossSpikes:
        """The detection of a run.

        Args:
            training: options.
            state: ``x_loss_spikes`` of the checkpoint that the run continues; empty without one.
            last: rollback that the run continues from; None without one.
        """
        losses: deque[float] = deque(state.get("losses", ()), maxlen=training.loss_spike_window)
        is_rolling_back = training.loss_spike_action == "rollback"
        capacity = max(training.loss_spike_skip_batches, training.max_skipped_iterations) if is_rolling_back else 1
        return cls(
            threshold=training.loss_spike_threshold,
            is_rolling_back=is_rolling_back,
            skip_batches=training.loss_spike_skip_batches,
            max_rollbacks=training.loss_spike_max_rollbacks,
            losses=losses,
            # One more: on GPUs the next step was launched before the spike is known.
            batches=deque(maxlen=capacity + 1),
            last=last,
        )

    def after_step(self, launched: UnloggedStep, result: StepResult) -> str | None:
        """Record a step; a message if its loss is a spike, else None."""
        self.batches.append((launched.step, launched.consumed, launched.size, result.step_ns / 1e9))
        if self.threshold is None or not result.updated or not math.isfinite(result.loss):
            return None
        window = list(self.losses)
        self.losses.append(result.loss)
        if 2 * len(window) < (self.losses.maxlen or 0):
            return None
        limit = spike_limit(window, self.threshold)
        if result.loss <= limit:
            return None
        if self.is_rolling_back and self.found is None:
            self.found = launched.step
        return (
            f"loss spike in step {launched.step}: {result.loss:.4g} is above {limit:.4g}, {self.threshold:g} deviations"
            f" above the median {statistics.median(window):.4g} of {len(window)} steps"
        )

    def rollback(self, checkpoint_step: int, skipped_steps: int, ranges: tuple[Range, ...] = ()) -> Rollback:
        """The return to a checkpoint, because of a spike or else of the last steps, which were not finite.

        Args:
            checkpoint_step: completed steps of the last checkpoint.
            skipped_steps: number of last steps that were not finite, which are skipped in any case.
            ranges: samples that the run skips already.
        """
        cause = f"{skipped_steps} steps in a row were not finite" if self.found is None else "loss spike"
        count = max(self.skip_batches, skipped_steps if self.found is None else 0)
        until = [each for each in self.batches if self.found is None or each[0] <= self.found]
        dropped = [each for each in until[-count:] if each[0] > checkpoint_step]
        step, first, size, _ = dropped[-1]
        repeated = self.last is not None and self.last.checkpoint_step == checkpoint_step
        return Rollback(
            step=step,
            checkpoint_step=checkpoint_step,
            skipped=(skipped := (dropped[0][1], first + size)),
            ranges=merged_ranges(ranges, [skipped]),
            cause=cause,
            attempts=1 + (self.last.attempts if repeated and self.last is not None else 0),
            seconds=sum(each[3] for each in dropped) / len(dropped) * (step - checkpoint_step),
        )

    def state(self, skipped: tuple[Range, ...]) -> dict[str, Any]:
        """``x_loss_spikes`` of a checkpoint: losses of the window, skipped samples; empty where there is nothing.

        Args:
            skipped: ranges that the run skips.
        """
        losses = {"losses": list(self.losses)} if self.threshold is not None else {}
        return losses | ({"skipped_samples": [list(each) for each in skipped]} if skipped else {})


def spike_incident(message: str, step: int) -> Incident:
    """The incident of a spike.

    Args:
        message: what was detected.
        step: step of the spike.
    """
    return Incident(incident="loss_spike", message=message, cause="loss spike", step=step)


def end_message(rollback: Rollback, max_rollbacks: int) -> str:
    """Why a run ends after too many rollbacks, and the remedy.

    Args:
        rollback: the rollback that is not executed any more.
        max_rollbacks: value of ``--loss-spike-max-rollbacks``.
    """
    times = f"{max_rollbacks} time{'s'[: max_rollbacks != 1]}"
    return (
        f"training ended after step {rollback.step}: {rollback.cause} again after it returned {times} to the checkpoint"
        f" of step {rollback.checkpoint_step}. --load an older checkpoint, lower --lr, or raise"
        " --loss-spike-max-rollbacks; events.jsonl lists the skipped samples"
    )
