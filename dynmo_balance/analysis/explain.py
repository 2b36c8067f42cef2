"""Explains what limits a partition, and what would help."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from .._common.errors import DynmoError
from ..costs.vocabulary import in_shards
from ..formats.profile import Header
from ..partition.balance import solve_best
from ..partition.exact import Solution
from ..partition.problem import PartitionProblem
from ..planning.plan_builder import chain_of
from ..simulation.simulator import Timeline, predict


def _names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def explain_plan(
    header: Header, problem: PartitionProblem, solution: Solution, timeline: Timeline, best: Timeline | None = None
) -> list[str]:
    """The explanation of a solution as sentences, most important first.

    Args:
        header: of the profile.
        problem: the partitioning problem.
        solution: the partition.
        timeline: its simulation.
        best: the simulation of the best partition by the objective; None if ``solution`` is the best.
    """
    minimized = {"bottleneck": "bottleneck", "simulated": "simulated step"}[solution.objective]
    return [
        f"The objective is the minimum {minimized}.",
        _bottleneck(problem, solution),
        _certificate(problem, solution, is_best=best is None),
        *([] if best is None or solution.objective != "simulated" else [_gap(timeline, best)]),
        *_shards(problem),
        *_freed(problem),
        _bubble(problem, solution, timeline),
        *_remedies(header, problem, solution, timeline),
    ]


def _bottleneck(problem: PartitionProblem, solution: Solution) -> str:
    work = problem.chain.work_ns
    times = [0] * len(problem.slots)
    contents: list[list[str]] = [[] for _ in times]
    for stage, (begin, end) in enumerate(pairwise(solution.boundaries)):
        at = problem.positions[stage]
        times[at] += problem.slot(stage).time_ns(sum(work[begin:end]))
        if end > begin:
            contents[at].append(_names(problem.chain.names[begin:end]))
    slowest = times.index(max(times))
    mean = sum(times) / len(times)
    return (
        f"Worker {problem.slots[slowest].worker} ({' and '.join(contents[slowest])}) is the slowest:"
        f" {times[slowest] / 1e6:.3f} ms per microbatch, {times[slowest] / mean:.2f} x the mean of the workers."
    )


def _shards(problem: PartitionProblem) -> list[str]:
    """Where the vocabulary is, if its output layer is in shards on all workers."""
    shards, workers = problem.chain.vocabulary, len(problem.slots)
    if shards is None:
        return []
    times = [
        slot.time_ns(shards.share(shards.forward_ns + shards.weight_ns, at, workers))
        for at, slot in enumerate(problem.slots)
    ]
    return [
        f"The output layer is outside of the stages: its {shards.count} shards are on all workers and add up to"
        f" {max(times) / 1e6:.3f} ms per microbatch to each."
    ]


def _freed(problem: PartitionProblem) -> list[str]:
    """What the frozen front no longer stores, if there is one."""
    chain = problem.chain
    if not chain.freed_bytes:
        return []
    front = _names(chain.names[: chain.frozen_items])
    return [
        f"The frozen front ({front}) has no gradients and no optimizer state, which frees"
        f" {chain.freed_bytes / 1e9:.2f} GB for other layers."
    ]


def _certificate(problem: PartitionProblem, solution: Solution, *, is_best: bool) -> str:
    minimum = f"The minimum bottleneck is {solution.lower_bound_ns / 1e6:.3f} ms"
    if is_best and solution.objective == "simulated" and solution.bottleneck_ns > solution.lower_bound_ns:
        return f"{minimum}; by the objective this plan is better."
    if not solution.optimal:
        gap = solution.bottleneck_ns / solution.lower_bound_ns - 1 if solution.lower_bound_ns else 0.0
        return f"{minimum} or more; this plan is {gap:.1%} above it."
    begin, end = solution.blocking
    run = problem.chain.names[begin:end]
    if not run:
        return "No contiguous partition has a lower bottleneck."
    alone = " It is one item: only a finer cut or a faster item can help." if len(run) == 1 else ""
    return f"No contiguous partition has a lower bottleneck: one stage would need {_names(run)} in less time.{alone}"


def _gap(timeline: Timeline, best: Timeline) -> str:
    """The distance of the simulated step to that of the best partition."""
    if timeline.step_ns <= best.step_ns:
        return "No partition with a shorter simulated step was found."
    gap = timeline.step_ns / best.step_ns - 1 if best.step_ns else 0.0
    best_found = f"The best partition found has a simulated step of {best.step_ns / 1e6:.2f} ms"
    return f"{best_found}; this plan is {gap:.1%} above it."


def _bubble(problem: PartitionProblem, solution: Solution, timeline: Timeline) -> str:
    stages, microbatches = len(problem.slots), problem.microbatches
    # Huang et al. 2019 (arXiv 1811.06965, section 2.3). This share belongs to the schedule; the rest is imbalance and
    # transfers.
    ideal = (stages - 1) / (microbatches + stages - 1)
    return (
        f"Workers idle {timeline.bubble_fraction:.1%} of a step of {timeline.step_ns / 1e6:.2f} ms; with perfectly even"
        f" stages GPipe and 1F1B idle {ideal:.1%} at {stages} stages and {microbatches} microbatches."
    )


def _remedies(header: Header, problem: PartitionProblem, solution: Solution, timeline: Timeline) -> list[str]:
    """Remedies with their effect on the simulated step; those that do not help are left out."""
    tried: list[tuple[str, PartitionProblem]] = []
    finer = chain_of(header, problem.chain.costs, "sublayer")
    # An order of operations fits the cuts and microbatches it was made for, so others are not tried with it.
    named = replace(problem, current=None, order=None, layout=None)
    if finer.cuts != problem.chain.cuts and problem.order is None:
        tried.append(("Cutting inside layers (--granularity sublayer)", replace(problem, chain=finer, current=None)))
    tried.extend(
        (f"The schedule {schedule}", replace(named, schedule=schedule, virtual_stages=1))
        for schedule in ("1f1b", "zero-bubble")
        if schedule != problem.schedule and (schedule != "zero-bubble" or problem.chain.costs.split)
    )
    shards = shards_remedy(header, problem, timeline.step_ns)
    found = [] if shards is None else [shards]
    for label, other in tried:
        time = _step_ns(other)
        if time is not None and time < 0.99 * timeline.step_ns:
            found.append(
                f"{label} would reduce the step to {time / 1e6:.2f} ms ({1 - time / timeline.step_ns:.1%} less)."
            )
    # Twice the microbatches are twice the work: throughput is compared, not the step.
    doubled = replace(named, microbatches=2 * problem.microbatches)
    time = None if problem.order is not None else _step_ns(doubled)
    if time is not None and time < 0.99 * 2 * timeline.step_ns:
        share = 1 - time / (2 * timeline.step_ns)
        found.append(f"Twice the microbatches would give {1 / (1 - share) - 1:.1%} more throughput.")
    return found or ["Neither finer cuts, another schedule, vocabulary shards nor more microbatches would gain 1 %."]


def with_vocabulary_shards(header: Header, problem: PartitionProblem) -> PartitionProblem | None:
    """The problem with one shard of the vocabulary on each worker (``--vocabulary-parallel``); None where it has none.

    Args:
        header: of the profile.
        problem: the partitioning problem.
    """
    found = in_shards(header, problem.chain.work_ns, len(problem.slots))
    if found is None or len(problem.slots) == 1:
        return None
    if problem.order is not None:  # it has no place for the shards' operations
        problem = replace(problem, schedule="1f1b", virtual_stages=1, order=None, layout=None)
    (items, shards), costs = found, problem.chain.costs
    shards = replace(shards, activation_bytes=shards.activation_bytes + costs.activation_bytes[-1])
    costs = replace(
        costs,
        forward_ns=(*costs.forward_ns[:-1], 0),
        backward_input_ns=(*costs.backward_input_ns[:-1], 0),
        backward_weight_ns=(*costs.backward_weight_ns[:-1], 0),
        activation_bytes=(*costs.activation_bytes[:-1], 0),
    )
    return replace(problem, chain=replace(problem.chain, items=items, costs=costs, vocabulary=shards), current=None)


def shards_remedy(header: Header, problem: PartitionProblem, step_ns: int) -> str | None:
    """What shards of the vocabulary would save, as a sentence; None where they save less than 1 %.

    Args:
        header: of the profile.
        problem: the partitioning problem.
        step_ns: simulated step of the plan without shards.
    """
    sharded = with_vocabulary_shards(header, problem)
    time = None if sharded is None else _step_ns(sharded)
    if sharded is None or time is None or time >= 0.99 * step_ns:
        return None
    other = "" if sharded.schedule == problem.schedule else f" and --schedule {sharded.schedule}"
    return (
        f"Word table and output layer in shards on all workers (--vocabulary-parallel {len(problem.slots)}{other} of"
        f" dynmo-train) would reduce the step to {time / 1e6:.2f} ms ({1 - time / step_ns:.1%} less)."
    )


def _step_ns(problem: PartitionProblem) -> int | None:
    try:
        return predict(problem, solve_best(problem).boundaries).step_ns
    except DynmoError:
        return None
