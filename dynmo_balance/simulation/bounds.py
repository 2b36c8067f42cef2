"""Lower bounds of the step time, for any schedule and any partition.

They show how much a search could still gain: ``partition --schedule auto`` and ``recipe --search`` report the step
over the largest bound. Each bound leaves out a reason to wait, so none is tight in general.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..costs.cost_window import SPEED_UNIT
from ..partition.problem import PartitionProblem


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Three lower bounds of the step in ns; the largest is the bound.

    Attributes:
        work_ns: the work of all microbatches over the speed of all workers.
        unit_ns: the first microbatch has to reach a unit, then one worker executes that unit for all microbatches.
            After its last input gradient, the units before it still have to compute theirs.
        path_ns: one microbatch passes forward through all units, and its input gradients pass back.
    """

    work_ns: int
    unit_ns: int
    path_ns: int

    @property
    def step_ns(self) -> int:
        """The largest of the three."""
        return max(self.work_ns, self.unit_ns, self.path_ns)


def bounds_of(problem: PartitionProblem) -> Bounds:
    """The bounds of a problem, for any schedule; communication and memory are ignored, because both only add time."""
    chain, microbatches = problem.chain, problem.microbatches
    fastest = max(slot.speed_ppm for slot in problem.slots)
    speed = sum(slot.speed_ppm for slot in problem.slots)

    def at_least(work: int, rate: int) -> int:
        """The time in ns of ``work`` ns at ``rate`` parts per million of the normal speed, rounded up.

        Rounding up keeps the bound valid and makes it tighter, because steps are whole nanoseconds.
        """
        return -(-work * SPEED_UNIT // rate)

    work = chain.prefix_at_cuts(chain.work_ns)
    forward = chain.prefix_at_cuts(chain.costs.forward_ns)
    # The frozen front passes no gradient back, so no later unit has to wait for one there.
    inputs = [0] * chain.frozen_items + list(chain.costs.backward_input_ns[chain.frozen_items :])
    back = chain.prefix_at_cuts(inputs)
    weights = chain.prefix_at_cuts(chain.costs.backward_weight_ns)
    # The weight gradients of the unit can fill the wait for the input gradients before it; only the rest adds time.
    units = max(
        forward[at]
        + microbatches * (work[at + 1] - work[at])
        + max(0, back[at] - microbatches * (weights[at + 1] - weights[at]))
        for at in range(len(work) - 1)
    )
    shards = chain.vocabulary
    passes = 0 if shards is None else shards.forward_ns + shards.weight_ns
    return Bounds(
        work_ns=at_least(microbatches * (work[-1] + passes), speed),
        # A partition may put any unit on any worker, so only the fastest speed is certain.
        unit_ns=at_least(units, fastest),
        path_ns=at_least(forward[-1] + back[-1], fastest),
    )
