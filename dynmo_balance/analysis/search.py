"""Joint search over schedule, virtual stages, granularity and partition for the minimum simulated step.

Every schedule is tried with one to four stages per worker, at layer and at sublayer granularity, with the exact
partition (with several stages per worker, the best found). Candidates that do not fit the memory are left out. The
best few are then improved by local search on the simulated step. Orders of operations made for the given costs
(``planning.custom_schedule``) compete with the schedules by name. The result is measured against ``simulation.bounds``,
which are valid for any schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._common.errors import DynmoError
from ..costs.cost_window import SPLIT_SCHEDULES, costs_for, split_in_half
from ..formats.plan import CUSTOM, V_SCHEDULES
from ..formats.profile import Header
from ..partition.balance import balance
from ..partition.exact import Solution
from ..partition.problem import InfeasibleError, PartitionProblem
from ..planning.custom_schedule import search_custom_schedules
from ..planning.local_search import minimize_step
from ..planning.plan_builder import chain_of
from ..simulation.bounds import Bounds, bounds_of
from ..simulation.simulator import Timeline, predict

VIRTUAL_STAGES = (1, 2, 3, 4)
"""Stages per worker to try. More shorten the bubble (Narayanan et al. 2021, section 2.2), but multiply transfers."""
NUM_IMPROVED = 6
"""Best candidates that local search improves; it simulates far more partitions than the rest of the search."""
ROUNDS = 60
"""Rounds of the search for custom orders: up to half a minute at 8 workers and 32 microbatches, and some seconds where
the lower bound is reached."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One schedule, granularity and partition, with its simulated step."""

    granularity: str
    problem: PartitionProblem
    solution: Solution
    timeline: Timeline

    @property
    def label(self) -> str:
        """A short description."""
        return f"{self.problem.schedule}, {self.problem.virtual_stages} stages per worker, {self.granularity}"


@dataclass(frozen=True, kw_only=True)
class Search:
    """The result of a search.

    Attributes:
        best: the candidate with the shortest step.
        others: all other candidates, best first.
        bounds: lower bounds at the finest granularity searched.
        assumed_split: whether half of a backward pass was assumed to be the weight gradient.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    bounds: Bounds
    assumed_split: bool


def _virtual_stages(schedule: str) -> tuple[int, ...]:
    # 1F1B with several stages is the interleaved schedule, and torch's GPipe has one stage per rank.
    if schedule in ("gpipe", "1f1b"):
        return (1,)
    if schedule in V_SCHEDULES:
        return (2,)
    return VIRTUAL_STAGES if schedule == "zero-bubble" else VIRTUAL_STAGES[1:]


def _problems(
    header: Header, problem: PartitionProblem, schedules: tuple[str, ...], granularities: tuple[str, ...]
) -> list[tuple[str, PartitionProblem]]:
    found: list[tuple[str, PartitionProblem]] = []
    known: set[tuple[int, ...]] = set()
    for granularity in granularities:
        chain = chain_of(header, problem.chain.costs, granularity)
        # A model may permit the same cuts at both granularities; they are searched once.
        if chain.cuts in known:
            continue
        known.add(chain.cuts)
        found.extend(
            (
                granularity,
                replace(
                    problem,
                    chain=replace(chain, costs=costs_for(schedule, chain.costs)),
                    schedule=schedule,
                    virtual_stages=virtual,
                    current=None,
                ),
            )
            for schedule in schedules
            if schedule != CUSTOM
            for virtual in VIRTUAL_STAGES
            if virtual in _virtual_stages(schedule)
        )
    return found


def _fits(problem: PartitionProblem, timeline: Timeline) -> bool:
    return all(
        slot.memory_bytes is None or peak <= slot.memory_bytes
        for slot, peak in zip(problem.slots, timeline.peak_memory_bytes, strict=True)
    )


def search(
    header: Header,
    problem: PartitionProblem,
    schedules: tuple[str, ...],
    granularities: tuple[str, ...],
    rounds: int = ROUNDS,
    num_improved: int = NUM_IMPROVED,
) -> Search:
    """The minimum simulated step.

    Args:
        header: of the profile.
        problem: costs, workers and constraints; schedule and granularity are those below.
        schedules: names, and ``custom`` for orders made for the costs.
        granularities: where to cut; the last one is the finest.
        rounds: number of rounds of the search for custom orders.
        num_improved: number of candidates that local search improves.

    Raises:
        InfeasibleError: no candidate fits.
    """
    assumed = not problem.chain.costs.split and bool(set(SPLIT_SCHEDULES) & set(schedules))
    found = []
    reasons = []
    for granularity, trial in _problems(header, problem, schedules, granularities):
        try:
            solution = balance(trial, "exact")
            timeline = predict(trial, solution.boundaries)
        except DynmoError as error:
            reasons.append(str(error))
            continue
        if _fits(trial, timeline):
            found.append(Candidate(granularity=granularity, problem=trial, solution=solution, timeline=timeline))
        else:
            reasons.append(f"{trial.schedule} needs more memory than a worker has")
    found.sort(key=lambda candidate: candidate.timeline.step_ns)
    costs = split_in_half(problem.chain.costs) if assumed else problem.chain.costs
    finest = replace(problem, chain=chain_of(header, costs, granularities[-1]))
    if CUSTOM in schedules:
        found += [
            Candidate(
                granularity=granularities[-1],
                problem=one.problem,
                solution=one.solution,
                timeline=predict(one.problem, one.solution.boundaries),
            )
            for one in search_custom_schedules(finest, rounds)
        ]
    if not found:
        raise InfeasibleError(f"no schedule has a feasible partition; the first reason: {reasons[0]}")
    for at, candidate in enumerate(found[:num_improved]):
        better = minimize_step(candidate.problem, candidate.solution)
        timeline = predict(candidate.problem, better.boundaries)
        if _fits(candidate.problem, timeline):
            found[at] = replace(candidate, solution=better, timeline=timeline)
    found.sort(key=lambda candidate: candidate.timeline.step_ns)
    return Search(
        best=found[0],
        others=tuple(found[1:]),
        bounds=bounds_of(finest),
        assumed_split=assumed,
    )
