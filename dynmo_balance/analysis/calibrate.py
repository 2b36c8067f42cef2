"""Calibration: fit the simulator's constants (overhead per operation, link latency and bandwidth) to measured steps.

The simulated step is nearly linear in each constant, so least squares over the records finds the overhead per
operation. Latency and bandwidth can be separated only if partitions with different boundaries were measured. The search
fits one constant after another (golden section on the sum of squared relative errors) in a fixed number of rounds.

Golden section and not a solver of linear equations: a step is a maximum of sums, so it has kinks where another worker
becomes the slowest. The search needs no derivatives, only one minimum; with one sample there is one, because a step
grows with every overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .._common.errors import UsageError
from ..costs.cost_window import CostWindow, ItemCosts, median
from ..formats.plan import Plan
from ..formats.profile import Event, Header, Segment, Step
from ..formats.profile_records import COST_NEUTRAL_EVENTS
from ..partition.problem import PartitionProblem, WorkerSlot, worker_slots
from ..planning.plan_builder import chain_of
from ..simulation.simulator import predict

GOLDEN = 0.6180339887498949
"""The golden ratio minus one: one of the two inner points is used again, so a step takes one simulation, not two."""
ROUNDS = 4
"""Rounds over the three constants; each constant is fitted with the others fixed. One constant needs one round."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Consecutive steps under one plan.

    Attributes:
        problem: with the median costs of the steps.
        boundaries: of the plan.
        step_ns: median step.
        records: number of steps.
    """

    problem: PartitionProblem
    boundaries: tuple[int, ...]
    step_ns: int
    records: int


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fitted constants.

    Attributes:
        overhead_ns: per operation.
        latency_ns, bandwidth_bytes_per_s: of the link; None is unlimited.
        error: root mean square of the relative errors of the steps.
    """

    overhead_ns: int
    latency_ns: int
    bandwidth_bytes_per_s: int | None
    error: float


def _group_costs(header: Header, steps: Sequence[Step]) -> ItemCosts | None:
    window = CostWindow(len(header.items), len(steps))
    for step in steps:
        window.add(step)
    return window.costs()


def samples_of(segment: Segment, plans: dict[int, Plan], min_records: int = 3) -> list[Sample]:
    """One sample per range of steps between changes of plan or costs, with at least ``min_records`` records."""
    header = segment.header
    groups: list[tuple[int, list[Step]]] = []
    fresh = True
    for record in segment.records:
        if isinstance(record, Step):
            # Medians over a change of costs or plans would belong to no step.
            if fresh or groups[-1][0] != record.plan_id:
                groups.append((record.plan_id, []))
            groups[-1][1].append(record)
            fresh = False
        elif isinstance(record, Event) and record.kind not in COST_NEUTRAL_EVENTS:
            fresh = True
    by_id = {slot.worker: slot for slot in worker_slots(header)}
    found = []
    for plan_id, steps in groups:
        costs = _group_costs(header, steps) if len(steps) >= min_records and plan_id in plans else None
        if costs is None:
            continue
        plan = plans[plan_id]
        # The costs are as measured on these workers, so they already contain the speeds.
        slots: tuple[WorkerSlot, ...] = tuple(replace(by_id[worker], speed_ppm=1_000_000) for worker in plan.workers)
        problem = PartitionProblem(
            chain=chain_of(header, costs),
            slots=slots,
            schedule=plan.schedule,
            microbatches=header.microbatches,
            virtual_stages=plan.virtual_stages_per_worker,
            link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
            link_latency_ns=header.link.latency_ns if header.link else 0,
        )
        found.append(
            Sample(
                problem=problem,
                boundaries=plan.boundaries,
                step_ns=median([step.step_ns for step in steps]),
                records=len(steps),
            )
        )
    return found


def relative_error(samples: Sequence[Sample], overhead_ns: int, latency_ns: int, bandwidth: int | None) -> float:
    """The root mean square of simulated over measured step, minus one.

    Relative, so that samples of long and of short steps count alike.

    Args:
        samples: at least one, with measured steps above 0.
        overhead_ns: time added to every operation.
        latency_ns: of a transfer.
        bandwidth: of the link in bytes per second; None is unlimited.
    """
    total = 0.0
    for sample in samples:
        problem = replace(sample.problem, link_latency_ns=latency_ns, link_bandwidth=bandwidth)
        simulated = predict(problem, sample.boundaries, overhead_ns).step_ns
        total += (simulated / sample.step_ns - 1) ** 2
    return float((total / len(samples)) ** 0.5)


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The argument of the minimum of a unimodal function, by golden section to a thousandth."""
    a, b = low, high
    x, y = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    fx, fy = function(x), function(y)
    while b - a > 1e-3 * max(1.0, high):
        if fx <= fy:
            b, y, fy = y, x, fx
            x = b - GOLDEN * (b - a)
            fx = function(x)
        else:
            a, x, fx = x, y, fy
            y = a + GOLDEN * (b - a)
            fy = function(y)
    # The lower end is compared too, because golden section only approaches it, and an overhead of 0 is common.
    return min((low, x, y), key=function)


def calibrate(samples: Sequence[Sample], fit_link: bool) -> Constants:
    """The constants that fit the samples best; those of the link only with ``fit_link``.

    Raises:
        UsageError: nothing was measured, or the link is to be fitted with fewer than two different partitions.
    """
    samples = [sample for sample in samples if sample.step_ns > 0]
    if not samples:
        raise UsageError("no samples: calibration needs a plan with three step records and a measured step time")
    if fit_link and len({sample.boundaries for sample in samples}) < 2:
        raise UsageError("--link: latency and bandwidth need steps under two different partitions; leave out --link")
    first = samples[0].problem
    longest = max(sample.step_ns for sample in samples)
    # A worker executes at least a forward and a backward operation per microbatch, so a larger overhead would alone
    # exceed the longest step.
    most = longest / max(1, 2 * first.microbatches)
    found = Constants(
        overhead_ns=0, latency_ns=first.link_latency_ns, bandwidth_bytes_per_s=first.link_bandwidth, error=0.0
    )
    for _ in range(ROUNDS if fit_link else 1):
        found = _fit_constant(samples, found, lambda c, v: replace(c, overhead_ns=round(v)), 0, most)
        if fit_link:
            found = _fit_constant(samples, found, lambda c, v: replace(c, latency_ns=round(v)), 0, most)
            # By its logarithm, from 1 MB/s to 10 TB/s: errors of a bandwidth are relative.
            found = _fit_constant(samples, found, lambda c, v: replace(c, bandwidth_bytes_per_s=round(10**v)), 6, 13)
    return found


def _fit_constant(
    samples: Sequence[Sample],
    start: Constants,
    changed: Callable[[Constants, float], Constants],
    low: float,
    high: float,
) -> Constants:
    """The constants with one of them at its best value."""

    def error(value: float) -> float:
        """The error with the constant at ``value``."""
        trial = changed(start, value)
        return relative_error(samples, trial.overhead_ns, trial.latency_ns, trial.bandwidth_bytes_per_s)

    best = _minimum(error, low, high)
    return replace(changed(start, best), error=error(best))
