"""The learning rate as a pure function of the step (Megatron's ``OptimizerParamScheduler``)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to ``peak``, then decay to ``floor`` at step ``decay_steps``, which includes the warm-up.

    A step is whatever the run counts: optimizer steps, or samples.
    """

    peak: float
    floor: float
    style: str
    warmup_steps: int
    decay_steps: int

    def at(self, step: int) -> float:
        """The rate of the optimizer step ``step``, counted from 1.

        Worked: peak 1, floor 0, linear, 10 warm-up of 110 steps: 0.5 at step 5, 1.0 at 10, 0.5 at 60, 0 from 110 on.
        """
        if step <= 0:
            return 0.0 if self.warmup_steps else self.peak
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(1, self.warmup_steps) / step))
        if step > self.decay_steps:
            return self.floor
        done = (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps)
        left = 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.floor + left * (self.peak - self.floor)
