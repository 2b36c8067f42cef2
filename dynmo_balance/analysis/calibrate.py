"""Calibration: fit the simulator's constants (overhead per operation, link latency and bandwidth) to measured steps.

The simulated step is piecewise linear in the overhead, the latency and the time per byte, so Gauss-Newton steps, each a
least-squares problem of at most three unknowns of at least 0, end after a few rounds. Relative errors are minimized.

Steps state the time of a transfer, which is latency plus bytes over bandwidth: the two can be separated only where
transfers have different sizes. Where all have one size, as between the layers of a decoder, the latency remains that of
the profile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .._common.errors import UsageError
from ..costs.cost_window import CostWindow, ItemCosts, median
from ..formats.plan import Plan
from ..formats.profile import Event, Header, Segment, Step
from ..formats.profile_records import COST_NEUTRAL_EVENTS
from ..partition.problem import PartitionProblem, WorkerSlot, worker_slots
from ..planning.plan_builder import chain_of
from ..simulation.simulator import predict

Array = npt.NDArray[np.float64]
ROUNDS = 30
"""Maximum number of Gauss-Newton steps; a kink of the simulated step needs a few more than none."""
HALVINGS = 12
"""Maximum number of times that a step is halved which makes the fit worse."""
BANDWIDTH_DECADES = (6, 13)
"""Bandwidths from 1 MB/s to 10 TB/s, by their logarithm: errors of a bandwidth are relative."""
NUM_BANDWIDTHS = 22
"""Bandwidths that are tried, and then once more around the best."""
AMBIGUOUS_RATIO = 4
"""Ratio of two bandwidths that explain the steps equally well, above which they count as not measured."""
NOTICEABLE_ERROR = 0.005
"""Fits whose errors differ by less explain the steps equally well; steps of a run differ by as much."""


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
        doubts: sentences on what the steps do not determine.
    """

    overhead_ns: int
    latency_ns: int
    bandwidth_bytes_per_s: int | None
    error: float
    doubts: tuple[str, ...] = ()


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
    return _norm(_errors(samples, overhead_ns, latency_ns, bandwidth))


def _errors(samples: Sequence[Sample], overhead_ns: int, latency_ns: int, bandwidth: int | None) -> Array:
    found = []
    for sample in samples:
        problem = replace(sample.problem, link_latency_ns=latency_ns, link_bandwidth=bandwidth)
        found.append(predict(problem, sample.boundaries, overhead_ns).step_ns / sample.step_ns - 1)
    return np.array(found)


def _norm(errors: Array) -> float:
    return float(np.sqrt(np.mean(errors**2)))


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
    sizes = {
        sample.problem.chain.items[cut - 1].boundary_bytes
        for sample in samples
        for cut in sample.boundaries[1:-1]
        if cut > 0
    }
    # A worker executes at least a forward and a backward operation per microbatch, so a larger overhead would alone
    # exceed the longest step.
    most = max(sample.step_ns for sample in samples) / max(1, 2 * first.microbatches)
    is_free = np.array([True, fit_link and len(sizes) > 1])

    def fitted(bandwidth: int | None) -> Constants:
        """The best overhead, and latency if it is fitted, with a bandwidth."""

        def errors(unknowns: Array) -> Array:
            return _errors(samples, round(float(unknowns[0])), round(float(unknowns[1])), bandwidth)

        best = _least_squares(errors, np.array([0.0, first.link_latency_ns]), is_free, most)
        overhead, latency = (round(float(value)) for value in best)
        return Constants(
            overhead_ns=overhead, latency_ns=latency, bandwidth_bytes_per_s=bandwidth, error=_norm(errors(best))
        )

    if not fit_link:
        return fitted(first.link_bandwidth)
    # Overhead and transfers lengthen a step in almost the same way, so each bandwidth is tried with its best overhead.
    decades = np.linspace(*BANDWIDTH_DECADES, NUM_BANDWIDTHS)
    tried = [fitted(round(10**decade)) for decade in decades]
    at = min(range(len(tried)), key=lambda index: tried[index].error)
    near = np.linspace(decades[max(0, at - 1)], decades[min(len(tried) - 1, at + 1)], NUM_BANDWIDTHS)
    tried += [fitted(round(10**decade)) for decade in near]
    found = min(tried, key=lambda constants: constants.error)
    return replace(found, doubts=tuple(_doubts(tried, found, sizes)))


def _least_squares(
    errors: Callable[[Array], Array], start: Array, is_free: npt.NDArray[np.bool_], most: float
) -> Array:
    """The unknowns of at least 0 with the least sum of squared errors, by Gauss-Newton steps.

    Args:
        errors: of unknowns.
        start: unknowns.
        is_free: which of them are fitted.
        most: largest plausible value, which scales the differences that derivatives are formed of.
    """
    now, at = start, errors(start)
    free = np.flatnonzero(is_free)
    for _ in range(ROUNDS):
        shift = most * 1e-3
        slopes = np.stack([(errors(now + shift * (np.arange(len(now)) == one)) - at) / shift for one in free], axis=1)
        target = _nonnegative(slopes, slopes @ now[free] - at)
        step = 1.0
        for _ in range(HALVINGS):
            trial = now.copy()
            trial[free] += step * (target - now[free])
            there = errors(trial)
            if _norm(there) < _norm(at) * (1 - 1e-6):
                break
            step /= 2
        else:
            return now
        now, at = trial, there
    return now


def _nonnegative(matrix: Array, right: Array) -> Array:
    """``x`` of at least 0 with the least ``|matrix x - right|``, of a few unknowns: the best of all sets that are 0."""
    found = []
    for chosen in itertools.product((False, True), repeat=matrix.shape[1]):
        values = np.zeros(matrix.shape[1])
        used = np.array(chosen)
        if used.any():
            values[used] = np.linalg.lstsq(matrix[:, used], right, rcond=None)[0]
        if (values >= 0).all():
            found.append((float(np.linalg.norm(matrix @ values - right)), tuple(values)))
    return np.array(min(found)[1])


def _doubts(tried: Sequence[Constants], found: Constants, sizes: set[int]) -> Iterator[str]:
    """What the steps do not determine of a fitted link."""
    if len(sizes) == 1:
        yield (
            f"every transfer has {min(sizes):,} bytes, so that latency and bandwidth cannot be separated; the latency"
            " is that of the profile"
        )
    alike = [one.bandwidth_bytes_per_s or 0 for one in tried if one.error < found.error + NOTICEABLE_ERROR]
    if max(alike) > AMBIGUOUS_RATIO * min(alike):
        yield (
            f"links of {min(alike) / 1e9:.3g} to {max(alike) / 1e9:.3g} GB/s explain the steps within"
            f" {NOTICEABLE_ERROR:.1%}: they do not measure the bandwidth"
        )
