"""Steps whose loss or gradients are not finite: what is reported of them, and when a run ends because of them.

An update is left out where the loss or the global gradient norm is not finite, so the weights stay those of the last
update. That update may have been the one that broke the model: only a step that is finite again shows that it was not.
Until then no checkpoint is saved. A checkpoint that is due right after an update is saved only where weights and
moments are finite, and where weights of unusual size still give a finite loss of the batch of that update.

With a dynamic loss scale an overflow of the scaled gradients is how the scale is found, 32 times in a row or more from
the initial 2^32 on. While the loss is finite and the scale can still fall, such a step is neither reported nor counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import TrainingConfig
from ..data.batch import Batch
from .engine import Engine, StepResult

# Of a batch, so that a line of events.jsonl stays below a megabyte.
PLACES_LIMIT = 4096


@dataclass
class FiniteCheck:
    """Follows the steps of a run; the same at every process, as the results of steps are.

    Attributes:
        limit: skipped steps in a row after which the run ends; None checks nothing.
        skipped: steps in a row that were not finite, up to the last one.
        is_refused: whether the last checkpoint was not saved because the model is not finite.
    """

    limit: int | None
    skipped: int = 0
    is_refused: bool = False

    @classmethod
    def of(cls, training: TrainingConfig) -> FiniteCheck:
        """The check that the options ask for."""
        return cls(limit=training.max_skipped_iterations if training.check_for_nan_in_loss_and_grad else None)

    def after_step(self, step: int, result: StepResult) -> str | None:
        """Take the result of a step; a sentence about it where it was not finite, None where it was."""
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
        """Whether the run is to end."""
        return self.limit is not None and self.skipped >= self.limit

    def refusal(self, engine: Engine, step: int, batch: Batch) -> str | None:
        """Why no checkpoint may be saved after ``step``; None where it may. Every process calls this.

        Args:
            batch: of the step.
        """
        why = None
        if self.limit is not None:
            if self.skipped:
                what = "the last step was" if self.skipped == 1 else f"the last {self.skipped} steps were"
                why = f"no checkpoint of step {step}: {what} not finite"
            elif not engine.has_finite_state():
                why = f"no checkpoint of step {step}: weights or moments are not finite"
            elif not engine.has_finite_loss(batch):
                why = f"no checkpoint of step {step}: the loss is not finite after its update"
        self.is_refused = why is not None
        return why


def number_text(value: float) -> str:
    """``nan``, ``inf`` or a number with four digits."""
    return f"{value:.4g}"


def batch_detail(consumed: int, size: int, places: list[list[dict[str, Any]]]) -> Mapping[str, Any]:
    """What an event says of a batch, so that it can be read again.

    Args:
        consumed: samples before the batch.
        size: samples of the batch.
        places: for each sample where its tokens lie.
    """
    kept, pieces = 0, 0
    while kept < len(places) and pieces + len(places[kept]) <= PLACES_LIMIT:
        pieces += len(places[kept])
        kept += 1
    return {
        "samples": [consumed, consumed + size],
        "places": [{"sample": consumed + at, "pieces": each} for at, each in enumerate(places[:kept])],
        "places_left_out": len(places) - kept,
    }


def end_message(step: int, check: FiniteCheck, last_good: str | None) -> str:
    """Why a run has ended, and what to do."""
    why = "the model was"
    if check.skipped:
        why = "the step was" if check.skipped == 1 else f"{check.skipped} steps in a row were"
    resume = f"the last good checkpoint is {last_good}" if last_good else "no checkpoint was saved"
    return (
        f"training ended after step {step}: {why} not finite; {resume}. events.jsonl lists the batches."
        " Lower --lr, set --clip-grad, or raise --max-skipped-iterations"
    )
