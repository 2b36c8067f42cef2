"""The constraints of a partitioning problem for the solvers: loads, speeds, memory and pins, as integers per unit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .._common.errors import UsageError
from .problem import InfeasibleError, PartitionProblem, WorkerSlot


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A partitioning problem in the form that the solvers use.

    A partition is a list of cut indices ``0 = c[0] <= c[1] <= ... <= c[stages] = units``.

    Attributes:
        load: prefix sums, at the permitted cuts, of the work in ns.
        static: prefix sums of the bytes of parameters, gradients and optimizer state; empty without memory limits.
        activation: prefix sums of the stored activation bytes of a microbatch; empty without memory limits.
        slots: the worker of each stage.
        in_flight: the maximum number of microbatches in flight on each stage.
        min_units: minimum number of units per stage.
        lowest, highest: ``lowest[p] <= c[p] <= highest[p]`` is what pins and ``min_units`` require of each cut.
        heaviest_unit_ns: the work of the heaviest unit.
        free: whether there are no pins.
    """

    load: Sequence[int]
    static: Sequence[int]
    activation: Sequence[int]
    slots: tuple[WorkerSlot, ...]
    in_flight: tuple[int, ...]
    min_units: int
    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    heaviest_unit_ns: int
    free: bool

    @cached_property
    def equal_speeds(self) -> bool:
        """Whether all workers have the same speed."""
        return all(slot.speed_ppm == self.slots[0].speed_ppm for slot in self.slots)

    @cached_property
    def search_width(self) -> int:
        """The number of cuts ahead in which the end of a stage is searched first: twice the mean stage."""
        return 2 * self.units // self.stages + 8

    @property
    def units(self) -> int:
        """The number of units."""
        return len(self.load) - 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.slots)

    def time_ns(self, stage: int, begin: int, end: int) -> int:
        """The time of the units ``[begin, end)`` on the stage's worker in one microbatch."""
        return self.slots[stage].time_ns(self.load[end] - self.load[begin])

    def memory_bytes(self, stage: int, begin: int, end: int) -> int:
        """Static memory in bytes of the units ``[begin, end)`` on ``stage``, and their activations in flight."""
        activation_bytes = self.activation[end] - self.activation[begin]
        return self.static[end] - self.static[begin] + self.in_flight[stage] * activation_bytes

    def fits(self, stage: int, begin: int, end: int) -> bool:
        """Whether the units ``[begin, end)`` fit into the memory of the stage's worker.

        Monotone: whatever fits also fits without its first or last unit. All solvers rely on that.
        """
        cap = self.slots[stage].memory_bytes
        return cap is None or self.memory_bytes(stage, begin, end) <= cap

    def latest_end(self, stage: int, begin: int, work_ns: int) -> int:
        """The last cut at which the stage may end if it begins at ``begin`` and does at most ``work_ns``."""
        end = bisect_right(self.load, self.load[begin] + work_ns, begin) - 1
        if not self.static or self.fits(stage, begin, end):
            return end
        # Memory grows with each unit, so bisection finds the last cut that fits.
        below, above = begin, end  # invariant: fits at ``below``, not at ``above``
        while above - below > 1:
            middle = (below + above) // 2
            if self.fits(stage, begin, middle):
                below = middle
            else:
                above = middle
        return below

    def earliest_begin(self, stage: int, end: int, work_ns: int) -> int:
        """The first cut at which the stage may begin if it ends at ``end`` and does at most ``work_ns``."""
        begin = bisect_left(self.load, self.load[end] - work_ns, 0, end)
        if not self.static or self.fits(stage, begin, end):
            return begin
        below, above = begin, end  # invariant: fits at ``above``, not at ``below``
        while above - below > 1:
            middle = (below + above) // 2
            if self.fits(stage, middle, end):
                above = middle
            else:
                below = middle
        return above


