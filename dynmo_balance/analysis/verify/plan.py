"""Checks every number of a plan against the profile, with code that is independent of the solvers.

``step`` derives the step, work and memory; ``bottleneck`` the lower bound and the blocking run. This module compares
them with the plan, field by field. The constraints of the plan (microbatches, memory limits, pins, granularity) define
the question: they are taken from the command, else from the plan as far as it does not contradict the profile::

    plan, profile --setting.load_setting--> costs at the plan's step, constraints
                                               |  step.measure          work, step, bubble, memory
                                               |  bottleneck.bound_of   lower bound, blocking run
                                               v
                                            compare every field --> faults, each with its path

Formulas are repeated here on purpose. A shared function would make the same mistake twice, and the check would pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from ..._common.document import Problem as Fault
from ..._common.errors import DynmoError, UsageError
from ...costs.cost_window import costs_for, speed_ppm
from ...costs.vocabulary import shard_costs
from ...formats.plan import RECORDS_KEY, SEGMENT_KEY, Plan, header_problems
from ...formats.profile import Header, Item, PlanRequest, PlanResult, Step
from ...planning.migration import BASE_PAUSE_NS
from ...schedules.registry import Kind, Operation, Order, build_order
from ...schedules.vocabulary import sharded_order, with_shards
from .bottleneck import Bound, BoundProblem, bound_of
from .experts import costs_with_experts, expert_faults
from .inputs import VerifyInputs
from .step import (
    Pipeline,
    PlanWorker,
    StepMetrics,
    bytes_of_shards,
    is_v_placement,
    measure,
    spans_of,
    workers_of_stages,
)

ROUNDING = Fraction(51, 100_000_000)
"""Fractions are written with six digits."""
_FILE_NAME = re.compile(r"plan-(\d{6,})\.json")


def verify(plan: Plan, inputs: VerifyInputs, base: Plan | None, file_name: str = "") -> list[Fault]:
    """Every number of the plan that differs from the recomputed one; empty for a correct plan.

    Args:
        plan: the plan.
        inputs: profile, costs and constraints.
        base: the base plan; None if there is none, or if it is not available.
        file_name: of the plan, which may contain its number.
    """
    header = inputs.header
    faults = [fault for fault in header_problems(plan, header) if not _is_added_worker(fault, plan, header)]
    if faults:
        return faults
    faults = [*_number_faults(plan, file_name), *_source_faults(plan, inputs), *_worker_faults(plan, inputs, base)]
    faults += expert_faults(plan, inputs, base)
    try:
        pipeline = _pipeline(plan, inputs)
        measures = measure(pipeline)
    except UsageError as error:
        return [*faults, Fault("schedule", "value", str(error))]
    if measures is None:
        return [*faults, Fault("operations", "order", "deadlock: they wait for each other")]
    faults += _partition_faults(plan, inputs, measures)
    faults += _predicted_faults(plan, measures, _base_step_ns(plan, inputs, base))
    if plan.optimality is not None:
        faults += _bound_faults(plan, inputs, pipeline, measures)
    faults += _vocabulary_faults(plan, pipeline)
    return faults + _migration_faults(plan, inputs, base, pipeline)


def _vocabulary_faults(plan: Plan, pipeline: Pipeline) -> list[Fault]:
    """The shards of the output layer on each worker, which only a run with shards has."""
    workers, count = len(plan.workers), 0 if pipeline.vocabulary is None else pipeline.vocabulary.count
    on = Counter(shard * workers // count for shard in range(count))
    needed = {"shards_per_worker": [on[at] for at in range(workers)]} if count else None
    stated = (plan.extra or {}).get("x_vocabulary")
    if stated == needed or (stated is None and plan.balancer == "initial"):
        return []
    return [Fault("x_vocabulary", "value", f"is {stated}, recomputed {needed}")]


def _added_workers(plan: Plan, header: Header) -> list[int]:
    """The ids of workers that a plan for more workers than the profile has adds."""
    # The rule of ``partition.problem.worker_slots``: numbers above the profile's highest one.
    most = max(worker.worker for worker in header.workers)
    missing = len(plan.workers) + len(plan.released_workers) - len(header.workers)
    return [most + 1 + at for at in range(max(0, missing))]


def _is_added_worker(fault: Fault, plan: Plan, header: Header) -> bool:
    match = re.fullmatch(r"stages\[(\d+)\]\.worker", fault.path)
    return match is not None and plan.stages[int(match[1])].worker in _added_workers(plan, header)


def _operations(plan: Plan, microbatches: int, *, has_shards: bool) -> Order:
    """The plan's own operations, or those of its schedule; with ``has_shards`` the passes of the output layer too."""
    if plan.operations is None:
        build = sharded_order if has_shards else build_order
        return build(plan.schedule, len(plan.workers), plan.virtual_stages_per_worker, microbatches)
    rows = []
    for line in plan.operations:
        parts = [re.split(r"([FBIW])", each) for each in line.split()]
        rows.append(tuple(Operation(int(stage), Kind(kind), int(number)) for stage, kind, number in parts))
    found = 1 + max((one.microbatch for row in rows for one in row), default=-1)
    if found != microbatches:
        raise UsageError(f"the plan's operations are for {found} microbatches, not {microbatches}")
    return with_shards(tuple(rows)) if has_shards else tuple(rows)


