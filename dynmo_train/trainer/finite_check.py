"""Detects steps whose loss or gradients are not finite, reports them, and ends the run after too many.

A step whose loss or global gradient norm is not finite does not update the weights. The previous update may have broken
the model; only the next finite step shows that it did not. Until then no checkpoint is saved. A checkpoint that is due
right after an update is saved only if weights and moments are finite, and if unusually large weights still give a
finite loss on the batch of that update.

A dynamic loss scale is found by overflows of the scaled gradients: 32 or more in a row from the initial 2^32. Such a
step is neither reported nor counted while the loss is finite and the scale can still be reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import TrainingConfig
from ..data.batch import Batch
from ..formats.incident import Incident
from .engine import Engine
from .step_result import StepResult

# Pieces of a batch in an event, so that a line of events.jsonl stays below a megabyte.
MAX_PIECES = 4096


@dataclass
class FiniteCheck:
    """Counts the steps that are not finite; equal on all ranks, since the results of steps are.

    Attributes:
        limit: number of consecutive skipped steps after which the run ends; None disables the check.
        skipped: number of consecutive steps up to the last one that were not finite.
        is_refused: whether the last checkpoint was not saved because the model is not finite.
    """

    limit: int | None
    skipped: int = 0
    is_refused: bool = False

    @classmethod
    def of(cls, training: TrainingConfig) -> FiniteCheck:
        """The check of ``--check-for-nan-in-loss-and-grad`` and ``--max-skipped-iterations``."""
        return cls(limit=training.max_skipped_iterations if training.check_for_nan_in_loss_and_grad else None)

    def after_step(self, step: int, result: StepResult) -> str | None:
        """Record the result of ``step``; a message if it was not finite, else None."""
        if result.updated:
            self.skipped = 0
        if self.limit is None or result.updated or result.is_scale_search:
            return None
        self.skipped += 1
        loss, norm = (number_text(value) for value in (result.loss, result.grad_norm))
        return (
            f"skipped the update of step {step}: loss {loss}, gradient norm {norm};"
            f" {self.skipped} in a row, the run ends at {self.limit}"
        )

    @property
    def is_over(self) -> bool:
        """Whether the run has reached the limit."""
        return self.limit is not None and self.skipped >= self.limit

    def refusal(self, engine: Engine, step: int, batch: Batch) -> str | None:
        """The reason against saving a checkpoint after ``step``; None without one. Every rank calls this.

        Args:
            engine: engine of this rank.
            step: number of completed steps.
            batch: batch of the last step.
        """
        reason = None
        if self.limit is not None:
            # In the order of their costs: a counter, a pass over weights and moments, at most one forward.
            if self.skipped:
                steps = "the last step was" if self.skipped == 1 else f"the last {self.skipped} steps were"
                reason = f"no checkpoint of step {step}: {steps} not finite"
            elif not engine.has_finite_state():
                reason = f"no checkpoint of step {step}: weights or moments are not finite"
            elif not engine.has_finite_loss(batch):
                reason = f"no checkpoint of step {step}: the loss is not finite after its update"
        self.is_refused = reason is not None
        return reason


def number_text(value: float) -> str:
    """``value`` as ``nan``, ``inf`` or a number with four significant digits."""
    return f"{value:.4g}"


def not_finite_incident(problem: str, step: int, result: StepResult) -> Incident:
    """The incident of a step without update.

    Args:
        problem: message of :meth:`FiniteCheck.after_step`.
        step: the step.
        result: its result.
    """
    return Incident(
        incident="not_finite",
        message=problem,
        cause="the loss or the gradient norm is not finite",
        step=step,
        seconds_lost=result.step_ns / 1e9,
        steps_lost=1,
    )


def batch_detail(consumed: int, size: int, places: list[list[dict[str, Any]]]) -> Mapping[str, Any]:
    """Fields of an event that identify the samples of a batch, so that they can be inspected.

    Args:
        consumed: number of samples before the batch.
        size: number of samples of the batch.
        places: for each sample, the pieces of documents that its tokens are from.
    """
    listed, pieces = 0, 0
    while listed < len(places) and pieces + len(places[listed]) <= MAX_PIECES:
        pieces += len(places[listed])
        listed += 1
    return {
        "samples": [consumed, consumed + size],
        "places": [{"sample": consumed + at, "pieces": each} for at, each in enumerate(places[:listed])],
        "places_left_out": len(places) - listed,
    }


def end_message(step: int, check: FiniteCheck, last_good: str | None) -> str:
    """A message with the reason why the run ended, its last checkpoint, and the remedy.

    Args:
        step: number of completed steps.
        check: check that ended the run, or refused its last checkpoint.
        last_good: name of the last checkpoint of this run; None without one.
    """
    cause = "the model was"
    if check.skipped:
        cause = "the step was" if check.skipped == 1 else f"{check.skipped} steps in a row were"
    resume = f"the last good checkpoint is {last_good}" if last_good else "no checkpoint was saved"
    return (
        f"training ended after step {step}: {cause} not finite; {resume}. events.jsonl lists the batches."
        " Lower --lr, set --clip-grad, or raise --max-skipped-iterations"
    )
