"""One plan for layers and experts: which experts move to another rank of their group, which layers to another stage.

Layers that move whole balance the stages. They do not balance the ranks that share the experts of a layer, and the
heaviest of these ranks sets the time of the layer. Balancing the ranks makes layers faster, and so changes which
partition is best::

    costs, tokens per expert --expert_choices--> layers whose heaviest rank would have fewer tokens
                                                      |
         layers move      costs as measured           |
         experts move     costs x tokens, same stages -+--> horizon x step + pause, the least
         both             costs x tokens, best stages -+
                                                      |  experts stay where their move shortens no step
                                                      v
                                             Proposal with its ExpertChoices

The time of a layer is taken as proportional to its largest number of tokens, as in ``expert_plan``. In runs with slots
for copies an expert may be on several ranks (``expert_copies``): a plan must be worth the transfers of its copies in
every step, and a rank whose memory they would exceed gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..costs.cost_window import ItemCosts
from ..formats.plan import ExpertMoves, ExpertsOfItem, Plan, Stage
from ..formats.profile import Header
from ..partition.balance import certify, solve_best
from ..partition.experts import EVEN, ExpertProblem, place
from ..partition.problem import PartitionProblem
from .expert_copies import (
    CopyCosts,
    FullRank,
    Placement,
    WorkerMemory,
    full_ranks,
    hosts_of,
    loads_on,
    on_ranks,
    with_copies,
    without_copies,
)
from .migration import BASE_PAUSE_NS
from .plan_builder import Proposal, make_proposal, propose


@dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Another placement of the experts of one layer.

    Attributes:
        item: the layer's item.
        tokens: of each expert in a step.
        before, after: the rank of each expert, or its ranks with its owner first.
        expert_bytes: weights and optimizer state of an expert.
    """

    item: str
    tokens: tuple[int, ...]
    before: Placement
    after: Placement
    expert_bytes: int

    @property
    def max_tokens_before(self) -> int:
        """Tokens of the heaviest rank before."""
        return max_tokens(self.tokens, self.before)

    @property
    def max_tokens(self) -> int:
        """Tokens of the heaviest rank after."""
        return max_tokens(self.tokens, self.after)

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """The rank before and after of each expert whose owner changes."""
        owners = zip(map(hosts_of, self.before), map(hosts_of, self.after), strict=True)
        return tuple((a[0], b[0]) for a, b in owners if a[0] != b[0])

    @property
    def num_copies(self) -> int:
        """Number of copies that ranks get which did not have the expert."""
        hosts = zip(map(hosts_of, self.before), map(hosts_of, self.after), strict=True)
        return sum(len(set(after[1:]) - set(before)) for before, after in hosts)


@dataclass(frozen=True, kw_only=True)
class JointOptions:
    """How the candidates are made and compared.

    Attributes:
        balancer, objective: of the partitions.
        horizon_steps: steps that the plan is expected to last.
        base_pause_ns: pause in ns of a migration apart from transfers, if measured.
        penalty: factor on pauses.
        bandwidth: bytes per second between the ranks that share experts; None is unlimited.
        copies: what copies of experts cost; None where the run has none.
    """

    balancer: str
    objective: str
    horizon_steps: int
    base_pause_ns: int | None
    penalty: float
    bandwidth: int | None
    copies: CopyCosts | None = None


def max_tokens(tokens: Sequence[int], placement: Placement) -> int:
    """Tokens of the heaviest rank, of the tokens and the ranks of each expert."""
    return max(loads_on(tokens, placement).values(), default=0)