def _pipeline(plan: Plan, inputs: VerifyInputs, follower: Plan | None = None) -> Pipeline:
    """A plan with the costs of the setting; a base plan with those of the plan that follows it (``follower``)."""
    header = inputs.header
    speeds = {worker.worker: speed_ppm(worker.relative_speed) for worker in header.workers}
    limits = inputs.constraints.memory_bytes if follower is None else (None,) * len(plan.workers)
    costs = costs_for(plan.schedule, inputs.costs if follower is None else costs_for(follower.schedule, inputs.costs))
    # The base has the placement of experts that the costs were measured with.
    if follower is None:
        costs = costs_with_experts(plan, costs, header)
    vocabulary = shard_costs(header, costs.vocabulary)
    order = _operations(plan, inputs.constraints.microbatches, has_shards=vocabulary is not None)
    return Pipeline(
        items=header.items,
        costs=costs,
        spans=spans_of(plan),
        plan_workers=tuple(
            PlanWorker(
                worker=worker,
                speed_ppm=speeds.get(worker, 1_000_000),
                memory_bytes=None
                if memory is None
                else max(0, memory - bytes_of_shards(vocabulary, at, order[at], len(plan.workers))),
            )
            for at, (worker, memory) in enumerate(zip(plan.workers, limits, strict=True))
        ),
        worker_of_stage=workers_of_stages(plan),
        order=order,
        bandwidth=None if header.link is None else header.link.bandwidth_bytes_per_s,
        latency_ns=0 if header.link is None else header.link.latency_ns,
        vocabulary=vocabulary,
    )


def _number_faults(plan: Plan, file_name: str) -> list[Fault]:
    """The plan id against the file name and the base; the step at which it may be applied."""
    faults = []
    follows = 0 if plan.base_plan_id is None else plan.base_plan_id + 1
    published = _FILE_NAME.fullmatch(file_name)
    if published and int(published[1]) != plan.plan_id:
        faults.append(Fault("plan_id", "value", f"is {plan.plan_id}, the file name has {int(published[1])}"))
    elif not published and SEGMENT_KEY not in (plan.extra or {}) and plan.plan_id != follows:
        faults.append(Fault("plan_id", "value", f"is {plan.plan_id}, must be {follows}, one above the base"))
    if plan.plan_id < follows:
        faults.append(Fault("base_plan_id", "value", f"is {plan.base_plan_id}, must be below plan_id {plan.plan_id}"))
    if plan.apply_at_step is not None and plan.apply_at_step < plan.read_to_step:
        message = f"is {plan.apply_at_step}, before step {plan.read_to_step} that the plan was made from"
        faults.append(Fault("apply_at_step", "value", message))
    return faults


