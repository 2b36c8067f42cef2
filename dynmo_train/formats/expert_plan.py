"""Reads expert plans: which rank of an expert-parallel group has which experts of a layer.

The format belongs to ``dynmo_balance``; the specification is ``dynmo_balance/formats/expert_plan.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.document import DocumentError, Problem, envelope_problems, read_json, short_repr
from .expert_plan_fields import DOCUMENT

FORMAT = "dynmo.expert_plan"
VERSION = 1


def read_placements(
    path: Path, experts: Mapping[str, int], num_ranks: int, slots: int | None = None
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Read the ranks of each expert.

    Args:
        path: Expert plan.
        experts: Number of experts of each item of the run.
        num_ranks: Ranks that share the experts of a layer.
        slots: Experts and copies that a rank may have; None: equal numbers of experts, and no copies.

    Returns:
        Item -> ranks of each expert, the one that computes most of its tokens first.

    Raises:
        DocumentError: The plan cannot be read, is for other items, experts or ranks, or has more than ``slots`` allow.
    """
    document = read_json(path)
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    if not problems and document["num_ranks"] != num_ranks:
        message = f"is {document['num_ranks']}; the experts of this run are on {num_ranks} ranks"
        problems.append(Problem("num_ranks", "range", message))
    placements: dict[str, tuple[tuple[int, ...], ...]] = {}
    for index, layer in enumerate([] if problems else document["layers"]):
        where = f"layers[{index}]"
        if layer["item"] not in experts or len(layer["tokens"]) != experts[layer["item"]]:
            message = f"{short_repr(layer['item'])} with {len(layer['tokens'])} experts is not an item of this run"
            problems.append(Problem(f"{where}.item", "reference", message))
            continue
        ranks, found = _ranks_of(layer, num_ranks, slots)
        if found is None:
            placements[layer["item"]] = ranks
        else:
            problems.append(Problem(f"{where}.ranks", "range", found))
    if problems:
        raise DocumentError(str(path), problems)
    return placements


def _ranks_of(
    layer: Mapping[str, Any], num_ranks: int, slots: int | None
) -> tuple[tuple[tuple[int, ...], ...], str | None]:
    """The ranks of each expert, and what is wrong with them."""
    experts, ranks = len(layer["tokens"]), layer["ranks"]
    tokens_on: dict[int, dict[int, int]] = {}
    for rank, placed in enumerate(ranks):
        for each in placed:
            on = tokens_on.setdefault(each["expert"], {})
            if on and slots is None:
                return (
                    (),
                    f"expert {each['expert']} has replicas; start the run with --moe-expert-slots, or use --replicas 0",
                )
            if rank in on:
                return (), f"rank {rank} has expert {each['expert']} twice"
            on[rank] = each["tokens"]
    if len(ranks) != num_ranks:
        return (), f"must have {num_ranks} ranks, has {len(ranks)}"
    if slots is None and any(len(placed) * num_ranks != experts for placed in ranks):
        return (), f"each of the {num_ranks} ranks must have {experts // num_ranks} experts"
    if slots is not None and (most := max(map(len, ranks))) > slots:
        return (), f"a rank has {most} experts and copies; --moe-expert-slots is {slots}"
    if set(tokens_on) != set(range(experts)):
        return (), f"experts must be 0 to {experts - 1}"
    by_tokens = [tokens_on[expert] for expert in range(experts)]
    return tuple(tuple(sorted(on, key=lambda rank: (-on[rank], rank))) for on in by_tokens), None