def make_limits(problem: PartitionProblem, weights: Sequence[int] | None = None) -> Limits:
    """The limits of a problem.

    Args:
        problem: the partitioning problem.
        weights: per item, the weight to balance; default: the work in ns.

    Raises:
        UsageError: a pin names a stage that does not exist.
        InfeasibleError: pins contradict one another.
    """
    chain = problem.chain
    stages, units = problem.num_stages, len(chain.cuts) - 1
    lowest = [min(units, p * problem.min_units) for p in range(stages + 1)]
    highest = [max(0, units - (stages - p) * problem.min_units) for p in range(stages + 1)]
    # The ends are fixed: the stages contain all units.
    lowest[stages], highest[0] = units, 0
    for item, stage in problem.pins:
        if not 0 <= stage < stages:
            raise UsageError(
                f"item {chain.names[item]!r} is pinned to stage {stage}; there are stages 0 to {stages - 1}"
            )
        unit = bisect_right(chain.cuts, item) - 1
        # The stages up to the pinned one begin at its unit at the latest; those after it begin behind the unit.
        for p in range(stage + 1):
            highest[p] = min(highest[p], unit)
        for p in range(stage + 1, stages + 1):
            lowest[p] = max(lowest[p], unit + 1)
    if problem.pins:
        for p in range(1, stages + 1):  # the stages between two pins need their units as well
            lowest[p] = max(lowest[p], lowest[p - 1] + problem.min_units)
            highest[stages - p] = min(highest[stages - p], highest[stages - p + 1] - problem.min_units)
        _check_pins(problem, lowest, highest)
    # Without memory limits ``static`` is empty: ``is_work_only`` and the loops test that instead of each stage.
    limited = any(slot.memory_bytes is not None for slot in problem.slots)
    weights = chain.work_ns if weights is None else weights
    load = chain.prefix_at_cuts(weights)
    # If every item is a unit, the maximum needs no differences, which matters at 100,000 items.
    whole = len(load) == len(weights) + 1
    return Limits(
        load=load,
        heaviest_unit_ns=max(weights) if whole else max(b - a for a, b in pairwise(load)),
        static=chain.prefix_at_cuts(chain.static_bytes) if limited else (),
        activation=chain.prefix_at_cuts(chain.stored_bytes) if limited else (),
        slots=tuple(problem.slot(stage) for stage in range(stages)),
        in_flight=problem.in_flight,
        min_units=problem.min_units,
        lowest=tuple(lowest),
        highest=tuple(highest),
        free=not problem.pins,
    )


def _check_pins(problem: PartitionProblem, lowest: Sequence[int], highest: Sequence[int]) -> None:
    """Check that some partition satisfies the pins, whatever the costs.

    Raises:
        InfeasibleError: pins contradict one another, or leave a stage too few units; the message names the pins.
    """
    names, cuts = problem.chain.names, problem.chain.cuts
    pins = sorted((bisect_right(cuts, item) - 1, stage, names[item]) for item, stage in problem.pins)
    for (unit, stage, name), (later_unit, later_stage, later_name) in pairwise(pins):
        if unit == later_unit and stage != later_stage:
            together = "one item" if name == later_name else "items that no stage boundary may separate"
            raise InfeasibleError(
                f"--pin {name}:{stage} and --pin {later_name}:{later_stage} contradict each other:"
                f" they name {together}; remove one of the two"
            )
        if stage > later_stage:
            raise InfeasibleError(
                f"--pin {name}:{stage} and --pin {later_name}:{later_stage} contradict each other: {later_name} comes"
                f" after {name}, so its stage must not be lower; remove one of the two"
            )
    # Pins that agree in order may still leave too few units between them.
    cut = next((p for p in range(1, len(lowest)) if lowest[p] > highest[p]), None)
    if cut is not None:
        pinned = ", ".join(f"--pin {name}:{stage}" for _, stage, name in pins)
        stages_text = f"the first {cut} stages together" if cut > 1 else "stage 0"
        raise InfeasibleError(
            f"{pinned}: {stages_text} must have at least {lowest[cut]} unit{'' if lowest[cut] == 1 else 's'},"
            f" but at most {highest[cut]} so that each other stage has {problem.min_units};"
            " change the pins or use --min-layers 0"
        )