def _source_faults(plan: Plan, inputs: VerifyInputs) -> list[Fault]:
    """The step and the number of records of the plan's costs."""
    faults = []
    steps = {r.step for r in inputs.segments[-1].records if isinstance(r, Step | PlanRequest)}
    # The initial plan of a run is made before its first step, whatever was measured since.
    is_first = plan.read_to_step == 0 and (not steps or plan.balancer == "initial")
    known = plan.read_to_step in steps or is_first
    if not known:
        message = f"is {plan.read_to_step}, the profile has no record of that step"
        faults.append(Fault("read_to_step", "value", message))
    records = (plan.extra or {}).get(RECORDS_KEY)
    if records is not None and records != inputs.costs.records:
        message = f"is {records}, the profile has {inputs.costs.records} up to step {plan.read_to_step}"
        faults.append(Fault(RECORDS_KEY, "value", message))
    return faults


def _worker_faults(plan: Plan, inputs: VerifyInputs, base: Plan | None) -> list[Fault]:
    """Workers that the plan cannot use or release, and memory limits above the profile's."""
    header = inputs.header
    faults: list[Fault] = []
    in_use, released = set(plan.workers), set(plan.released_workers)
    if len(released) < len(plan.released_workers):
        faults.append(Fault("released_workers", "duplicate", f"contain a worker twice: {list(plan.released_workers)}"))
    order = [*(worker.worker for worker in header.workers), *_added_workers(plan, header)]
    if base is None and plan.base_plan_id is None:
        expected = set(order[: len(in_use | released)])
        if in_use | released != expected:
            message = f"with those of the stages are {sorted(in_use | released)}, must be {sorted(expected)}"
            faults.append(Fault("released_workers", "value", message))
    elif base is not None and released and released != set(base.workers) - in_use:
        message = f"are {sorted(released)}, the stages leave {sorted(set(base.workers) - in_use)} without work"
        faults.append(Fault("released_workers", "value", message))
    faults += [
        Fault("released_workers", "value", f"worker {worker.worker} cannot be released")
        for worker in header.workers
        if worker.worker in released and not worker.releasable
    ]
    known = {worker.worker: worker.memory_bytes for worker in header.workers}
    if not inputs.memory_given:
        for at, (worker_id, limit) in enumerate(zip(plan.workers, inputs.constraints.memory_bytes, strict=True)):
            has = known.get(worker_id)
            if has is not None and (limit is None or limit > has):
                message = f"is {'none' if limit is None else f'{limit:,}'}, the profile's worker has {has:,}"
                faults.append(
                    Fault(f"constraints.memory_bytes[{at}]", "memory", f"{message}; confirm it with --memory")
                )
    return faults


def _cuts(plan: Plan, inputs: VerifyInputs) -> tuple[int, ...]:
    """The item positions where a stage may begin or end."""
    items, tied = inputs.header.items, _tied(inputs.header.items) if inputs.constraints.tied_together else []
    inside: set[int] = set()
    for first, second in tied:
        if not (is_v_placement(plan) and first == 0 and second == len(items) - 1):
            inside.update(range(first + 1, second + 1))
    whole = inputs.granularity == "layer"
    return tuple(
        at
        for at in range(len(items) + 1)
        if at in (0, len(items))
        or (items[at].cut_before and not (whole and items[at].layer == items[at - 1].layer) and at not in inside)
    )


def _tied(items: Sequence[Item]) -> list[tuple[int, int]]:
    """The positions of items that share a weight, the earlier one first."""
    names = [item.name for item in items]
    pairs = ((at, names.index(item.tied_to)) for at, item in enumerate(items) if item.tied_to is not None)
    return [(min(pair), max(pair)) for pair in pairs]


