"""Learning-rate and weight-decay schedules, as in Megatron's ``OptimizerParamScheduler``.

Megatron counts progress in samples, also where the options count iterations: it multiplies those with the global batch
size. Its scheduler starts at 0 and advances after an update, so the first update of a run uses the values at 0: with a
warm-up the learning rate ``--lr-warmup-init``. The expressions keep Megatron's order of operations, so that the values
are the same floats; ``tests/unit/dynmo_train/optim/test_lr_schedule.py`` compares them with a table that Megatron's
class produced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def rate_at(schedule: LearningRate | None, step: int) -> float | None:
    """Return the learning rate of the update after ``step`` steps; None without a schedule."""
    return None if schedule is None else schedule.at(step)


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up from ``initial`` to ``peak``, then decay to ``floor`` at ``decay_steps``, warm-up included.

    The caller decides what a step is; a run counts samples.

    Attributes:
        peak: Highest learning rate.
        floor: Learning rate after the decay.
        style: ``linear``, ``cosine``, ``constant``, ``inverse-square-root`` or ``WSD`` (constant, then a final decay).
        warmup_steps: Steps of the warm-up; not an integer where ``--lr-warmup-fraction`` gives none, as in Megatron.
        decay_steps: Step at which the decay ends.
        initial: Learning rate at step 0 of the warm-up.
        wsd_style: With ``WSD``: ``exponential``, ``linear``, ``cosine`` or ``minus_sqrt``.
        wsd_steps: With ``WSD``: steps of the final decay, which ends at ``decay_steps``.
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
        """Return the learning rate of the update after ``step`` steps; the first update uses step 0.

        Example: peak 1, floor 0, linear, 10 warm-up steps of 110: 0 at step 0, 0.5 at 5, 1.0 at 10, 0.5 at 60, 0 from
        110.
        """
        # ``<=``, then ``>`` below, as in Megatron: at the borders the peak and the end of the decay.
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.initial + (self.peak - self.initial) * float(step) / float(self.warmup_steps)
        if self.style == "constant":
            return self.peak
        if step > self.decay_steps:
            return self.floor
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.pow(max(self.warmup_steps, 1), 0.5) / math.pow(max(step, 1), 0.5))
        return self.floor + self._coefficient(step) * (self.peak - self.floor)

    def _coefficient(self, step: int) -> float:
        """Return the position between ``floor`` (0) and ``peak`` (1)."""
        if self.style == "WSD":
            annealed = step - (self.decay_steps - self.wsd_steps)
            return 1.0 if annealed <= 0 else _decayed(self.wsd_style, annealed / self.wsd_steps)
        # A warm-up as long as the decay gives 0 / 0, which Megatron refuses.
        return _decayed(self.style, (step - self.warmup_steps) / ((self.decay_steps - self.warmup_steps) or 1))


def _decayed(style: str, ratio: float) -> float:
    """Return the decay coefficient, from 1 to 0, after ``ratio`` of a decay."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    return 1.0 - math.sqrt(ratio)


@dataclass(frozen=True, kw_only=True)
class WeightDecay:
    """Weight decay that grows from ``start`` to ``end``.

    Attributes:
        start: Weight decay at step 0.
        end: Weight decay from ``steps`` on.
        style: ``constant`` (always ``end``), ``linear`` or ``cosine``.
        steps: Steps of the growth.
    """

    start: float
    end: float
    style: str
    steps: int

    def at(self, step: int) -> float:
        """Return the weight decay of the update after ``step`` steps.

        Example: linear from 0.01 to 0.11 over 100 steps: 0.01 at 0, 0.06 at 50, 0.11 from 100.
        """
        if self.style == "constant" or step > self.steps:
            return self.end
        ratio = float(step) / float(self.steps)
        part = ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start + part * (self.end - self.start)
