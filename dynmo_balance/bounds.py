"""What no schedule and no partition can beat: lower bounds of the step time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .costs import SPEED_UNIT
from .problem import Problem


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Three bounds of the step in ns; the largest holds.

    Attributes:
        work_ns: all microbatches' work over all workers' speed.
        unit_ns: the first microbatch must get to a unit, and then one worker does that unit for all of them.
        path_ns: one microbatch goes forward through everything and its input gradients come back.
    """

    work_ns: int
    unit_ns: int
    path_ns: int

    @property
    def step_ns(self) -> int:
        """The largest of them."""
        return max(self.work_ns, self.unit_ns, self.path_ns)


def bounds_of(problem: Problem) -> Bounds:
    """The bounds of a problem, whatever its schedule; communication and memory are left out."""
    chain, microbatches = problem.chain, problem.microbatches
    fastest = max(place.speed_ppm for place in problem.places)
    speed = sum(place.speed_ppm for place in problem.places)

    def at_least(work: int, rate: int) -> int:
        return -(-work * SPEED_UNIT // rate)

    work = chain.at_cuts(chain.work_ns)
    forward = chain.at_cuts(chain.costs.forward_ns)
    back = sum(chain.costs.backward_input_ns[chain.frozen_items :])
    units = max(
        before + microbatches * (after - begin)
        for before, (begin, after) in zip(forward[:-1], pairwise(work), strict=True)
    )
    return Bounds(
        work_ns=at_least(microbatches * work[-1], speed),
        unit_ns=at_least(units, fastest),
        path_ns=at_least(forward[-1] + back, fastest),
    )
