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


def read_placements(path: Path, experts: Mapping[str, int], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Read the rank of each expert.

    Args:
        path: Expert plan.
        experts: Number of experts of each item of the run.
        num_ranks: Ranks that share the experts of a layer.

    Returns:
        Item -> rank of each expert.

    Raises:
        DocumentError: The plan cannot be read, is for other items, experts or ranks, or has replicas.
    """
    document = read_json(path)
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    if not problems and document["num_ranks"] != num_ranks:
        message = f"is {document['num_ranks']}; the experts of this run are on {num_ranks} ranks"
        problems.append(Problem("num_ranks", "range", message))
    placements: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate([] if problems else document["layers"]):
        where = f"layers[{index}]"
        if layer["item"] not in experts or len(layer["tokens"]) != experts[layer["item"]]:
            message = f"{short_repr(layer['item'])} with {len(layer['tokens'])} experts is not an item of this run"
            problems.append(Problem(f"{where}.item", "reference", message))
            continue
        ranks, found = _ranks_of(layer, num_ranks)
        if found is None:
            placements[layer["item"]] = ranks
        else:
            problems.append(Problem(f"{where}.ranks", "range", found))
    if problems:
        raise DocumentError(str(path), problems)
    return placements


def _ranks_of(layer: Mapping[str, Any], num_ranks: int) -> tuple[tuple[int, ...], str | None]:
    """The rank of each expert, and what is wrong with them."""
    experts, ranks = len(layer["tokens"]), layer["ranks"]
    rank_of: dict[int, int] = {}
    for rank, placed in enumerate(ranks):
        for each in placed:
            if each["expert"] in rank_of:
                return (), f"expert {each['expert']} has replicas, which training does not support; use --replicas 0"
            rank_of[each["expert"]] = rank
    if len(ranks) != num_ranks or any(len(placed) * num_ranks != experts for placed in ranks):
        return (), f"each of the {num_ranks} ranks must have {experts // num_ranks} experts"
    if set(rank_of) != set(range(experts)):
        return (), f"experts must be 0 to {experts - 1}"
    return tuple(rank_of[expert] for expert in range(experts)), None
