"""Batch sizes and sequence-length curriculum as pure functions of the training progress."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from .._common.document import is_count, short_repr
from .._common.errors import UsageError

MAX_BATCH_STEPS, MAX_NUMBER = 65_536, 10**18
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# As Python's ``float`` reads them, without signs, names and underscores.
_NUMBER = re.compile(r"((?:[0-9]{1,32}(?:\.[0-9]{0,32})?|\.[0-9]{1,32})(?:E\+?[0-9]{1,2})?)([KMBT]?)", re.IGNORECASE)


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

    @property
    def is_constant(self) -> bool:
        """Whether all steps have the same size."""
        return not self.increment

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
class SteppedBatchSizes:
    """The global batch size as a step function of the consumed samples (Megatron's ``--step-batch-size-schedule``).

    Attributes:
        entries: pairs of the consumed samples from which a batch size applies, and that size in samples; the first pair
            is from 0, and each further one from more samples.
    """

    entries: tuple[tuple[int, int], ...]

    @property
    def start(self) -> int:
        """Batch size of the first step, in samples."""
        return self.entries[0][1]

    @property
    def final(self) -> int:
        """The last batch size, in samples."""
        return self.entries[-1][1]

    @property
    def is_constant(self) -> bool:
        """Whether all steps have the same size."""
        return len(self.sizes()) == 1

    def at(self, consumed: int) -> int:
        """The batch size of the step after ``consumed`` samples.

        Example: 16 from sample 0 and 320 from 1,171,875: 16 at 1,171,874, 320 at 1,171,875.
        """
        return self.entries[bisect_right(self.entries, consumed, key=lambda entry: entry[0]) - 1][1]

    def sizes(self) -> list[int]:
        """All batch sizes of a run, ascending."""
        return sorted({size for _, size in self.entries})

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """The number of consumed samples after ``steps`` more steps."""
        for end, size in self._parts():
            # A step begins before the end of its part, and may end after it.
            count = min(steps, max(0, -(-(end - consumed) // size)))
            consumed, steps = consumed + count * size, steps - count
        return consumed + steps * self.final

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """The number of steps from ``consumed`` until at least ``samples`` samples are consumed.

        As in Megatron's ``update_train_iters``, the last step may consume more: it is not left out as with a ramp-up.
        """
        total = 0
        for end, size in self._parts():
            count = max(0, -(-(min(end, samples) - consumed) // size))
            consumed, total = consumed + count * size, total + count
        return total + max(0, -(-(samples - consumed) // self.final))

    def _parts(self) -> list[tuple[int, int]]:
        """The end and the size of every entry but the last."""
        return [(following[0], entry[1]) for entry, following in pairwise(self.entries)]


AnyBatchSizes = BatchSizes | SteppedBatchSizes


def _number(text: str) -> int | None:
    """A number such as ``2.4B``, rounded down in Megatron's order of operations; None for another text."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    value = float(found[1]) * SUFFIXES[found[2].upper()]
    return int(value) if value <= MAX_NUMBER else None


def parse_batch_size_schedule(text: str, seq_length: int) -> SteppedBatchSizes:
    """Parse ``0:16 2.4B:320``: the consumed tokens from which a batch size in samples applies.

    The format, the order and the rounding are those of Megatron's ``StepBatchsizeNumMicroBatchesCalculator``: a number
    may have the suffix K, M, B or T (10^3 to 10^12), pairs are separated by spaces or commas and sorted, and tokens are
    divided by the sequence length, rounded down.

    Args:
        text: value of ``--step-batch-size-schedule``.
        seq_length: sequence length in tokens.

    Raises:
        UsageError: the text is not of this form, no pair is at 0, or two are at the same sample.
    """
    flag = f"--step-batch-size-schedule {short_repr(text)}"
    entries = []
    for part in text.replace(",", " ").split():
        threshold, colon, size = part.partition(":")
        tokens, samples = _number(threshold), _number(size)
        if not colon or tokens is None or not samples:
            raise UsageError(
                f"{flag}: {short_repr(part)} must be TOKENS:SIZE with a size of 1 or more, such as 2.4B:320; the"
                f" maximum of both is {MAX_NUMBER:,}"
            )
        entries.append((tokens // seq_length, samples))
    entries.sort(key=lambda entry: entry[0])
    if not entries or entries[0][0] or len(entries) > MAX_BATCH_STEPS:
        raise UsageError(
            f"{flag}: must have 1 to {MAX_BATCH_STEPS:,} TOKENS:SIZE pairs, the first at 0, such as 0:16 2.4B:320"
        )
    for before, after in pairwise(entries):
        if before[0] == after[0]:
            raise UsageError(
                f"{flag}: sizes {before[1]} and {after[1]} are both at sample {after[0]:,}, for sequences of"
                f" {seq_length:,} tokens; remove one, or give it another number of tokens"
            )
    return SteppedBatchSizes(entries=tuple(entries))


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

    sizes: AnyBatchSizes
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
            # One by one only while the batch size changes, and next to a range.
            count = 1 if not self.sizes.is_constant else max(1, min(steps, (ahead - consumed) // self.sizes.final))
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
