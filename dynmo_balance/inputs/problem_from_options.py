"""From a loaded profile and the options of a command to a partitioning problem."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .._common.document import is_count
from .._common.errors import UsageError
from ..costs.cost_window import costs_for
from ..formats.plan import CUSTOM, V_SCHEDULES, Plan
from ..formats.profile import Header
from ..partition.problem import PartitionProblem, WorkerSlot, with_ties_together, worker_slots
from ..planning.plan_builder import chain_of, current_spans
from ..schedules.registry import Kind, Operation, Order
from .profile_source import ProfileSource


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """The options that turn a profile into a problem; None is as in the profile.

    Attributes:
        stages: number of workers.
        microbatches: of one step.
        schedule, virtual_stages, granularity: of the pipeline.
        memory: per worker, such as ``80GB``.
        min_layers: minimum number of units per stage.
        pins: ``NAME:STAGE`` each.
        tied_together: keep items that share a weight on one worker.
    """

    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    granularity: str | None = None
    memory: str | None = None
    min_layers: int = 1
    pins: tuple[str, ...] = ()
    tied_together: bool = False


_UNITS = {  # in upper case, as sizes are compared without case
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str) -> int:
    """A size such as ``8000000``, ``80GB`` or ``79.5 GiB`` in bytes.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{text!r}: must be a size, in bytes or with one of kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _parse_pins(source: ProfileSource, pins: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """The pins of items; the name of a layer pins all of its items."""
    items = source.header.items
    result = []
    for pin in pins:
        name, _, stage = pin.rpartition(":")
        pinned = [at for at, item in enumerate(items) if name in (item.name, item.layer)]
        if not pinned or not is_count(stage):
            raise UsageError(
                f"--pin {pin!r}: must be NAME:STAGE with an item or a layer of the profile, such as {items[-1].name}:1"
            )
        result += [(at, int(stage)) for at in pinned]
    return tuple(dict.fromkeys(result))


def _places(source: ProfileSource, options: ProblemOptions) -> tuple[WorkerSlot, ...]:
    memory = None if options.memory is None else parse_bytes(options.memory)
    # The active plan may have released workers that the header still lists.
    if options.stages is None and source.plan is not None:
        by_id = {slot.worker: slot for slot in worker_slots(source.header, None, memory)}
        return tuple(by_id[worker] for worker in source.plan.workers)
    return worker_slots(source.header, options.stages, memory)


def default_virtual_stages(header: Header, schedule: str) -> int:
    """The default number of stages per worker: as in the profile, or the minimum of another schedule."""
    # The profile's number belongs to its schedule: three stages per worker under interleaved 1F1B mean nothing to zb-v.
    if schedule == header.schedule:
        return header.virtual_stages_per_worker
    return 2 if schedule in V_SCHEDULES or schedule == "interleaved-1f1b" else 1


def options_of_plan(options: ProblemOptions, plan: Plan) -> ProblemOptions:
    """The options, with schedule and stages per worker of the plan as defaults."""
    schedule = options.schedule or plan.schedule
    same = schedule == plan.schedule
    return replace(
        options,
        schedule=schedule,
        virtual_stages=options.virtual_stages or (plan.virtual_stages_per_worker if same else None),
    )


def order_of_plan(plan: Plan) -> Order | None:
    """The plan's own order of operations; None without one."""
    if plan.operations is None:
        return None
    words = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
    return tuple(
        tuple(Operation(int(stage), Kind(kind), int(microbatch)) for stage, kind, microbatch in words.findall(line))
        for line in plan.operations
    )


def with_plan_order(problem: PartitionProblem, plan: Plan) -> PartitionProblem:
    """The problem with the plan's own order of operations, if it has one.

    Raises:
        UsageError: the order is for another number of microbatches.
    """
    order = order_of_plan(plan)
    if order is None or problem.schedule != CUSTOM:
        return problem
    microbatches = 1 + max(operation.microbatch for row in order for operation in row)
    if microbatches != problem.microbatches:
        raise UsageError(
            f"the plan's operations are for {microbatches} microbatches, not {problem.microbatches};"
            f" use --microbatches {microbatches} or another --schedule"
        )
    # A custom schedule places stages anywhere, so the layout is part of the plan, not of a rule.
    at = {worker: index for index, worker in enumerate(plan.workers)}
    return replace(problem, order=order, layout=tuple(at[stage.worker] for stage in plan.stages))


def problem_under_plan(problem: PartitionProblem, header: Header, plan: Plan) -> PartitionProblem | None:
    """The costs of the problem under the workers, schedule and stages of a plan, to simulate that plan.

    None if that is impossible: the profile lacks a worker, or the order of operations is for other microbatches.
    """
    by_id = {slot.worker: slot for slot in (*worker_slots(header), *problem.slots)}
    if not by_id.keys() >= set(plan.workers):
        return None
    own = replace(
        problem,
        chain=replace(problem.chain, costs=costs_for(plan.schedule, problem.chain.costs)),
        slots=tuple(by_id[worker] for worker in plan.workers),
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages_per_worker,
        # The plan is simulated, not solved again, so constraints of another number of stages do not apply.
        pins=(),
        current=None,
        order=None,
        layout=None,
    )
    try:
        return with_plan_order(own, plan)
    except UsageError:
        return None


def make_problem(source: ProfileSource, options: ProblemOptions, current: Plan | None = None) -> PartitionProblem:
    """The partitioning problem of a command.

    Args:
        source: the profile.
        options: of the command.
        current: the active plan; of equal partitions, the one that moves the fewest bytes from it wins.

    Raises:
        UsageError: an option does not fit the profile.
    """
    header = source.header
    slots = _places(source, options)
    schedule = options.schedule or header.schedule
    virtual = options.virtual_stages or default_virtual_stages(header, schedule)
    problem = PartitionProblem(
        chain=chain_of(header, costs_for(schedule, source.costs), options.granularity),
        slots=slots,
        schedule=schedule,
        microbatches=options.microbatches or header.microbatches,
        virtual_stages=virtual,
        link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
        link_latency_ns=header.link.latency_ns if header.link else 0,
        min_units=options.min_layers,
        pins=_parse_pins(source, options.pins),
        current=None if current is None else current_spans(current, slots, virtual, schedule),
    )
    return with_ties_together(problem) if options.tied_together else problem
