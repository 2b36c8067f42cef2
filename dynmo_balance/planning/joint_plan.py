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

The time of a layer is taken as proportional to its largest number of tokens, as in ``expert_plan``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..costs.cost_window import ItemCosts
from ..formats.plan import ExpertMoves, ExpertsOfItem, Plan
from ..formats.profile import Header
from ..partition.balance import certify, solve_best
from ..partition.experts import EVEN, ExpertProblem, place
from ..partition.problem import PartitionProblem
from .migration import BASE_PAUSE_NS
from .plan_builder import Proposal, make_proposal, propose

Placement = tuple[int, ...]
"""The rank of each expert."""


@dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Another placement of the experts of one layer.

    Attributes:
        item: the layer's item.
        tokens: of each expert in a step.
        before, after: the rank of each expert.
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
        """The rank before and after of each expert that moves."""
        return tuple((a, b) for a, b in zip(self.before, self.after, strict=True) if a != b)


@dataclass(frozen=True, kw_only=True)
class JointOptions:
    """How the candidates are made and compared.

    Attributes:
        balancer, objective: of the partitions.
        horizon_steps: steps that the plan is expected to last.
        base_pause_ns: pause in ns of a migration apart from transfers, if measured.
        penalty: factor on pauses.
        bandwidth: bytes per second between the ranks that share experts; None is unlimited.
    """

    balancer: str
    objective: str
    horizon_steps: int
    base_pause_ns: int | None
    penalty: float
    bandwidth: int | None


def max_tokens(tokens: Sequence[int], placement: Sequence[int]) -> int:
    """Tokens of the heaviest rank, of the tokens and the rank of each expert."""
    loads: Counter[int] = Counter()
    for count, rank in zip(tokens, placement, strict=True):
        loads[rank] += count
    return max(loads.values(), default=0)


def placement_in_order(experts: int, ranks: int) -> Placement:
    """Where a run starts: the experts in order, the same number on each rank.

    Args:
        experts: number of experts of a layer.
        ranks: number of ranks that share them.
    """
    return tuple(expert * ranks // experts for expert in range(experts))


def expert_choices(header: Header, tokens: Mapping[str, Sequence[int]], base: Plan) -> tuple[ExpertChoice, ...]:
    """The layers whose heaviest rank would have fewer tokens with another placement.

    Args:
        header: of the segment; its expert-parallel size is the number of ranks.
        tokens: of each expert in a step, by item.
        base: the active plan, which has the placements.
    """
    ranks, size = header.expert_parallel_size, {item.name: item for item in header.items}
    choices = []
    for item, counts in tokens.items():
        if item not in size or ranks < 2 or len(counts) % ranks:
            continue
        known = base.expert_placements.get(item)
        before = known if known is not None and len(known) == len(counts) else placement_in_order(len(counts), ranks)
        problem = ExpertProblem(tokens=tuple(counts), ranks=ranks, slots=len(counts) // ranks, shares=EVEN)
        now = tuple(
            tuple((expert, counts[expert]) for expert, on in enumerate(before) if on == rank) for rank in range(ranks)
        )
        rank_of = {expert: rank for rank, each in enumerate(place(problem, now).ranks) for expert, _ in each}
        choice = ExpertChoice(
            item=item,
            tokens=tuple(counts),
            before=before,
            after=tuple(rank_of[expert] for expert in range(len(counts))),
            # A rank's bytes of the layer by its experts: a little too many, as router and norm are included.
            expert_bytes=(size[item].param_bytes + size[item].optimizer_bytes) * ranks // len(counts),
        )
        if choice.max_tokens < choice.max_tokens_before:
            choices.append(choice)
    return tuple(choices)


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
    moves = 0
    for choice in choices:
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
    if not choices:
        return layers, ()
    balanced = with_experts(problem, choices)
    pause = options.base_pause_ns
    both = propose(balanced, options.balancer, objective=options.objective, owner=base.owner, base_pause_ns=pause)

    def at(boundaries: tuple[int, ...], chosen: Sequence[ExpertChoice]) -> Proposal:
        now = with_experts(problem, chosen)
        solution = replace(certify(now, boundaries, solve_best(now)), objective=both.solution.objective)
        return make_proposal(now, solution, owner=base.owner, base_pause_ns=pause)

    def cost_ns(proposal: Proposal, chosen: Sequence[ExpertChoice]) -> float:
        return options.horizon_steps * proposal.timeline.step_ns + options.penalty * pause_of(proposal, chosen, options)

    stay = at(base.boundaries, ())
    found = min(
        ((stay, ()), (layers, ()), (at(base.boundaries, choices), tuple(choices)), (both, tuple(choices))),
        key=lambda candidate: cost_ns(*candidate),
    )
    proposal, chosen = found
    if not chosen:
        return layers, ()
    # A layer on a stage that others wait for anyway gains nothing; its experts may stay. The least gain comes first.
    for choice in sorted(chosen, key=lambda each: each.max_tokens_before - each.max_tokens):
        fewer = tuple(each for each in chosen if each is not choice)
        other = at(proposal.solution.boundaries, fewer)
        if cost_ns(other, fewer) <= cost_ns(proposal, chosen):
            proposal, chosen = other, fewer
    return (proposal, chosen) if chosen else (layers, ())


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
