"""What no schedule and no partition can beat: lower bounds of the step time."""

from __future__ import annotations

from dataclasses import dataclass

from ..costs.cost_window import SPEED_UNIT
from ..partition.problem import PartitionProblem


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Three bounds of the step in ns; the largest holds.

    Attributes:
        work_ns: all microbatches' work over all workers' speed.
        unit_ns: the first microbatch must get to a unit, then one worker does that unit for all of them; after its
            last input gradient the units before it still have theirs to do.
        path_ns: one microbatch goes forward through everything and its input gradients come back.
    """

    work_ns: int
    unit_ns: int
    path_ns: int

    @property
    def step_ns(self) -> int:
        """The largest of them."""
        return max(self.work_ns, self.unit_ns, self.path_ns)


def bounds_of(problem: PartitionProblem) -> Bounds:
    """The bounds of a problem, whatever its schedule; communication and memory are left out."""
    chain, microbatches = problem.chain, problem.microbatches
    fastest = max(slot.speed_ppm for slot in problem.slots)
    speed = sum(slot.speed_ppm for slot in problem.slots)

    def at_least(work: int, rate: int) -> int:
        return -(-work * SPEED_UNIT // rate)

    work = chain.prefix_at_cuts(chain.work_ns)
    forward = chain.prefix_at_cuts(chain.costs.forward_ns)
    inputs = [0] * chain.frozen_items + list(chain.costs.backward_input_ns[chain.frozen_items :])
    back = chain.prefix_at_cuts(inputs)
    weights = chain.prefix_at_cuts(chain.costs.backward_weight_ns)
    units = max(
        forward[at]
        + microbatches * (work[at + 1] - work[at])
        + max(0, back[at] - microbatches * (weights[at + 1] - weights[at]))
        for at in range(len(work) - 1)
    )
    return Bounds(
        work_ns=at_least(microbatches * work[-1], speed),
        unit_ns=at_least(units, fastest),
        path_ns=at_least(forward[-1] + back[-1], fastest),
    )