def _partition_faults(plan: Plan, inputs: VerifyInputs, measures: StepMetrics) -> list[Fault]:
    """Stages that violate the constraints."""
    cuts, constraints = _cuts(plan, inputs), inputs.constraints
    names = [item.name for item in inputs.header.items]
    faults = []
    for stage, (begin, end) in enumerate(pairwise(plan.boundaries)):
        where = f"stages[{stage}]"
        if begin not in cuts:
            message = f"begins at {names[begin]}, where {inputs.granularity} granularity and ties allow no cut"
            faults.append(Fault(where, "cut", message))
        units = sum(begin <= cut < end for cut in cuts)
        if units < constraints.min_layers:
            message = f"has {units} units, must have at least {constraints.min_layers}"
            faults.append(Fault(where, "length", message))
    for at, pin in enumerate(constraints.pins):
        if pin.item not in plan.stages[pin.stage].items:
            faults.append(Fault(f"constraints.pins[{at}]", "value", f"{pin.item} is not in stage {pin.stage}"))
    if constraints.tied_together:
        owner = plan.owner
        faults += [
            Fault("constraints.tied_together", "value", f"{names[first]} and {names[second]} are on different workers")
            for first, second in _tied(inputs.header.items)
            if owner[names[first]] != owner[names[second]]
        ]
    limits = zip(plan.workers, constraints.memory_bytes, measures.peak_memory_bytes, strict=True)
    return faults + [
        Fault("stages", "memory", f"worker {worker} needs {peak:,} bytes, has {limit:,}")
        for worker, limit, peak in limits
        if limit is not None and peak > limit
    ]


def _base_step_ns(plan: Plan, inputs: VerifyInputs, base: Plan | None) -> int | None:
    """The step in ns of the base with the same costs; None with another number of workers, or if it cannot run."""
    known = {*(worker.worker for worker in inputs.header.workers), *plan.workers}
    if base is None or len(base.workers) != len(plan.workers) or not known >= set(base.workers):
        return None
    try:
        measures = measure(_pipeline(base, inputs, plan))
    except DynmoError:
        return None
    return measures.step_ns if measures is not None else None


def _differs(stated: float | None, found: Fraction | None) -> bool:
    if stated is None or found is None:
        return stated is not None or found is not None
    return abs(Fraction(stated) - found) > ROUNDING


def _predicted_faults(plan: Plan, measures: StepMetrics, base_step_ns: int | None) -> list[Fault]:
    predicted = plan.predicted
    if predicted is None:
        return []
    # Integers must be equal to the nanosecond and the byte: both derivations are exact.
    faults = [
        Fault(f"predicted.{name}", "value", f"is {stated}, recomputed {found}")
        for name, stated, found in (
            ("bottleneck_ns", predicted.bottleneck_ns, measures.bottleneck_ns),
            ("step_ns", predicted.step_ns, measures.step_ns),
            ("busy_ns", predicted.busy_ns, measures.busy_ns),
            ("peak_memory_bytes", predicted.peak_memory_bytes, measures.peak_memory_bytes),
        )
        if stated != found
    ]
    gain = 1 - Fraction(measures.step_ns, base_step_ns) if base_step_ns else None
    for name, stated, share in (
        ("bubble_fraction", predicted.bubble_fraction, measures.bubble),
        ("gain_fraction", predicted.gain_fraction, gain),
    ):
        if _differs(stated, share):
            found = "null" if share is None else f"{float(share):.6f}"
            faults.append(Fault(f"predicted.{name}", "value", f"is {stated}, recomputed {found}"))
    return faults


def _bound_faults(plan: Plan, inputs: VerifyInputs, pipeline: Pipeline, measures: StepMetrics) -> list[Fault]:
    stated, names = plan.optimality, [item.name for item in inputs.header.items]
    if stated is None:
        return []
    at = {name: position for position, name in enumerate(names)}
    question = BoundProblem(
        pipeline=pipeline,
        cuts=_cuts(plan, inputs),
        min_units=inputs.constraints.min_layers,
        pins=tuple((at[pin.item], pin.stage) for pin in inputs.constraints.pins),
        is_v=is_v_placement(plan),
        own_order=plan.operations is not None,
    )
    bound: Bound = bound_of(question, stated.lower_bound_ns)
    faults = []
    if stated.lower_bound_ns != bound.least_ns:
        message = f"is {stated.lower_bound_ns}, recomputed {bound.least_ns}"
        faults.append(Fault("optimality.lower_bound_ns", "value", message))
    if stated.optimal != (measures.bottleneck_ns == bound.least_ns):
        message = f"is {str(stated.optimal).lower()}, the bottleneck is {measures.bottleneck_ns}, the bound"
        faults.append(Fault("optimality.optimal", "value", f"{message} {bound.least_ns}"))
    begin, end = bound.blocking
    if list(stated.blocking_items) != names[begin:end]:
        run = f"{names[begin]} .. {names[end - 1]}" if end > begin else "none"
        faults.append(Fault("optimality.blocking_items", "value", f"is not the blocking run, {run}"))
    return faults


