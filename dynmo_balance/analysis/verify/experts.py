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

Hosts = tuple[int, ...]
"""The ranks of an expert, its owner first."""


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
    slots = None if header.expert_copies is None else header.expert_copies.slots
    faults, sent, received, moves, copies = [], [0] * size, [0] * size, 0, 0
    for at, layer in enumerate(plan.experts):
        where = f"{EXPERTS_KEY}.layers[{at}]"
        tokens, experts = loads.get(layer.item, ()), len(layer.ranks)
        after = tuple(map(_hosts, layer.ranks))
        problem = _placement_problem(after, len(tokens), size, slots)
        if problem is not None:
            faults.append(Fault(f"{where}.ranks", "value", f"{layer.item}: {problem}"))
            continue
        known = former.get(layer.item) or tuple(expert * size // experts for expert in range(experts))
        before = tuple(map(_hosts, known))
        faults += _load_faults(where, layer, tokens, before)
        of_item = next(item for item in header.items if item.name == layer.item)
        each = (of_item.param_bytes + of_item.optimizer_bytes) * size // experts
        for (source, *rest), (target, *others) in zip(before, after, strict=True):
            if source != target:
                sent[source] += each
                received[target] += each
                moves += 1
            copies += len({*others} - {source, *rest})
    # Plans of earlier versions have no copies.
    stated = (key.get("moves"), key.get("bytes"), key.get("max_rank_bytes"), key.get("copies", 0))
    found = (moves, sum(sent), max([*sent, *received], default=0), copies)
    if stated != found and not faults:
        message = f"moves, bytes, largest bytes of a rank and copies are {stated}, recomputed {found}"
        faults.append(Fault(EXPERTS_KEY, "value", message))
    return faults


def _hosts(placed: int | Hosts) -> Hosts:
    """The ranks of an expert, its owner first."""
    return placed if isinstance(placed, tuple) else (placed,)


def _placement_problem(hosts: Sequence[Hosts], experts: int, ranks: int, slots: int | None) -> str | None:
    """What is wrong with a placement in a run with this number of slots, or without (None)."""
    if slots is None:
        if len(hosts) == experts and all(hosts.count((rank,)) * ranks == experts for rank in range(ranks)):
            return None
        return f"must give each of {ranks} ranks the same number of the {experts} experts"
    if len(hosts) != experts or any(not on or len({*on}) < len(on) or not {*on} <= {*range(ranks)} for on in hosts):
        return f"must give each of the {experts} experts different ones of {ranks} ranks"
    most = max(sum(rank in on for on in hosts) for rank in range(ranks))
    return f"a rank has {most} experts and copies; the run has {slots} slots" if most > slots else None


def _largest(tokens: Sequence[int], hosts: Sequence[Hosts]) -> int:
    """Tokens of the heaviest rank; those of an expert are split evenly over its ranks, in their order."""
    loads: dict[int, int] = {}
    for count, on in zip(tokens, hosts, strict=True):
        done = 0
        for number, rank in enumerate(sorted(on), start=1):
            end = count * number // len(on)
            loads[rank] = loads.get(rank, 0) + end - done
            done = end
    return max(loads.values())


def _load_faults(where: str, layer: ExpertsOfItem, tokens: Sequence[int], before: Sequence[Hosts]) -> list[Fault]:
    after = tuple(map(_hosts, layer.ranks))
    if not layer.tokens:
        is_same = tuple(before) == after
        return [] if is_same else [Fault(f"{where}.tokens", "value", "must be stated where the ranks change")]
    faults = []
    if layer.tokens != tuple(tokens):
        faults.append(Fault(f"{where}.tokens", "value", "are not those of the profile at the plan's step"))
    for name, stated, ranks in (
        ("max_tokens_before", layer.max_tokens_before, before),
        ("max_tokens", layer.max_tokens, after),
    ):
        largest = _largest(tokens, ranks)
        if stated != largest:
            faults.append(Fault(f"{where}.{name}", "value", f"is {stated}, recomputed {largest}"))
    return faults
