"""Batch-size ramp-up and sequence-length curriculum as pure functions of the training progress."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .._common.document import is_count
from .._common.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The global batch size as a function of the consumed samples (Megatron's ``--rampup-batch-size``).

    Attributes:
        start: batch size of the first step, in samples.
        increment: growth per increment, in samples; 0 keeps ``final`` throughout.
        ramp_samples: samples over which the batch size grows from ``start`` to ``final``, in equal parts.
        final: batch size after the ramp-up, in samples.
    """

    start: int
    increment: int
    ramp_samples: int
    final: int

    @classmethod
    def constant(cls, size: int) -> BatchSizes:
        """A batch size without ramp-up."""
        return cls(start=size, increment=0, ramp_samples=0, final=size)

    def at(self, consumed: int) -> int:
        """The batch size of the step after ``consumed`` samples.

        Example: 16 to 1536 by 16 over 5,859,375 samples has 95 parts of 61,677.6 samples: 16 at sample 0, 32 at
        61,678, 1536 at the end.
        """
        if not self.increment or consumed > self.ramp_samples:
            return self.final
        parts = (self.final - self.start) // self.increment
        part = int(consumed / (self.ramp_samples / parts)) if self.ramp_samples and parts else parts
        return min(self.final, self.start + part * self.increment)

    def sizes(self) -> list[int]:
        """All batch sizes of a run, ascending."""
        return [*range(self.start, self.final, self.increment), self.final] if self.increment else [self.final]

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """The number of consumed samples after ``steps`` more steps."""
        # Step by step only during the ramp-up; afterwards all steps have the same size.
        done = 0
        while done < steps and self.increment and consumed <= self.ramp_samples:
            consumed, done = consumed + self.at(consumed), done + 1
        return consumed + (steps - done) * self.final

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """The number of whole steps from ``consumed`` to ``samples`` consumed samples."""
        steps = 0
        while self.increment and consumed <= self.ramp_samples and consumed + self.at(consumed) <= samples:
            consumed, steps = consumed + self.at(consumed), steps + 1
        return steps + max(0, samples - consumed) // self.final


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Sequence-length curriculum (Li et al., arXiv:2108.06084), by DeepSpeed's rule.

    Attributes:
        shortest: initial sequence length in tokens.
        longest: final sequence length in tokens.
        steps: number of steps of growth.
        multiple: multiple in tokens to which lengths are rounded down.
        root: degree of the root; 1 is linear, 2 grows with the square root of the steps.
    """

    shortest: int
    longest: int
    steps: int
    multiple: int
    root: float

    def at(self, step: int) -> int:
        """The sequence length in tokens at a step, counted from 1.

        Example: 64 to 1024 in 100 linear steps by 8 is 72 at step 1 (73.6 rounded down), 544 at 50, 1024 from 100.
        """
        done = math.pow(min(1.0, step / self.steps), 1.0 / self.root)
        length = math.floor(done * (self.longest - self.shortest) + self.shortest)
        return min(self.longest, max(self.shortest, length - length % self.multiple))


Range = tuple[int, int]
"""First sample and the sample after the last."""


@dataclass(frozen=True, kw_only=True)
class BatchPositions:
    """The first sample of each batch: batches follow one another, but none has a sample of a skipped range.

    A batch that would have one begins at the end of that range instead; samples before the range that do not fill a
    batch are left out, too. Steps are not renumbered: the data shifts, the learning-rate schedule does not.

    Attributes:
        sizes: global batch size as a function of the consumed samples; skipped samples count as consumed.
        skipped: ranges of samples, ascending and disjoint.
    """

    sizes: BatchSizes
    skipped: tuple[Range, ...] = ()

    def begin(self, consumed: int) -> int:
        """The first sample of the batch after ``consumed`` samples.

        Example: batches of 4 with the range (8, 10) begin at 0, 4, 10, 14.
        """
        for begin, end in self.skipped:
            if begin < consumed + self.sizes.at(consumed) and consumed < end:
                consumed = end
        return consumed

    def following(self, consumed: int) -> int:
        """The first sample of the batch after the one that begins at ``consumed``."""
        return self.begin(consumed + self.sizes.at(consumed))

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """The end of the last batch after ``steps`` more steps."""
        while steps:
            consumed = self.begin(consumed)
            ahead = next((begin for begin, _ in self.skipped if begin >= consumed), None)
            if ahead is None:
                return self.sizes.consumed_after(steps, consumed)
            # One by one only while the batch size grows, and next to a range.
            count = 1 if self.sizes.increment else max(1, min(steps, (ahead - consumed) // self.sizes.final))
            consumed, steps = self.sizes.consumed_after(count, consumed), steps - count
        return consumed


def merged_ranges(*groups: Iterable[Range]) -> tuple[Range, ...]:
    """All ranges, ascending; those that overlap or touch are one."""
    merged: list[Range] = []
    for begin, end in sorted(each for group in groups for each in group):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return tuple(merged)


def parse_ranges(flag: str, text: str) -> tuple[Range, ...]:
    """Ranges ``BEGIN:END``, separated by spaces.

    Raises:
        UsageError: the text is not of this form, or a range is empty.
    """
    found = []
    for part in text.split():
        begin, _, end = part.partition(":")
        if not (is_count(begin) and is_count(end) and int(begin) < int(end)):
            raise UsageError(f"{flag} {text!r}: must be BEGIN:END ranges of samples, BEGIN below END, such as 64:96")
        found.append((int(begin), int(end)))
    return merged_ranges(found)
