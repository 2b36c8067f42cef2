"""Expert plans: a placement per layer, weighed against what it costs to move the experts there.

Of each layer placements compete, over the steps of a horizon::

    experts stay, only the shares of replicas change  ---+
    the placement of the least largest load           ---+--> steps x time of the layer + transfer --> the smaller

A replica is not free in training: in each step it receives the weights of its expert, and sends their gradients. So
placements with fewer replicas than there are slots compete too, where times and bandwidth are known. Ranks whose memory
the replicas would exceed get fewer (``expert_memory``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .._common.errors import UsageError
from ..costs.expert_loads import ExpertLoads
from ..formats.expert_plan import ExpertLayer, ExpertMove, ExpertPlan
from ..partition.experts import (
    ExpertProblem,
    Ranks,
    contiguous,
    fits,
    loads_of,
    lower_bound,
    moves,
    place,
    shares_on,
)
from .expert_copies import FullRank
from .expert_memory import ExpertMemory, PlacedLayer, describe, within_memory


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Ranks and costs of a plan; the units of the names.

    Attributes:
        ranks: Ranks that share the experts of a layer.
        replicas: Slots of all ranks together beyond one per expert.
        shares: ``even`` or ``free``.
        nodes, groups: Of the hierarchical form.
        horizon_steps: Steps within which a move must break even.
        bandwidth_bytes_per_s: Of a rank's link; None is unlimited.
        expert_bytes: Weights and optimizer state of one expert, by item.
        copy_bytes: What a replica of an expert transfers in a step: weights and gradients, by item.
        step_ns: Time of each item in a step with the placement before; 0 where it is unknown, and moves cost nothing.
        memory: Of the ranks; None limits no replicas.
    """

    ranks: int
    replicas: int
    shares: str
    nodes: int
    groups: int
    horizon_steps: int
    bandwidth_bytes_per_s: int | None
    expert_bytes: Mapping[str, int]
    copy_bytes: Mapping[str, int]
    step_ns: Mapping[str, int]
    memory: ExpertMemory | None = None


def make_expert_plan(
    loads: ExpertLoads, options: ExpertOptions, current: Mapping[str, Ranks] | None = None
) -> ExpertPlan:
    """Plan the experts of all layers.

    Args:
        loads: Tokens of each expert.
        options: Ranks and costs.
        current: Placement of each item now; layers that are not in it have their experts in order, without replicas.

    Raises:
        UsageError: The experts do not fit the ranks or their memory.
    """
    placed = {
        item: _place_layer(item, tokens, options, (current or {}).get(item)) for item, tokens in loads.tokens.items()
    }
    full: list[FullRank] = []
    if options.memory is not None:
        placed, full = within_memory(placed, options.memory, options.step_ns)
    layers = [_to_layer(item, layer, options) for item, layer in placed.items()]
    sent, received = _rank_bytes([move for layer in layers for move in layer.moves])
    largest = max([*sent.values(), *received.values()], default=0)
    rate = options.bandwidth_bytes_per_s
    number = sum(len(layer.moves) for layer in layers)
    return ExpertPlan(
        run_id=loads.header.run_id,
        read_to_step=loads.last_step,
        num_ranks=options.ranks,
        slots_per_rank=max(_slots(item, len(tokens), options) for item, tokens in loads.tokens.items()),
        num_nodes=options.nodes,
        num_groups=options.groups,
        shares=options.shares,
        layers=tuple(layers),
        bytes=sum(sent.values()),
        max_rank_bytes=largest,
        pause_ns=None if rate is None else largest * 1_000_000_000 // rate,
        reason="; ".join([_reason(layers, number), *_limits(full)]),
    )


def _reason(layers: Sequence[ExpertLayer], number: int) -> str:
    before = sum(layer.max_tokens_before for layer in layers)
    after = sum(layer.max_tokens for layer in layers)
    change = f"the heaviest ranks compute {after:,} instead of {before:,} tokens in a step, over all layers"
    if not number:
        return f"no expert moves; {change}" if after != before else "no expert moves"
    return f"{number} {'expert moves' if number == 1 else 'experts move'}; {change}"


def _limits(full: Sequence[FullRank]) -> list[str]:
    """A sentence on the ranks that have no room for all replicas; nothing where there are none."""
    if not full:
        return []
    others = len(full) - 1
    more = f", and {others} more {'rank' if others == 1 else 'ranks'}" if others else ""
    return [f"fewer replicas, with all of which {describe(full[0])}{more}"]


def _slots(item: str, experts: int, options: ExpertOptions) -> int:
    slots, rest = divmod(experts + options.replicas, options.ranks)
    if rest:
        fitting = options.replicas + options.ranks - rest
        raise UsageError(
            f"{item}: {experts} experts and {options.replicas} replicas do not divide into {options.ranks} ranks;"
            f" use --replicas {fitting}"
        )
    return slots


