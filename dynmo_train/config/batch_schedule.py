"""How a run's batches grow: the samples of a step and the tokens of a sample as pure functions of the progress."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The global batch size over the consumed samples (Megatron's ``--rampup-batch-size``).

    Attributes:
        start: size of the first step.
        increment: by how much it grows at a time; 0 keeps ``final`` throughout.
        ramp_samples: samples over which it grows from ``start`` to ``final``, in equal parts.
        final: size from then on.
    """

    start: int
    increment: int
    ramp_samples: int
    final: int

    @classmethod
    def constant(cls, size: int) -> BatchSizes:
        """The same size throughout."""
        return cls(start=size, increment=0, ramp_samples=0, final=size)

    def at(self, consumed: int) -> int:
        """The size of the step after ``consumed`` samples.

        Worked: 16 by 16 to 1536 over 5,859,375: 95 parts of 61,677.6 samples; 16 at 0, 32 at 61,678, 1536 after all.
        """
        if not self.increment or consumed > self.ramp_samples:
            return self.final
        parts = (self.final - self.start) // self.increment
        part = int(consumed / (self.ramp_samples / parts)) if self.ramp_samples and parts else parts
        return min(self.final, self.start + part * self.increment)

    def sizes(self) -> list[int]:
        """Every size that a run may have, ascending."""
        return [*range(self.start, self.final, self.increment), self.final] if self.increment else [self.final]

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """The samples that are consumed after ``steps`` more steps."""
        done = 0
        while done < steps and self.increment and consumed <= self.ramp_samples:
            consumed, done = consumed + self.at(consumed), done + 1
        return consumed + (steps - done) * self.final

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """The whole steps up to ``samples`` consumed samples, of which ``consumed`` are already."""
        steps = 0
        while self.increment and consumed <= self.ramp_samples and consumed + self.at(consumed) <= samples:
            consumed, steps = consumed + self.at(consumed), steps + 1
        return steps + max(0, samples - consumed) // self.final


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Samples that are short at first (Li et al., arXiv 2108.06084), by DeepSpeed's rule.

    Attributes:
        shortest, longest: tokens of a sample at the first step and in the end.
        steps: over which it grows.
        multiple: lengths are rounded down to a multiple of this.
        root: 1 is linear, 2 grows with the square root of the steps.
    """

    shortest: int
    longest: int
    steps: int
    multiple: int
    root: float

    def at(self, step: int) -> int:
        """Tokens of a sample at the step, counted from 1.

        Worked: 64 to 1024 in 100 linear steps by 8: 72 at step 1 (73.6 rounded down), 544 at 50, 1024 from 100 on.
        """
        done = math.pow(min(1.0, step / self.steps), 1.0 / self.root)
        length = math.floor(done * (self.longest - self.shortest) + self.shortest)
        return min(self.longest, max(self.shortest, length - length % self.multiple))
