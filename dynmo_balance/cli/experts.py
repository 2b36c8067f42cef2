"""``dynmo-plan experts``: which rank has which experts, and how many replicas of the hot ones."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .._common.console import Format, emit, emit_table, human_bytes, print_message
from .._common.document import MAX_INTEGER, MAX_RANKS, MAX_SIZE, MAX_STEPS
from .._common.option_groups import grouped
from .options import CostOptions, FormatOption, MemoryOption, SourceArgument, write_plan

if TYPE_CHECKING:
    from ..costs.expert_loads import ExpertLoads
    from ..formats.expert_plan import ExpertPlan
    from ..inputs.profile_source import ProfileSource
    from ..planning.expert_copies import CopyCosts, WorkerMemory


class Shares(StrEnum):
    """How the tokens of an expert are split over its replicas."""

    EVEN = "even"
    FREE = "free"


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """The ranks that share the experts of a layer."""

    PANEL: ClassVar[str] = "Ranks"

    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_RANKS, help="Ranks that share the experts. Default: as in the profile."),
    ] = None
    replicas: Annotated[
        int, typer.Option(min=0, max=MAX_SIZE, help="Additional slots for replicas, over all ranks.")
    ] = 0
    shares: Annotated[
        Shares, typer.Option(help="Tokens of replicas. even: equal parts; free: as the balance needs.")
    ] = Shares.FREE
    nodes: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Nodes that the ranks are on.")] = 1
    groups: Annotated[
        int, typer.Option(min=1, max=MAX_SIZE, help="Groups of experts; with several nodes, a group stays on one.")
    ] = 1


@dataclass(frozen=True, kw_only=True)
class ExpertMoves:
    """What a move costs, and when it is worth it."""

    PANEL: ClassVar[str] = "Migration"

    current: Annotated[
        Path | None,
        typer.Option(help="Expert plan to migrate from. Default: experts in order, without replicas."),
    ] = None
    horizon: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps within which a move must break even.")] = (
        1000
    )
    expert_bytes: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_INTEGER, help="Weights and optimizer state of an expert. Default: from the profile."
        ),
    ] = None
    bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s of a rank's link. Default: from the profile, or unlimited.")
    ] = None


@grouped
def experts(
    *,
    source: SourceArgument,
    ranks: ExpertRanks,
    moves: ExpertMoves,
    memory: MemoryOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write the plan to.")] = None,
    costs: CostOptions,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Place the experts of each layer on ranks, with replicas of the hot ones.

    Reads the tokens per expert of a profile. The largest load of a rank is compared with a proven lower bound. Ranks
    without memory for all replicas get fewer.
    """
    from ..costs.expert_loads import expert_loads
    from ..formats.expert_plan import encode_expert_plan
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path

    path = profile_path(source)
    loads = expert_loads(read_profile(path), str(path), window=costs.window, at_step=costs.at_step)
    plan = _plan(source, loads, ranks, moves, costs, memory)
    write_plan(lambda name: encode_expert_plan(plan, name), output, output_format)
    if output_format is not Format.JSON:
        _show(plan)


def _plan(
    source: Path, loads: ExpertLoads, ranks: ExpertRanks, moves: ExpertMoves, costs: CostOptions, memory: str | None
) -> ExpertPlan:
    from .._common.errors import UsageError
    from ..formats.expert_plan import read_expert_plan
    from ..planning.expert_memory import ExpertMemory
    from ..planning.expert_plan import ExpertOptions, make_expert_plan

    header = loads.header
    number = header.expert_parallel_size if ranks.ranks is None else ranks.ranks
    current = None
    if moves.current is not None:
        base = read_expert_plan(moves.current)
        if base.num_ranks != number:
            raise UsageError(f"{moves.current}: is for {base.num_ranks} ranks; use --ranks {base.num_ranks}")
        current = {layer.item: layer.ranks for layer in base.layers}
    try:
        loaded = costs.load(source)
    except UsageError as error:
        print_message(f"warning: moves are not weighed against their cost, replicas not against the memory: {error}")
        loaded = None
    measured = None if loaded is None else loaded.costs
    step_ns = {
        item.name: 0
        if measured is None
        else (measured.forward_ns[at] + measured.backward_input_ns[at] + measured.backward_weight_ns[at])
        * header.microbatches
        for at, item in enumerate(header.items)
    }
    sizes = {
        # A rank's bytes of the layer, per expert that it has: a little too many, as router and norm are included.
        item.name: (item.param_bytes + item.optimizer_bytes)
        * header.expert_parallel_size
        // len(loads.tokens[item.name])
        if moves.expert_bytes is None
        else moves.expert_bytes
        for item in header.items
        if item.name in loads.tokens
    }
    measured_rate = header.replica_bandwidth or (None if header.link is None else header.link.bandwidth_bytes_per_s)
    options = ExpertOptions(
        ranks=number,
        replicas=ranks.replicas,
        shares=ranks.shares.value,
        nodes=ranks.nodes,
        groups=ranks.groups,
        horizon_steps=moves.horizon,
        bandwidth_bytes_per_s=measured_rate if moves.bandwidth is None else round(moves.bandwidth * 1e9),
        expert_bytes=sizes,
        copy_bytes=_copy_bytes(loads),
        step_ns=step_ns,
        memory=None
        if loaded is None
        else ExpertMemory(copies=_copy_costs(loads, number), workers=_worker_memory(loaded, memory)),
    )
    return make_expert_plan(loads, options, current)