def _place_layer(item: str, tokens: tuple[int, ...], options: ExpertOptions, current: Ranks | None) -> PlacedLayer:
    problem = ExpertProblem(
        tokens=tokens,
        ranks=options.ranks,
        slots=_slots(item, len(tokens), options),
        shares=options.shares,
        nodes=options.nodes,
        groups=options.groups,
    )
    if current is not None and {e for each in current for e, _ in each} != set(range(len(tokens))):
        raise UsageError(f"{item}: the current placement does not have the layer's {len(tokens)} experts")
    before = contiguous(problem) if current is None else _with_former_shares(problem, current)
    choices = [place(each, before).ranks for each in _with_fewer_slots(problem, item, options)]
    # Experts that stay must satisfy the same limits, and those of nodes are not checked for a foreign placement.
    if len(before) == problem.ranks and fits(problem, before) and not problem.is_hierarchical:
        choices.append(shares_on(problem, before))
    largest_before = max(loads_of(before))

    def cost_ns(ranks: Ranks) -> tuple[float, int]:
        steps = options.horizon_steps * options.step_ns.get(item, 0) * max(loads_of(ranks)) / max(1, largest_before)
        copies = options.horizon_steps * _copies_ns(item, options, ranks)
        return steps + copies + _transfer_ns(item, options, before, ranks), max(loads_of(ranks))

    return PlacedLayer(problem=problem, before=before, ranks=min(choices, key=cost_ns))


def _to_layer(item: str, layer: PlacedLayer, options: ExpertOptions) -> ExpertLayer:
    return ExpertLayer(
        item=item,
        tokens=layer.problem.tokens,
        ranks=layer.ranks,
        max_tokens_before=max(loads_of(layer.before)),
        max_tokens=layer.max_tokens,
        lower_bound_tokens=lower_bound(layer.problem),
        moves=_moves(item, options, layer.before, layer.ranks),
    )


def _moves(item: str, options: ExpertOptions, before: Ranks, after: Ranks) -> tuple[ExpertMove, ...]:
    size = options.expert_bytes.get(item, 0)
    if len(before) != len(after):
        return ()
    return tuple(ExpertMove(expert=e, from_rank=a, to_rank=b, bytes=size) for e, a, b in moves(before, after))


def _transfer_ns(item: str, options: ExpertOptions, before: Ranks, after: Ranks) -> float:
    if not options.bandwidth_bytes_per_s or not options.step_ns.get(item):
        return 0.0
    sent, received = _rank_bytes(_moves(item, options, before, after))
    return max([*sent.values(), *received.values()], default=0) * 1e9 / options.bandwidth_bytes_per_s


def _with_fewer_slots(problem: ExpertProblem, item: str, options: ExpertOptions) -> list[ExpertProblem]:
    """The problem, and where copies have a price also those with fewer slots, down to the fewest."""
    fewest = -(-len(problem.tokens) // problem.ranks)
    has_price = options.bandwidth_bytes_per_s and options.step_ns.get(item) and options.copy_bytes.get(item)
    slots = range(problem.slots, fewest - 1, -1) if has_price else (problem.slots,)
    return [replace(problem, slots=each) for each in slots]


def _copies_ns(item: str, options: ExpertOptions, ranks: Ranks) -> float:
    """Time in a step of the rank that sends or receives most weights and gradients of replicas."""
    if not options.bandwidth_bytes_per_s or not options.step_ns.get(item):
        return 0.0
    hosts = Counter(expert for each in ranks for expert, _ in each)
    # The owner of an expert is not known here; each of its ranks may be it.
    most = max(sum(hosts[expert] - 1 for expert, _ in each) for each in ranks)
    return most * options.copy_bytes.get(item, 0) * 1e9 / options.bandwidth_bytes_per_s


def _rank_bytes(found: Sequence[ExpertMove]) -> tuple[Counter[int], Counter[int]]:
    """Bytes that each rank sends, and bytes that each receives; both directions transfer at the same time."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for move in found:
        sent[move.from_rank] += move.bytes
        received[move.to_rank] += move.bytes
    return sent, received


def _with_former_shares(problem: ExpertProblem, current: Ranks) -> Ranks:
    """The current placement with the new tokens: each replica keeps its share of its expert."""
    totals: Counter[int] = Counter()
    for each in current:
        for expert, tokens in each:
            totals[expert] += tokens
    hosts = Counter(expert for each in current for expert, _ in each)
    passed: Counter[int] = Counter()
    ranks = []
    for each in current:
        shares = []
        for expert, tokens in each:
            # Equal shares of an expert that had no tokens.
            part, whole = (tokens, totals[expert]) if totals[expert] else (1, hosts[expert])
            start = passed[expert]
            passed[expert] += part
            now = problem.tokens[expert]
            shares.append((expert, now * (start + part) // whole - now * start // whole))
        ranks.append(tuple(shares))
    return tuple(ranks)
