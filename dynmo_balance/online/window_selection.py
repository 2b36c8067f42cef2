"""Short or long window: which past predicts the next steps' costs better, measured out of sample.

The mean over the last few records follows a cost change quickly. If costs oscillate faster than that, it is always one
phase late: a policy that follows it moves layers in every phase, and loses by each move. So two windows, the short one
and all records of the trace, each follow a partition of their own. The next steps measure both, pauses included, and
the better one is used::

    decision k      short window follows S, long window follows L
    steps k..k+1    modelled step time under S, and under L, on the costs of these steps
    decision k+1    scores = 0.98 x scores + these times; the other window is used if its score is clearly lower
                    a window changes its partition if its own past predicts the minimum gain, and a pause is added
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..partition.problem import PartitionProblem
from .regret import Works, WorkTrace, step_times

DECAY = 0.98
"""Factor on the earlier scores at each decision."""
MIN_DECISIONS = 3
"""Minimum number of measured decisions before the long window can be used."""
LONG_THRESHOLD, SHORT_THRESHOLD = 0.99, 0.97
"""The other window is used if its score is below this share; within a phase the two alternate."""

Boundaries = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WindowScore:
    """One window and the partition that it follows.

    Attributes:
        follows: boundaries of the partition; empty before the first decision.
        due_ns: the pause of its last change, if not in the score yet.
        score: the decayed sum over decisions of the mean step in ns under its partitions.
    """

    follows: Boundaries = ()
    due_ns: float = 0.0
    score: float = 0.0

    def measured(self, problem: PartitionProblem, fresh: Works) -> WindowScore:
        """The window with its partition measured on ``fresh``, work in ns of the new records ``[records, items]``."""
        mean = float(step_times(problem, fresh, self.follows).mean())
        return replace(self, score=DECAY * self.score + mean + self.due_ns / len(fresh), due_ns=0.0)

    def decided(
        self, problem: PartitionProblem, past: Works, proposed: Boundaries, *, min_gain: float, pause_ns: float
    ) -> WindowScore:
        """The window after it has compared a proposed partition with its own, on its own past.

        Args:
            problem: on the active workers.
            past: work in ns, ``[records, items]``.
            proposed: boundaries of the other partition.
            min_gain: minimum gain of a change, as a share of the step time.
            pause_ns: cost of a change.
        """
        if not self.follows:
            return replace(self, follows=proposed)
        # The same rule as the policy ``threshold``, so each window shows what following it would have cost.
        now, then = (float(step_times(problem, past, each).mean()) for each in (self.follows, proposed))
        return self if then > (1 - min_gain) * now else replace(self, follows=proposed, due_ns=pause_ns)


@dataclass(frozen=True, kw_only=True)
class WindowSelection:
    """The state of both windows between decisions.

    Attributes:
        generation, records: of the trace, up to which the windows are measured.
        short, long: the windows.
        decisions: number of decisions that have been measured.
        uses_long: whether the long window is used.
    """

    generation: int = 0
    records: int = 0
    short: WindowScore = WindowScore()
    long: WindowScore = WindowScore()
    decisions: int = 0
    uses_long: bool = False

    def after(
        self,
        problem: PartitionProblem,
        trace: WorkTrace,
        works: Works,
        proposed: Sequence[Boundaries],
        *,
        window: int,
        min_gain: float,
        pause_ns: float,
    ) -> WindowSelection:
        """The state after a decision.

        Args:
            problem: on the active workers.
            trace: the records.
            works: ``trace.works``, ``[records, items]`` in ns, newest last.
            proposed: the partitions that the short and the long past propose.
            window: number of records of the short past.
            min_gain: minimum gain for which a window changes its partition.
            pause_ns: cost of a change.
        """
        if self.generation != trace.generation:
            fresh_start = WindowSelection(generation=trace.generation)
            return fresh_start.after(
                problem, trace, works, proposed, window=window, min_gain=min_gain, pause_ns=pause_ns
            )
        # More records may be new than the trace has room for.
        fresh = min(trace.records - self.records, len(works))
        short, long, decisions = self.short, self.long, self.decisions
        if fresh > 0 and short.follows and long.follows:
            short, long = (one.measured(problem, works[-fresh:]) for one in (short, long))
            decisions += 1
        pasts = (works[-window:], works)
        short, long = (
            one.decided(problem, past, boundaries, min_gain=min_gain, pause_ns=pause_ns)
            for one, past, boundaries in zip((short, long), pasts, proposed, strict=True)
        )
        # Returning to the short window needs a larger difference than leaving it: no switching back and forth.
        limit = SHORT_THRESHOLD if self.uses_long else LONG_THRESHOLD
        followed, other = (long, short) if self.uses_long else (short, long)
        is_switched = decisions >= MIN_DECISIONS and other.score < limit * followed.score
        return replace(
            self,
            records=trace.records,
            short=short,
            long=long,
            decisions=decisions,
            uses_long=self.uses_long != is_switched,
        )