def _copy_costs(loads: ExpertLoads, ranks: int) -> CopyCosts:
    """What copies would cost: as the run states it, else with weights in float32."""
    from dataclasses import replace

    from ..planning.expert_copies import CopyCosts, copy_costs, state_bytes

    header = loads.header
    stated = copy_costs(header, None)
    if stated is not None:
        return replace(stated, ranks=ranks, profiled_ranks=header.expert_parallel_size)
    # A rank's parameters of the layer, per expert that it has: a little too many, as router and norm are included.
    counts = {
        item.name: item.param_count * header.expert_parallel_size // len(loads.tokens[item.name])
        for item in header.items
        if item.name in loads.tokens
    }
    return CopyCosts(
        ranks=ranks,
        slots=0,
        weight_bytes=4,
        param_count=counts,
        state_bytes=state_bytes(header, counts),
        bandwidth=None,
        profiled_ranks=header.expert_parallel_size,
    )


def _worker_memory(loaded: ProfileSource, memory: str | None) -> tuple[WorkerMemory, ...]:
    """Peak and limit of each worker under the active plan, or with Megatron's split where it is unknown."""
    from ..inputs.problem_from_options import ProblemOptions, make_problem, problem_under_plan
    from ..partition.registry import run_balancer
    from ..planning.expert_copies import WorkerMemory
    from ..simulation.simulator import predict

    problem = make_problem(loaded, ProblemOptions(memory=memory))
    own = None if loaded.plan is None else problem_under_plan(problem, loaded.header, loaded.plan)
    if own is None or loaded.plan is None:
        own, boundaries = problem, run_balancer(problem, "uniform")
    else:
        boundaries = loaded.plan.boundaries
    stages = range(len(boundaries) - 1)
    items = [own.chain.names[boundaries[stage] : boundaries[stage + 1]] for stage in stages]
    return tuple(
        WorkerMemory(
            worker=slot.worker,
            items=tuple(name for stage in stages if own.positions[stage] == at for name in items[stage]),
            peak_bytes=peak,
            memory_bytes=slot.memory_bytes,
        )
        for at, (slot, peak) in enumerate(zip(own.slots, predict(own, boundaries).peak_memory_bytes, strict=True))
    )


def _copy_bytes(loads: ExpertLoads) -> dict[str, int]:
    """What a copy of an expert transfers in a step: weights to it, and gradients in float64 back, by item."""
    header, copies = loads.header, loads.header.expert_copies
    if copies is not None:
        return {item: count * (copies.weight_bytes + 8) for item, count in copies.param_count.items()}
    # A rank's bytes of the layer, per expert that it has, as if they were weights in float32.
    return {
        item.name: 3 * item.param_bytes * header.expert_parallel_size // len(loads.tokens[item.name])
        for item in header.items
        if item.name in loads.tokens
    }


def _show(plan: ExpertPlan) -> None:
    """Print the load of the heaviest rank of each layer as multiples of the mean."""
    from collections import Counter

    rows = []
    for layer in plan.layers:
        mean = max(1, sum(layer.tokens)) / plan.num_ranks
        hosts = Counter(expert for each in layer.ranks for expert, _ in each)
        hot = [(expert, count) for expert, count in hosts.most_common(3) if count > 1]
        rows.append(
            [
                layer.item,
                f"{layer.max_tokens_before / mean:.3f}",
                f"{layer.max_tokens / mean:.3f}",
                f"{layer.lower_bound_tokens / mean:.3f}",
                "yes" if layer.max_tokens == layer.lower_bound_tokens else "not proven",
                str(len(layer.moves)),
                human_bytes(sum(move.bytes for move in layer.moves)),
                ", ".join(f"{expert} on {count}" for expert, count in hot) or "-",
            ]
        )
    emit_table(
        f"largest / mean load of {plan.num_ranks} ranks with {plan.slots_per_rank} slots each, {plan.shares} shares",
        ["layer", "before", "planned", "bound", "optimal", "moves", "bytes", "most replicas"],
        rows,
    )
    pause = "unknown bandwidth" if plan.pause_ns is None else f"{plan.pause_ns / 1e6:,.1f} ms"
    emit(f"transfer: {human_bytes(plan.bytes)}, at most {human_bytes(plan.max_rank_bytes)} of a rank, {pause}")
    emit(plan.reason)
