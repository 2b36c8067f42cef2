"""The format of expert plans: the parser and the JSON Schema refuse the same structure; rules across fields."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest

from dynmo_balance._common.document import DocumentError
from dynmo_balance.formats.expert_plan import encode_expert_plan, parse_expert_plan, to_document
from tests.tables import table

SCHEMA = json.loads((Path(__file__).parents[2] / "dynmo_balance/formats/expert_plan.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
LAYER = {
    "item": "layers.0.mlp",
    "tokens": [6, 2, 4],
    "ranks": [
        [{"expert": 0, "tokens": 5}, {"expert": 1, "tokens": 2}],
        [{"expert": 0, "tokens": 1}, {"expert": 2, "tokens": 4}],
    ],
    "max_tokens_before": 8,
    "max_tokens": 7,
    "lower_bound_tokens": 6,
    "optimal": False,
    "moves": [{"expert": 0, "from_rank": 0, "to_rank": 1, "bytes": 100}],
}
VALID = {
    "format": "dynmo.expert_plan",
    "version": 1,
    "written_by": "test",
    "created_utc": "2026-01-01T00:00:00Z",
    "run_id": "r",
    "read_to_step": 3,
    "num_ranks": 2,
    "slots_per_rank": 2,
    "num_nodes": 1,
    "num_groups": 1,
    "shares": "free",
    "layers": [LAYER],
    "migration": {"bytes": 100, "max_rank_bytes": 100, "pause_ns": None},
    "reason": "one expert moves",
}


def changed(path: str, value: object) -> dict:
    """The valid document with one value replaced; ``path`` has keys and indices, separated by dots."""
    document = copy.deepcopy(VALID)
    *parents, last = path.split(".")
    at = document
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[int(last) if isinstance(at, list) else last] = value
    return document


def test_valid_document_round_trips():
    assert not list(VALIDATOR.iter_errors(VALID))
    plan = parse_expert_plan(VALID, "x")
    written = json.loads(encode_expert_plan(plan, "x"))
    assert not list(VALIDATOR.iter_errors(written))
    assert to_document(plan)["layers"] == VALID["layers"]
    assert parse_expert_plan(written, "x") == plan


@table(
    ("path", "value"),
    [
        ("run_id", ""),
        ("num_ranks", 0),
        ("shares", "fair"),
        ("layers", []),
        ("layers.0.tokens", [1.5]),
        ("layers.0.ranks.0.0", {"expert": 0}),
        ("layers.0.optimal", 1),
        ("migration.pause_ns", "soon"),
        ("unknown", 1),
    ],
)
def test_wrong_structure_is_refused_by_parser_and_schema(path, value):
    document = changed(path, value)
    assert list(VALIDATOR.iter_errors(document))
    with pytest.raises(DocumentError):
        parse_expert_plan(document, "x")


@table(
    ("path", "value", "message"),
    [
        ("num_ranks", 3, "must have 3 ranks, has 2"),
        ("slots_per_rank", 1, "at most 1 per rank"),
        ("layers.0.ranks.0.1.expert", 0, "must ascend"),
        ("layers.0.ranks.0.1.expert", 3, "the layer has 3"),
        ("layers.0.ranks.1", [{"expert": 0, "tokens": 1}], "expert 2 is on no rank"),
        ("layers.0.tokens.1", 3, "add up to 2, must be 3"),
        ("layers.0.max_tokens", 8, "must be 7, is 8"),
        ("layers.0.lower_bound_tokens", 8, "contradiction"),
        ("layers.0.optimal", True, "contradiction"),
        ("layers.0.moves.0.expert", 1, "does not lead to"),
        ("layers.0.moves.0.from_rank", 1, "does not lead to"),
    ],
)
def test_contradiction_is_refused_with_its_rule(path, value, message):
    document = changed(path, value)
    assert not list(VALIDATOR.iter_errors(document))
    with pytest.raises(DocumentError, match=message):
        parse_expert_plan(document, "x")
