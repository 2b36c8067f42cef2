"""Short view or long view: which past predicts the next steps' costs better, measured out of sample.

The mean of the last few records follows a change of costs at once. Where costs oscillate faster than that, it is always
one phase late: a policy that follows it moves layers in every phase, and loses by each move. So two views of the past,
the window and all records that are kept, each follow a partition of their own; the steps that come measure both, pauses
included; and the view that did better is followed::

    decision k      short view follows S, long view follows L
    steps k..k+1    modelled step time under S, and under L, on the costs of these steps
    decision k+1    scores = 0.98 x scores + these times; a view is left for a clearly lower score
                    a view goes to another partition where its own past promises the least gain, and pays a pause
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..partition.problem import PartitionProblem
from .regret import Works, WorkTrace, step_times

DECAY = 0.98
"""The share of the earlier scores that is left at each decision."""
FEWEST = 3
"""Decisions that must be measured before the long view can be followed."""
LONG_THRESHOLD, SHORT_THRESHOLD = 0.99, 0.97
"""A view is left for one whose score is below this share of its own: within a phase either is ahead by turns."""

Boundaries = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WindowScore:
    """One view of the past.

    Attributes:
        follows: the partition that it would have now; empty before its first decision.
        due_ns: the pause of its last change, not in its score yet.
        score: the decayed sum, over decisions, of the mean steps in ns that its partitions took.
    """

    follows: Boundaries = ()
    due_ns: float = 0.0
    score: float = 0.0

    def measured(self, problem: PartitionProblem, fresh: Works) -> WindowScore:
        """The view with its partition measured on new records, ``[records, items]``."""
        mean = float(step_times(problem, fresh, self.follows).mean())
        return replace(self, score=DECAY * self.score + mean + self.due_ns / len(fresh), due_ns=0.0)

    def decided(
        self, problem: PartitionProblem, past: Works, proposed: Boundaries, *, min_gain: float, pause_ns: float
    ) -> WindowScore:
        """The view after it has weighed a partition by its own past."""
        if not self.follows:
            return replace(self, follows=proposed)
        now, then = (float(step_times(problem, past, each).mean()) for each in (self.follows, proposed))
        return self if then > (1 - min_gain) * now else replace(self, follows=proposed, due_ns=pause_ns)


@dataclass(frozen=True, kw_only=True)
class WindowSelection:
    """What a decision leaves for the next.

    Attributes:
        generation, records: of the trace, up to which the views are measured.
        short, long: the views.
        decisions: that have been measured.
        uses_long: whether the long view is followed.
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
        """The views after a decision.

        Args:
            problem: on the active workers.
            trace: the records, and ``works`` as it gives them.
            works: ``[records, items]``, the newest last.
            proposed: the partitions that the short and the long past ask for.
            window: records of the short past.
            min_gain: the least gain for which a view changes its partition.
            pause_ns: what a change costs.
        """
        if self.generation != trace.generation:
            fresh_start = WindowSelection(generation=trace.generation)
            return fresh_start.after(
                problem, trace, works, proposed, window=window, min_gain=min_gain, pause_ns=pause_ns
            )
        fresh = min(trace.records - self.records, len(works))
        short, long, decisions = self.short, self.long, self.decisions
        if fresh > 0 and short.follows and long.follows:
            short, long = (view.measured(problem, works[-fresh:]) for view in (short, long))
            decisions += 1
        pasts = (works[-window:], works)
        short, long = (
            view.decided(problem, past, boundaries, min_gain=min_gain, pause_ns=pause_ns)
            for view, past, boundaries in zip((short, long), pasts, proposed, strict=True)
        )
        limit = SHORT_THRESHOLD if self.uses_long else LONG_THRESHOLD
        followed, other = (long, short) if self.uses_long else (short, long)
        is_left = decisions >= FEWEST and other.score < limit * followed.score
        return replace(
            self,
            records=trace.records,
            short=short,
            long=long,
            decisions=decisions,
            uses_long=self.uses_long != is_left,
        )
