"""Expert plans: read, validate, write. The specification is ``expert_plan.md`` in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import __version__
from .._common.document import (
    DocumentError,
    Problem,
    encode_json,
    envelope,
    envelope_problems,
    own_document,
    parse_json,
    read_json,
)
from .expert_plan_fields import DOCUMENT

FORMAT = "dynmo.expert_plan"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ExpertMove:
    """Weights and optimizer state of an expert that a rank gets."""

    expert: int
    from_rank: int
    to_rank: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The experts of one layer; ``ranks`` has for each rank its ``(expert, tokens)``, ascending."""

    item: str
    tokens: tuple[int, ...]
    ranks: tuple[tuple[tuple[int, int], ...], ...]
    max_tokens_before: int
    max_tokens: int
    lower_bound_tokens: int
    moves: tuple[ExpertMove, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """One expert plan; the fields are those of ``expert_plan.md``."""

    run_id: str
    read_to_step: int
    num_ranks: int
    slots_per_rank: int
    num_nodes: int
    num_groups: int
    shares: str
    layers: tuple[ExpertLayer, ...]
    bytes: int
    max_rank_bytes: int
    pause_ns: int | None
    reason: str


def to_document(plan: ExpertPlan) -> dict[str, Any]:
    """The JSON document of an expert plan, created now."""
    return {
        **envelope(FORMAT, VERSION, f"dynmo-plan {__version__}"),
        "run_id": plan.run_id,
        "read_to_step": plan.read_to_step,
        "num_ranks": plan.num_ranks,
        "slots_per_rank": plan.slots_per_rank,
        "num_nodes": plan.num_nodes,
        "num_groups": plan.num_groups,
        "shares": plan.shares,
        "layers": [_layer_document(layer) for layer in plan.layers],
        "migration": {"bytes": plan.bytes, "max_rank_bytes": plan.max_rank_bytes, "pause_ns": plan.pause_ns},
        "reason": plan.reason,
    }


def _layer_document(layer: ExpertLayer) -> dict[str, Any]:
    return {
        "item": layer.item,
        "tokens": list(layer.tokens),
        "ranks": [[{"expert": expert, "tokens": tokens} for expert, tokens in each] for each in layer.ranks],
        "max_tokens_before": layer.max_tokens_before,
        "max_tokens": layer.max_tokens,
        "lower_bound_tokens": layer.lower_bound_tokens,
        "optimal": layer.max_tokens == layer.lower_bound_tokens,
        "moves": [dict(vars(move)) for move in layer.moves],
    }


def encode_expert_plan(plan: ExpertPlan, source: str) -> bytes:
    """The bytes of an expert plan's document.

    Raises:
        WriterError: the document violates the format that readers check.
    """
    with own_document():
        parse_expert_plan(parse_json(payload := encode_json(to_document(plan))), source)
    return payload


def parse_expert_plan(document: Any, source: str) -> ExpertPlan:
    """The expert plan of a JSON document.

    Raises:
        DocumentError: with every problem of the document.
    """
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    if not problems:
        for index, layer in enumerate(document["layers"]):
            problems += _layer_problems(layer, f"layers[{index}]", document["num_ranks"], document["slots_per_rank"])
    if problems:
        raise DocumentError(source, problems)
    plain = ("run_id", "read_to_step", "num_ranks", "slots_per_rank", "num_nodes", "num_groups", "shares", "reason")
    migration = ("bytes", "max_rank_bytes", "pause_ns")
    return ExpertPlan(
        **{name: document[name] for name in plain},
        **{name: document["migration"][name] for name in migration},
        layers=tuple(_build_layer(layer) for layer in document["layers"]),
    )


def _build_layer(value: Any) -> ExpertLayer:
    return ExpertLayer(
        item=value["item"],
        tokens=tuple(value["tokens"]),
        ranks=tuple(tuple((each["expert"], each["tokens"]) for each in rank) for rank in value["ranks"]),
        max_tokens_before=value["max_tokens_before"],
        max_tokens=value["max_tokens"],
        lower_bound_tokens=value["lower_bound_tokens"],
        moves=tuple(
            ExpertMove(**{name: move[name] for name in ("expert", "from_rank", "to_rank", "bytes")})
            for move in value["moves"]
        ),
    )


def _layer_problems(layer: Any, path: str, num_ranks: int, slots: int) -> list[Problem]:
    """Experts that are missing or twice, and numbers of tokens that do not add up."""
    ranks = layer["ranks"]
    if len(ranks) != num_ranks:
        return [Problem(f"{path}.ranks", "length", f"must have {num_ranks} ranks, has {len(ranks)}")]
    experts_of = [[each["expert"] for each in rank] for rank in ranks]
    if problems := _rank_problems(experts_of, path, slots, len(layer["tokens"])):
        return problems
    return _sum_problems(layer, path) + _move_problems(layer["moves"], path, experts_of)


def _rank_problems(experts_of: Sequence[Sequence[int]], path: str, slots: int, num_experts: int) -> list[Problem]:
    problems = []
    for rank, experts in enumerate(experts_of):
        where = f"{path}.ranks[{rank}]"
        if len(experts) > slots:
            problems.append(Problem(where, "length", f"has {len(experts)} experts; at most {slots} per rank"))
        if any(first >= second for first, second in pairwise(experts)):
            problems.append(Problem(where, "order", f"experts must ascend, are {experts}"))
        if experts and max(experts) >= num_experts:
            problems.append(Problem(where, "reference", f"expert {max(experts)}: the layer has {num_experts}"))
    present = {expert for experts in experts_of for expert in experts}
    missing = [expert for expert in range(num_experts) if expert not in present]
    return [*problems, *(Problem(f"{path}.ranks", "missing", f"expert {expert} is on no rank") for expert in missing)]


def _sum_problems(layer: Any, path: str) -> list[Problem]:
    problems = []
    sums = [0] * len(layer["tokens"])
    for rank in layer["ranks"]:
        for each in rank:
            sums[each["expert"]] += each["tokens"]
    for expert, (total, stated) in enumerate(zip(sums, layer["tokens"], strict=True)):
        if total != stated:
            message = f"the tokens of expert {expert} add up to {total}, must be {stated}"
            problems.append(Problem(f"{path}.ranks", "sum", message))
    most = max(sum(each["tokens"] for each in rank) for rank in layer["ranks"])
    if layer["max_tokens"] != most:
        problems.append(Problem(f"{path}.max_tokens", "sum", f"must be {most}, is {layer['max_tokens']}"))
    bound = layer["lower_bound_tokens"]
    if bound > most or layer["optimal"] != (bound == most):
        message = f"{bound} with max_tokens {most} and optimal {layer['optimal']} is a contradiction"
        problems.append(Problem(f"{path}.lower_bound_tokens", "range", message))
    return problems


def _move_problems(moves: Any, path: str, experts_of: Sequence[Sequence[int]]) -> list[Problem]:
    problems = []
    for at, move in enumerate(moves):
        is_known = max(move["from_rank"], move["to_rank"]) < len(experts_of) and move["from_rank"] != move["to_rank"]
        if not is_known or move["expert"] not in experts_of[move["to_rank"]]:
            message = f"expert {move['expert']} to rank {move['to_rank']} does not lead to the placement"
            problems.append(Problem(f"{path}.moves[{at}]", "reference", message))
    return problems


def read_expert_plan(path: Path) -> ExpertPlan:
    """Read an expert plan.

    Raises:
        DocumentError: it cannot be read or violates a rule.
    """
    return parse_expert_plan(read_json(path), str(path))