def _migration_faults(plan: Plan, inputs: VerifyInputs, base: Plan | None, pipeline: Pipeline) -> list[Fault]:
    """The moves from the base, their bytes, the largest link and the pause."""
    if plan.base_plan_id is not None and base is None:
        message = f"plan {plan.base_plan_id} is not available, so moves and gain cannot be checked; pass it with --base"
        return [Fault("base_plan_id", "reference", message)]
    faults = []
    if base is not None and base.plan_id != plan.base_plan_id:
        faults.append(Fault("base_plan_id", "value", f"is {plan.base_plan_id}, the base given is {base.plan_id}"))
    before: Mapping[str, int] = base.owner if base is not None else plan.owner
    if base is not None and plan.action == "keep" and plan.stages != base.stages:
        faults.append(Fault("stages", "value", "must be those of the base, as the plan keeps the partition"))
    # The frozen front has no optimizer state, unless it shares a weight that is trained elsewhere.
    shared = {item.tied_to for item in pipeline.items} | {item.name for item in pipeline.items if item.tied_to}
    size = {
        item.name: item.param_bytes + item.optimizer_bytes * (at >= pipeline.frozen or item.name in shared)
        for at, item in enumerate(pipeline.items)
    }
    moved = [(item, before[item], to, size[item]) for item, to in plan.owner.items() if before.get(item, to) != to]
    stated = plan.migration
    if sorted(moved) != sorted((move.item, move.from_worker, move.to_worker, move.bytes) for move in stated.moves):
        message = f"are not the {len(moved)} moves, with their bytes, that lead from the base to the stages"
        faults.append(Fault("migration.moves", "value", message))
    links: Counter[tuple[int, int]] = Counter()
    for _, source, target, count in moved:
        links[source, target] += count
    largest = max(links.values(), default=0)
    pauses: Collection[int | None] = _pauses(plan, inputs, largest) if moved else {0, None}  # null: unknown
    for name, number, found in (
        ("bytes", stated.bytes, {sum(links.values())}),
        ("max_link_bytes", stated.max_link_bytes, {largest}),
        ("pause_ns", stated.pause_ns, pauses),
    ):
        if number not in found:
            expected = " or ".join(str(value) for value in sorted(value for value in found if value is not None))
            faults.append(Fault(f"migration.{name}", "value", f"is {number}, recomputed {expected}"))
    return faults


def _pauses(plan: Plan, inputs: VerifyInputs, largest: int) -> Collection[int]:
    """The possible pauses in ns of a move of this size, given what the planner knew of pauses at that step."""
    link = inputs.header.link
    transfer = largest * 10**9 // link.bandwidth_bytes_per_s if link is not None else 0
    if SEGMENT_KEY not in (plan.extra or {}):
        return {BASE_PAUSE_NS + transfer}
    measured: int | None = None
    found: set[int | None] = set()
    for segment in inputs.segments:
        own = segment is inputs.segments[-1]
        step = 0
        if own:
            found.add(measured)
        for record in segment.records:
            step = record.step if isinstance(record, Step | PlanRequest) else step
            if own and step > plan.read_to_step:
                break
            if isinstance(record, PlanResult) and record.result == "applied":
                measured = _smoothed(measured, record, segment.header)
            if own and step < plan.read_to_step:
                found.clear()
            found.add(measured)
    return {(BASE_PAUSE_NS if value is None else value) + transfer for value in found}


def _smoothed(known: int | None, result: PlanResult, header: Header) -> int:
    """The pause apart from transfers after a move: the mean of the known one and the measured one."""
    rate = header.link.bandwidth_bytes_per_s if header.link is not None else None
    beyond = max(0, result.pause_ns - (result.bytes * 10**9 // rate if rate else 0))
    return beyond if known is None else round((known + beyond) / 2)
