"""Expert plans that the trainer reads: with copies where the run has slots for them."""

from __future__ import annotations

import json

import pytest

from dynmo_train._common.document import DocumentError
from dynmo_train.formats.expert_plan import read_placements

EXPERTS = {"layers.0.mlp": 3}


def write(path, ranks):
    tokens = [sum(each["tokens"] for rank in ranks for each in rank if each["expert"] == e) for e in range(3)]
    layer = {"item": "layers.0.mlp", "tokens": tokens, "ranks": ranks, "moves": [], "optimal": False}
    layer |= {"max_tokens_before": 8, "max_tokens": 7, "lower_bound_tokens": 6}
    document = {"format": "dynmo.expert_plan", "version": 1, "written_by": "t", "created_utc": "2026-01-01T00:00:00Z"}
    document |= {"run_id": "r", "read_to_step": 1, "num_ranks": 2, "slots_per_rank": 2, "num_nodes": 1}
    document |= {"num_groups": 1, "shares": "free", "layers": [layer], "reason": "x"}
    path.write_text(json.dumps(document | {"migration": {"bytes": 0, "max_rank_bytes": 0, "pause_ns": None}}))
    return path


def on(*tokens):
    return [{"expert": expert, "tokens": count} for expert, count in tokens]


def test_ranks_of_an_expert_begin_with_the_one_of_most_tokens(tmp_path):
    path = write(tmp_path / "plan.json", [on((0, 1), (1, 2)), on((0, 5), (2, 4))])
    assert read_placements(path, EXPERTS, 2, slots=2) == {"layers.0.mlp": ((1, 0), (0,), (1,))}


@pytest.mark.parametrize(
    ("ranks", "slots", "part"),
    [
        (
            [on((0, 1), (1, 2)), on((0, 5), (2, 4))],
            None,
            "expert 0 has replicas; start the run with --moe-expert-slots",
        ),
        (
            [on((0, 1), (1, 2)), on((0, 5), (1, 1), (2, 4))],
            2,
            "a rank has 3 experts and copies; --moe-expert-slots is 2",
        ),
        ([on((0, 1), (0, 2)), on((1, 5), (2, 4))], 2, "rank 0 has expert 0 twice"),
        ([on((0, 1)), on((1, 5))], 2, "experts must be 0 to 2"),
        ([on((0, 1)), on((1, 5), (2, 3))], None, "each of the 2 ranks must have 1 experts"),
    ],
)
def test_plan_that_the_run_has_no_room_for_is_refused(tmp_path, ranks, slots, part):
    with pytest.raises(DocumentError, match=part):
        read_placements(write(tmp_path / "plan.json", ranks), EXPERTS, 2, slots)
