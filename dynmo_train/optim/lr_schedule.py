"""Learning rate and weight decay over the samples of a run, as Megatron's ``OptimizerParamScheduler`` has them.

Megatron counts progress in samples, also where the options count iterations: it multiplies those with the global batch
size. Its scheduler starts at 0 and advances after an update, so the first update of a run uses the values at 0: with a
warm-up the learning rate ``--lr-warmup-init``. The expressions keep Megatron's order of operations, so that the values
are the same floats; ``tests/unit/dynmo_train/optim/test_lr_schedule.py`` compares them with a table that Megatron's
class produced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up from ``initial`` to ``peak``, then decay to ``floor`` at ``decay_steps``, warm-up included.

    A step is whatever the caller counts; a run counts samples.

    Attributes:
        style: ``linear``, ``cosine``, ``constant``, ``inverse-square-root`` or ``WSD`` (constant, then a last decay).
        warmup_steps: may be a fraction of a step, as Megatron does not round ``--lr-warmup-fraction``.
        wsd_style: of ``WSD``: ``exponential``, ``linear``, ``cosine`` or ``minus_sqrt``.
        wsd_steps: of ``WSD``: steps of the last decay, which ends at ``decay_steps``.
    """

    peak: float
    floor: float
    style: str
    warmup_steps: float
    decay_steps: int
    initial: float = 0.0
    wsd_style: str = "exponential"
    wsd_steps: int = 1

    def at(self, step: int) -> float:
        """The rate of the update that follows ``step`` steps; the first update's is that at 0.

        Worked: peak 1, floor 0, linear, 10 warm-up of 110 steps: 0 at step 0, 0.5 at 5, 1.0 at 10, 0.5 at 60, 0 from
        110 on.
        """
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.initial + (self.peak - self.initial) * float(step) / float(self.warmup_steps)
        if self.style == "constant":
            return self.peak
        if step > self.decay_steps:
            return self.floor
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.pow(max(self.warmup_steps, 1), 0.5) / math.pow(max(step, 1), 0.5))
        return self.floor + self._left(step) * (self.peak - self.floor)

    def _left(self, step: int) -> float:
        """What is left of the way from ``peak`` to ``floor``, between 1 and 0."""
        if self.style == "WSD":
            annealed = step - (self.decay_steps - self.wsd_steps)
            return 1.0 if annealed <= 0 else _decayed(self.wsd_style, annealed / self.wsd_steps)
        # A warm-up as long as the decay leaves a ratio of 0 by 0, which Megatron refuses.
        return _decayed(self.style, (step - self.warmup_steps) / ((self.decay_steps - self.warmup_steps) or 1))


def _decayed(style: str, ratio: float) -> float:
    """The part that is left after ``ratio`` of a decay."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    return 1.0 - math.sqrt(ratio)


@dataclass(frozen=True, kw_only=True)
class WeightDecay:
    """Weight decay that grows from ``start`` to ``end`` over ``steps``.

    ``style`` is ``constant`` (``end`` throughout), ``linear`` or ``cosine``.
    """

    start: float
    end: float
    style: str
    steps: int

    def at(self, step: int) -> float:
        """The weight decay of the update that follows ``step`` steps.

        Worked: linear from 0.01 to 0.11 over 100 steps: 0.01 at 0, 0.06 at 50, 0.11 from 100 on.
        """
        if self.style == "constant" or step > self.steps:
            return self.end
        ratio = float(step) / float(self.steps)
        part = ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start + part * (self.end - self.start)
