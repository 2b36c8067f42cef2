"""Checks the experts of a plan: placements, tokens, moves; and derives the costs that the layers will have.

The time of a layer is that of its heaviest rank: with the plan's placement it is the measured time, multiplied by the
ratio of the two largest loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..._common.document import Problem as Fault
from ..._common.errors import DynmoError
from ...costs.cost_window import ItemCosts
from ...costs.expert_loads import expert_loads
from ...formats.plan import EXPERTS_KEY, ExpertsOfItem, Plan
from ...formats.profile import Header
from .inputs import VerifyInputs


def costs_with_experts(plan: Plan, costs: ItemCosts, header: Header) -> ItemCosts:
    """The costs of the items with the plan's placement of experts, as the plan states the loads."""
    ratio = {each.item: (each.max_tokens, each.max_tokens_before) for each in plan.experts if each.max_tokens_before}
    if not ratio:
        return costs
    tables = []
    for times in (costs.forward_ns, costs.backward_input_ns, costs.backward_weight_ns):
        found = list(times)
        for at, item in enumerate(header.items):
            if item.name in ratio:
                after, before = ratio[item.name]
                found[at] = times[at] * after // before
        tables.append(tuple(found))
    return replace(costs, forward_ns=tables[0], backward_input_ns=tables[1], backward_weight_ns=tables[2])


def expert_faults(plan: Plan, inputs: VerifyInputs, base: Plan | None) -> list[Fault]:
    """Placements that no group of ranks can have, and numbers that differ from those of the profile."""
    key = (plan.extra or {}).get(EXPERTS_KEY)
    if key is None:
        return []
    if not plan.experts:
        return [Fault(EXPERTS_KEY, "type", "must have layers, each with item and ranks")]
    header = inputs.header
    size = header.expert_parallel_size
    try:
        loads = expert_loads(inputs.segments, "profile", at_step=plan.read_to_step or None).tokens
    except DynmoError as error:
        return [Fault(EXPERTS_KEY, "reference", str(error))]
    former = {} if base is None else base.expert_placements
    faults, sent, received, moves = [], [0] * size, [0] * size, 0
    for at, layer in enumerate(plan.experts):
        where = f"{EXPERTS_KEY}.layers[{at}]"
        tokens, experts = loads.get(layer.item, ()), len(layer.ranks)
        if len(tokens) != experts or any(layer.ranks.count(rank) * size != experts for rank in range(size)):
            message = f"must give each of {size} ranks the same number of the {len(tokens)} experts of {layer.item}"
            faults.append(Fault(f"{where}.ranks", "value", message))
            continue
        before = former.get(layer.item) or tuple(expert * size // experts for expert in range(experts))
        faults += _load_faults(where, layer, tokens, before)
        of_item = next(item for item in header.items if item.name == layer.item)
        each = (of_item.param_bytes + of_item.optimizer_bytes) * size // experts
        for source, target in zip(before, layer.ranks, strict=True):
            if source != target:
                sent[source] += each
                received[target] += each
                moves += 1
    stated = (key.get("moves"), key.get("bytes"), key.get("max_rank_bytes"))
    found = (moves, sum(sent), max([*sent, *received], default=0))
    if stated != found and not faults:
        message = f"moves, bytes and largest bytes of a rank are {stated}, recomputed {found}"
        faults.append(Fault(EXPERTS_KEY, "value", message))
    return faults


def _load_faults(where: str, layer: ExpertsOfItem, tokens: Sequence[int], before: Sequence[int]) -> list[Fault]:
    if not layer.tokens:
        is_same = tuple(before) == layer.ranks
        return [] if is_same else [Fault(f"{where}.tokens", "value", "must be stated where the ranks change")]
    faults = []
    if layer.tokens != tuple(tokens):
        faults.append(Fault(f"{where}.tokens", "value", "are not those of the profile at the plan's step"))
    for name, stated, ranks in (
        ("max_tokens_before", layer.max_tokens_before, before),
        ("max_tokens", layer.max_tokens, layer.ranks),
    ):
        largest = max(sum(count for count, on in zip(tokens, ranks, strict=True) if on == rank) for rank in set(ranks))
        if stated != largest:
            faults.append(Fault(f"{where}.{name}", "value", f"is {stated}, recomputed {largest}"))
    return faults