def placement_in_order(experts: int, ranks: int) -> Placement:
    """Where a run starts: the experts in order, the same number on each rank.

    Args:
        experts: number of experts of a layer.
        ranks: number of ranks that share them.
    """
    return tuple(expert * ranks // experts for expert in range(experts))


def expert_choices(
    header: Header,
    tokens: Mapping[str, Sequence[int]],
    base: Plan,
    copies: CopyCosts | None = None,
    step_ns: Mapping[str, int] | None = None,
) -> tuple[ExpertChoice, ...]:
    """The layers whose heaviest rank would have fewer tokens, or whose copies would cost less, with another placement.

    Args:
        header: of the segment; its expert-parallel size is the number of ranks.
        tokens: of each expert in a step, by item.
        base: the active plan, which has the placements.
        copies: what copies of experts cost; None places each expert on one rank, the same number on each.
        step_ns: time of each item in a step with the placements of ``base``; needed to weigh copies.
    """
    ranks, size = header.expert_parallel_size, {item.name: item for item in header.items}
    choices = []
    for item, counts in tokens.items():
        if item not in size or ranks < 2 or len(counts) % ranks:
            continue
        known = base.expert_placements.get(item)
        before = known if known is not None and len(known) == len(counts) else placement_in_order(len(counts), ranks)
        of_item_ns = (step_ns or {}).get(item, 0)
        if copies is None:
            after = _on_one_rank(counts, before, ranks)
        else:
            after = with_copies(item, counts, before, copies, of_item_ns)
        choice = ExpertChoice(
            item=item,
            tokens=tuple(counts),
            before=before,
            after=after,
            # A rank's bytes of the layer by its experts: a little too many, as router and norm are included.
            expert_bytes=(size[item].param_bytes + size[item].optimizer_bytes) * ranks // len(counts),
        )
        if choice.max_tokens < choice.max_tokens_before or _costs_less(choice, copies, of_item_ns):
            choices.append(choice)
    return tuple(choices)


def _on_one_rank(tokens: Sequence[int], before: Placement, ranks: int) -> Placement:
    """The placement with the least largest load, each expert on one rank and the same number on each."""
    problem = ExpertProblem(tokens=tuple(tokens), ranks=ranks, slots=len(tokens) // ranks, shares=EVEN)
    rank_of = {
        expert: rank
        for rank, each in enumerate(place(problem, on_ranks(tokens, before, ranks)).ranks)
        for expert, _ in each
    }
    return tuple(rank_of[expert] for expert in range(len(tokens)))


def _costs_less(choice: ExpertChoice, copies: CopyCosts | None, step_ns: int) -> bool:
    """Whether fewer transfers of copies are worth a heavier rank."""
    if copies is None:
        return False
    before, after = (copies.copies_ns(choice.item, each) for each in (choice.before, choice.after))
    return step_ns * choice.max_tokens // max(1, choice.max_tokens_before) + after < step_ns + before


def with_experts(problem: PartitionProblem, choices: Iterable[ExpertChoice]) -> PartitionProblem:
    """The problem with the costs that the layers of ``choices`` will have."""
    costs = scaled_costs(
        problem.chain.costs,
        problem.chain.names,
        {choice.item: (choice.max_tokens, choice.max_tokens_before) for choice in choices},
    )
    return replace(problem, chain=replace(problem.chain, costs=costs))


def scaled_costs(costs: ItemCosts, names: Sequence[str], factors: Mapping[str, tuple[int, int]]) -> ItemCosts:
    """Costs whose times are multiplied by a fraction, rounded down, for the items that have one.

    Args:
        costs: of all items.
        names: of all items.
        factors: numerator and denominator by item.
    """

    def scaled(times: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            ns * factors[name][0] // factors[name][1] if name in factors else ns
            for name, ns in zip(names, times, strict=True)
        )

    return replace(
        costs,
        forward_ns=scaled(costs.forward_ns),
        backward_input_ns=scaled(costs.backward_input_ns),
        backward_weight_ns=scaled(costs.backward_weight_ns),
    )


def transfer_of(choices: Iterable[ExpertChoice], bandwidth: int | None) -> ExpertMoves:
    """What the moves of experts transfer; a rank sends and receives at the same time.

    Args:
        choices: placements of layers, on the ranks of one pipeline rank or of several.
        bandwidth: bytes per second of a rank; None is unlimited.
    """
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    moves = copies = 0
    for choice in choices:
        copies += choice.num_copies
        for source, target in choice.moved:
            sent[source] += choice.expert_bytes
            received[target] += choice.expert_bytes
            moves += 1
    largest = max([*sent.values(), *received.values()], default=0)
    return ExpertMoves(
        moves=moves,
        bytes=sum(sent.values()),
        max_rank_bytes=largest,
        pause_ns=largest * 1_000_000_000 // bandwidth if bandwidth else 0,
        copies=copies,
    )


def weigh_experts(
    problem: PartitionProblem,
    layers: Proposal,
    base: Plan,
    choices: Sequence[ExpertChoice],
    options: JointOptions,
) -> tuple[Proposal, tuple[ExpertChoice, ...]]:
    """The best of: layers move, experts move, both move, nothing moves.

    Args:
        problem: with the costs as measured.
        layers: the proposal without moves of experts.
        base: the active plan.
        choices: of ``expert_choices``.
        options: how candidates are made and compared.

    Returns:
        the proposal, and the placements that it needs; ``layers`` without placements where experts should stay.
    """
    pause = options.base_pause_ns

    def at(boundaries: tuple[int, ...], chosen: Sequence[ExpertChoice], objective: str) -> Proposal:
        now = with_experts(problem, chosen)
        solution = replace(certify(now, boundaries, solve_best(now)), objective=objective)
        return make_proposal(now, solution, owner=base.owner, base_pause_ns=pause)

    def cost_ns(proposal: Proposal, chosen: Sequence[ExpertChoice]) -> float:
        step_ns = proposal.timeline.step_ns + copies_ns(proposal.stages, base, chosen, options.copies)
        return options.horizon_steps * step_ns + options.penalty * pause_of(proposal, chosen, options)

    def fits(proposal: Proposal, chosen: Sequence[ExpertChoice]) -> bool:
        return not ranks_without_memory(proposal, base, chosen, options.copies)

    def without_experts() -> Proposal:
        # Layers take copies of their experts along, for which the new worker may have no memory.
        return layers if fits(layers, ()) else at(base.boundaries, (), layers.solution.objective)

    if not choices:
        return without_experts(), ()
    balanced = with_experts(problem, choices)
    both = propose(balanced, options.balancer, objective=options.objective, owner=base.owner, base_pause_ns=pause)
    objective = both.solution.objective
    candidates: list[tuple[Proposal, tuple[ExpertChoice, ...]]] = [(at(base.boundaries, (), objective), ())]
    others = [(layers, ()), (at(base.boundaries, choices, objective), tuple(choices)), (both, tuple(choices))]
    for proposal, chosen in others:
        limited = limit_copies(proposal, base, chosen, options.copies)
        if limited != chosen:
            proposal = at(proposal.solution.boundaries, limited, objective)
        if fits(proposal, limited):
            candidates.append((proposal, limited))
    proposal, chosen = min(candidates, key=lambda candidate: cost_ns(*candidate))
    # A layer on a stage that others wait for anyway gains nothing; its experts may stay. The least gain comes first.
    for choice in sorted(chosen, key=lambda each: each.max_tokens_before - each.max_tokens):
        fewer = tuple(each for each in chosen if each is not choice)
        other = at(proposal.solution.boundaries, fewer, objective)
        if cost_ns(other, fewer) <= cost_ns(proposal, chosen) and fits(other, fewer):
            proposal, chosen = other, fewer
    return (proposal, chosen) if chosen else (without_experts(), ())


def placements_after(base: Plan, chosen: Iterable[ExpertChoice]) -> dict[str, Placement]:
    """The placements that a plan leads to; items with experts in order that no plan placed are not included."""
    return {**base.expert_placements, **{choice.item: choice.after for choice in chosen}}


def copies_ns(stages: Sequence[Stage], base: Plan, chosen: Sequence[ExpertChoice], copies: CopyCosts | None) -> int:
    """Time in a step, in ns, of the transfers of copies, on the worker with the most of them.

    Args:
        stages: of the plan.
        base: the active plan, which has the placements of the layers that are not in ``chosen``.
        chosen: placements that change.
        copies: what copies cost; None where the run has none.
    """
    if copies is None:
        return 0
    placed, of_worker = placements_after(base, chosen), Counter[int]()
    for stage in stages:
        of_worker[stage.worker] += sum(copies.copies_ns(item, placed[item]) for item in stage.items if item in placed)
    return max(of_worker.values(), default=0)


def ranks_without_memory(
    proposal: Proposal, base: Plan, chosen: Sequence[ExpertChoice], copies: CopyCosts | None
) -> list[FullRank]:
    """The ranks whose memory the experts and copies would exceed.

    Args:
        proposal: stages and their peaks, without copies.
        base: the active plan, which has the placements of the layers that are not in ``chosen``.
        chosen: placements that change.
        copies: what copies cost; None where the run has none.
    """
    placed = placements_after(base, chosen)
    # Layers of one run have the same number of experts; where no plan placed any, there are no copies.
    experts = max(map(len, placed.values()), default=0)
    if copies is None or not experts:
        return []
    in_order = placement_in_order(experts, copies.ranks)
    everywhere = {item: placed.get(item, in_order) for item in copies.param_count}
    workers = [
        WorkerMemory(
            worker=slot.worker,
            items=tuple(item for stage in proposal.stages if stage.worker == slot.worker for item in stage.items),
            peak_bytes=peak,
            memory_bytes=slot.memory_bytes,
        )
        for slot, peak in zip(proposal.problem.slots, proposal.timeline.peak_memory_bytes, strict=True)
    ]
    return full_ranks(workers, everywhere, copies)


def describe_missing_memory(found: Sequence[FullRank]) -> str:
    """One sentence on the result of :func:`ranks_without_memory`; empty where it is."""
    if not found:
        return ""
    worker, rank, needed, limit = found[0]
    others = len(found) - 1
    more = f"; {others} more {'rank gets' if others == 1 else 'ranks get'} none either" if others else ""
    return (
        f"rank {rank} of the experts of worker {worker} gets no copies, with which it would need {needed:,} bytes of"
        f" {limit:,}{more}"
    )


def limit_copies(
    proposal: Proposal, base: Plan, chosen: tuple[ExpertChoice, ...], copies: CopyCosts | None
) -> tuple[ExpertChoice, ...]:
    """The placements, without new copies on ranks whose memory they would exceed; those that then gain nothing stay.

    Args:
        proposal: stages and their peaks, without copies.
        base: the active plan.
        chosen: placements that change.
        copies: what copies cost; None where the run has none.
    """
    full = [(worker, rank) for worker, rank, _, _ in ranks_without_memory(proposal, base, chosen, copies)]
    worker_of = {item: stage.worker for stage in proposal.stages for item in stage.items}
    limited = []
    for choice in chosen:
        after = choice.after
        for worker, rank in full:
            after = without_copies(after, rank) if worker == worker_of[choice.item] else after
        other = choice if after == choice.after else replace(choice, after=after)
        if other is choice or other.max_tokens < other.max_tokens_before:
            limited.append(other)
    return tuple(limited)


def pause_of(proposal: Proposal, choices: Sequence[ExpertChoice], options: JointOptions) -> int:
    """The pause in ns of a proposal's moves of layers, and of the moves of experts."""
    pause = proposal.migration.pause_ns or 0
    if not choices:
        return pause
    # Both migrations are announced and verified at one boundary.
    base = BASE_PAUSE_NS if options.base_pause_ns is None else options.base_pause_ns
    return (pause or base) + (transfer_of(choices, options.bandwidth).pause_ns or 0)


def experts_of_plan(
    base: Plan | None, choices: Sequence[ExpertChoice], bandwidth: int | None
) -> tuple[tuple[ExpertsOfItem, ...], ExpertMoves]:
    """The placements of a plan: those of its base, but for the layers of ``choices``; and what moves.

    Args:
        base: the active plan; None if there is none.
        choices: the placements that change.
        bandwidth: bytes per second between the ranks that share experts; None is unlimited.
    """
    former = {} if base is None else dict(base.expert_placements)
    changed = {choice.item: choice for choice in choices}
    items = [ExpertsOfItem(item=item, ranks=ranks) for item, ranks in former.items() if item not in changed]
    items += [
        ExpertsOfItem(
            item=choice.item,
            ranks=choice.after,
            tokens=choice.tokens,
            max_tokens_before=choice.max_tokens_before,
            max_tokens=choice.max_tokens,
        )
        for choice in choices
    ]
    return tuple(items), transfer_of(choices, bandwidth)
