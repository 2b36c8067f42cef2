"""What the moves so far cost against never moving, and the budget that they must not exceed.

A policy that follows costs is always late by its window. Costs that swing with about that period make each move wrong
as soon as it is made, and no rule on past gains alone prevents it. So the planner keeps an account: on the costs of
every step, the modelled time of the partitions that were active, pauses included, less that of the first partition::

    loss(t)   = sum of step(active) + pauses - sum of step(first)      up to step t, on the measured costs
    budget(t) = 4 pauses + 4 steps + 3 % of sum of step(first)

    move      only if the loss, the pause and the pause of a return fit the budget
    return    to the first partition once the loss and the pause of the return do not

The argument is that of ski rental: later moves may lose what earlier ones gained, and what is lost beyond it is
bounded. At a decision the loss is within the budget less one pause, or the planner returns. **Bound**: a run takes at
most 1.03 times the time of never moving, plus 5 pauses, 4 steps and what the active partition loses between two
decisions.
Costs that do not depend on the partition in another way than modelled are assumed; ``rollback`` judges the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..partition.problem import PartitionProblem
from .regret import Works, WorkTrace, step_times

MAX_LOSS_SHARE = 0.03
"""Share of the time of never moving that moves may lose."""
MAX_LOSS_PAUSES = 4
MAX_LOSS_STEPS = 4
"""Pauses, and steps under the first partition, that moves may lose in addition: the first moves need no earlier gains,
and a change of costs need not be undone before the policy sees it."""

Boundaries = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The account of a run between decisions.

    Attributes:
        workers: ids of the workers of the first partition; another set of workers begins another account.
        first: boundaries of the first partition.
        active: boundaries that were active at the last decision.
        generation, records: of the trace, up to which the account counts.
        num_steps: number of steps.
        first_ns: time of all steps under the first partition.
        loss_ns: time of the active partitions and pauses, less that.
    """

    workers: tuple[int, ...] = ()
    first: Boundaries = ()
    active: Boundaries = ()
    generation: int = 0
    records: int = 0
    num_steps: int = 0
    first_ns: float = 0.0
    loss_ns: float = 0.0

    def after(
        self, problem: PartitionProblem, active: Boundaries, trace: WorkTrace, works: Works, pause_ns: float
    ) -> Baseline:
        """The account with the steps since the last decision.

        Args:
            problem: on the active workers.
            active: boundaries of the active partition.
            trace: the records.
            works: ``trace.works``, ``[records, items]`` in ns, newest last.
            pause_ns: cost of a move.
        """
        workers = tuple(slot.worker for slot in problem.slots)
        if workers != self.workers or len(active) != len(self.first):
            return Baseline(
                workers=workers, first=active, active=active, generation=trace.generation, records=trace.records
            )
        counted = self.records if trace.generation == self.generation else 0
        fresh = works[len(works) - min(trace.records - counted, len(works)) :]
        first_ns, active_ns = (float(step_times(problem, fresh, each).sum()) for each in (self.first, active))
        return replace(
            self,
            active=active,
            generation=trace.generation,
            records=trace.records,
            num_steps=self.num_steps + len(fresh),
            first_ns=self.first_ns + first_ns,
            loss_ns=self.loss_ns + active_ns - first_ns + pause_ns * (active != self.active),
        )

    def budget_ns(self, pause_ns: float) -> float:
        """The loss in ns that is permitted, where a move costs ``pause_ns``."""
        step_ns = self.first_ns / max(1, self.num_steps)
        return MAX_LOSS_SHARE * self.first_ns + MAX_LOSS_PAUSES * pause_ns + MAX_LOSS_STEPS * step_ns

    def must_return(self, pause_ns: float) -> bool:
        """Whether the planner returns to the first partition; ``pause_ns`` is the cost of a move."""
        return self.active != self.first and self.loss_ns + pause_ns > self.budget_ns(pause_ns)

    def why_stay(self, boundaries: Boundaries, pause_ns: float) -> str | None:
        """Why the planner does not move to ``boundaries`` for a pause of ``pause_ns``; None if it may."""
        pauses = 1 if boundaries == self.first else 2
        if self.loss_ns + pauses * pause_ns <= self.budget_ns(pause_ns):
            return None
        return f"{self._text(pause_ns)}: the planner stays until the budget has grown"

    def return_reason(self, pause_ns: float) -> str:
        """Why the planner returns to the first partition; a move costs ``pause_ns``."""
        return f"{self._text(pause_ns)}: the planner returns to the first partition"

    def _text(self, pause_ns: float) -> str:
        return (
            f"the moves so far cost {self.loss_ns / 1e6:.0f} ms against never moving, and"
            f" {self.budget_ns(pause_ns) / 1e6:.0f} ms are permitted"
        )
