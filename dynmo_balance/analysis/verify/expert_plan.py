"""Checks every number of an expert plan against the profile, with code that is independent of its solver.

Not checked are the inputs of the command that a plan does not record: bytes of an expert, and the bandwidth. They must
be the same number wherever they occur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..._common.document import Problem as Fault
from ...costs.expert_loads import expert_loads
from ...formats.expert_plan import ExpertLayer, ExpertPlan
from ...formats.profile import Segment

Ranks = Sequence[Sequence[tuple[int, int]]]


def verify_experts(
    plan: ExpertPlan, segments: Sequence[Segment], source: str, base: ExpertPlan | None, *, window: int
) -> list[Fault]:
    """Every number of an expert plan that differs from the recomputed one; empty for a correct plan.

    Args:
        plan: the plan.
        segments: of the profile.
        source: path of the profile, for errors.
        base: the plan with the placement before; None has the experts in order.
        window: step records that the tokens are the mean of.

    Raises:
        UsageError: the profile has no tokens per expert.
    """
    loads = expert_loads(segments, source, window=window, at_step=plan.read_to_step)
    faults = []
    if plan.run_id != loads.header.run_id:
        faults.append(Fault("run_id", "value", f"is {plan.run_id!r}, the profile's is {loads.header.run_id!r}"))
    if plan.read_to_step != loads.last_step:
        faults.append(_differs("read_to_step", plan.read_to_step, loads.last_step))
    names = [layer.item for layer in plan.layers]
    if names != list(loads.tokens):
        faults.append(Fault("layers", "value", f"are {names}, the profile has experts in {list(loads.tokens)}"))
        return faults
    # Every layer has the same number of slots beyond one per expert.
    spare = plan.num_ranks * plan.slots_per_rank - max(len(layer.tokens) for layer in plan.layers)
    before = {} if base is None else {layer.item: layer.ranks for layer in base.layers}
    for at, layer in enumerate(plan.layers):
        room = len(layer.tokens) + spare
        faults += _layer_faults(plan, layer, f"layers[{at}]", loads.tokens[layer.item], room)
        faults += _change_faults(plan, layer, f"layers[{at}]", before.get(layer.item))
    return faults + _migration_faults(plan)


def _differs(path: str, stated: object, found: object) -> Fault:
    return Fault(path, "value", f"is {stated}, recomputed {found}")


def _layer_faults(plan: ExpertPlan, layer: ExpertLayer, where: str, tokens: Sequence[int], room: int) -> list[Fault]:
    """Tokens, even shares, nodes and the bound; sums and the largest load are rules of the format."""
    faults = []
    if tuple(layer.tokens) != tuple(tokens):
        faults.append(_differs(f"{where}.tokens", list(layer.tokens), list(tokens)))
    bound = least_load(layer.tokens, plan.num_ranks, room)
    if layer.lower_bound_tokens != bound:
        faults.append(_differs(f"{where}.lower_bound_tokens", layer.lower_bound_tokens, bound))
    hosts: dict[int, list[tuple[int, int]]] = {}
    for rank, experts in enumerate(layer.ranks):
        for expert, part in experts:
            hosts.setdefault(expert, []).append((rank, part))
    ranks_of_node, experts_of_group = plan.num_ranks // plan.num_nodes, len(layer.tokens) // plan.num_groups
    nodes: dict[int, set[int]] = {}
    for expert, on in sorted(hosts.items()):
        parts = [part for _, part in on]
        if plan.shares == "even" and max(parts) - min(parts) > 1:
            faults.append(Fault(f"{where}.ranks", "value", f"the parts of expert {expert} are {parts}, must be even"))
        nodes.setdefault(expert // max(1, experts_of_group), set()).update(rank // ranks_of_node for rank, _ in on)
    if plan.num_nodes > 1 and plan.num_groups > 1:
        split = [group for group, on in nodes.items() if len(on) > 1]
        faults += [Fault(f"{where}.ranks", "value", f"group {group} of experts is on several nodes") for group in split]
    return faults


def least_load(tokens: Sequence[int], ranks: int, room: int) -> int:
    """No placement has a smaller largest load: the largest of three bounds.

    The mean; the smallest part size at which all parts have a slot; and without spare slots the lightest choice that a
    rank can have of any ``k * ranks + 1`` experts, of which ``k + 1`` are on one rank, next to the lightest of all.

    Args:
        tokens: of each expert.
        ranks: number of ranks.
        room: slots of all ranks.
    """
    least = -(-sum(tokens) // ranks)
    low, high = 0, max(tokens, default=0)
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(max(1, -(-count // middle)) for count in tokens) <= room
        low, high = (low, middle) if fits else (middle, high)
    least = max(least, high)
    if room == len(tokens):
        ordered, slots = sorted(tokens, reverse=True), room // ranks
        for k in range((len(ordered) - 1) // ranks + 1):
            together = ordered[k * ranks - k : k * ranks + 1]
            rest = ordered[len(ordered) - (slots - k - 1) :] if slots > k + 1 else []
            least = max(least, sum(together) + sum(rest))
    return least


def _change_faults(plan: ExpertPlan, layer: ExpertLayer, where: str, base: Ranks | None) -> list[Fault]:
    """The largest load before, and the moves."""
    before: Ranks
    if base is None:
        count = len(layer.tokens)
        cuts = [count * rank // plan.num_ranks for rank in range(plan.num_ranks + 1)]
        before = [[(e, layer.tokens[e]) for e in range(cuts[r], cuts[r + 1])] for r in range(plan.num_ranks)]
        hint = "; a plan that was made with --current needs it as --base"
    else:
        before, hint = _with_tokens(base, layer.tokens), ""
    faults = []
    largest = max(sum(part for _, part in each) for each in before)
    if layer.max_tokens_before != largest:
        message = f"is {layer.max_tokens_before}, recomputed {largest}{hint}"
        faults.append(Fault(f"{where}.max_tokens_before", "value", message))
    first: dict[int, int] = {}
    for rank, each in enumerate(before):
        for expert, _ in each:
            first.setdefault(expert, rank)
    there = [{expert for expert, _ in each} for each in before]
    needed = {
        (expert, first[expert], rank)
        for rank, each in enumerate(layer.ranks)
        for expert, _ in each
        if len(before) == plan.num_ranks and expert not in there[rank]
    }
    stated = [(move.expert, move.from_rank, move.to_rank) for move in layer.moves]
    if sorted(stated) != sorted(needed):
        message = f"are not the {len(needed)} moves that lead from the placement before to this one{hint}"
        faults.append(Fault(f"{where}.moves", "value", message))
    if len({move.bytes for move in layer.moves}) > 1:
        faults.append(Fault(f"{where}.moves", "value", "have different bytes; the experts of a layer have one size"))
    return faults


def _with_tokens(base: Ranks, tokens: Sequence[int]) -> Ranks:
    """The placement of another plan with these tokens: each rank keeps its share of an expert."""
    shares: dict[int, list[tuple[int, int]]] = {}
    for rank, each in enumerate(base):
        for expert, part in each:
            shares.setdefault(expert, []).append((rank, part))
    placed: list[list[tuple[int, int]]] = [[] for _ in base]
    for expert, on in shares.items():
        parts = [part for _, part in on]
        parts = parts if any(parts) else [1] * len(parts)
        passed = 0
        for (rank, _), part in zip(on, parts, strict=True):
            upto = tokens[expert] * (passed + part) // sum(parts)
            placed[rank].append((expert, upto - tokens[expert] * passed // sum(parts)))
            passed += part
    return placed


def _migration_faults(plan: ExpertPlan) -> list[Fault]:
    """The bytes of all moves, and those of the rank that sends or receives most."""
    ways: Mapping[str, list[int]] = {"from": [0] * plan.num_ranks, "to": [0] * plan.num_ranks}
    for layer in plan.layers:
        for move in layer.moves:
            ways["from"][move.from_rank] += move.bytes
            ways["to"][move.to_rank] += move.bytes
    total, most = sum(ways["to"]), max(ways["from"] + ways["to"])
    faults = []
    if plan.bytes != total:
        faults.append(_differs("migration.bytes", plan.bytes, total))
    if plan.max_rank_bytes != most:
        faults.append(_differs("migration.max_rank_bytes", plan.max_rank_bytes, most))
    if plan.pause_ns is not None and bool(plan.pause_ns) > bool(most):
        faults.append(_differs("migration.pause_ns", plan.pause_ns, 0))
    return faults
