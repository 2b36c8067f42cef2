"""``dynmo-plan experts``: from the tokens per expert of a profile to an expert plan."""

from __future__ import annotations

import json

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.analysis.verify.expert_plan import verify_experts
from dynmo_balance.formats.expert_plan import parse_expert_plan
from dynmo_balance.formats.profile import read_profile
from tests.cli.cli_files import EVENTS
from tests.cli.test_plan_verify import forged

# 8 experts; the first two are hot.
TOKENS = [40.0, 30.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]


@pytest.fixture
def profile(tmp_path):
    """A profile with tokens per expert of one item."""
    records = [json.loads(line) for line in EVENTS.read_text().splitlines()]
    item = records[0]["items"][1]["name"]
    for record in records:
        if record["record"] == "step":
            record["x_counts"] = {"expert_tokens": {item: TOKENS}}
    path = tmp_path / "profile.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_experts_table_reports_loads_before_and_after(plan, profile):
    code, out, _ = plan("experts", profile, "--ranks", "4", "--replicas", "4")
    assert code == 0
    row = next(line for line in out.splitlines() if "layers." in line).split()
    assert row[1:5] == ["2.800", "1.000", "1.000", "yes"]
    assert "largest / mean load of 4 ranks with 3 slots each, free shares" in out


def test_experts_written_plan_is_where_the_next_one_starts(plan, profile, tmp_path):
    first = tmp_path / "experts.json"
    assert plan("experts", profile, "--ranks", "4", "--replicas", "4", "-o", first)[0] == 0
    layer = json.loads(first.read_text())["layers"][0]
    assert layer["optimal"]
    assert layer["moves"]
    code, out, _ = plan("experts", profile, "--ranks", "4", "--replicas", "4", "--current", first, "--format", "json")
    again = json.loads(out)["layers"][0]
    assert code == 0
    assert again["moves"] == []
    assert again["ranks"] == layer["ranks"]
    assert again["max_tokens_before"] == layer["max_tokens"]


# Options of ``experts``; and the step, since the tokens are the same in all.
GIVEN = {"slots_per_rank", "num_nodes", "num_groups", "pause_ns", "read_to_step"}


@pytest.mark.parametrize(
    "options",
    [("--replicas", "4"), ("--shares", "even", "--replicas", "8"), ("--nodes", "2", "--groups", "4"), ("--current",)],
    ids=" ".join,
)
def test_verify_each_forged_number_of_an_expert_plan_is_refused(plan, profile, tmp_path, options):
    path, base = tmp_path / "experts.json", tmp_path / "base.json"
    assert plan("experts", profile, "--ranks", "4", "--replicas", "4", "-o", base)[0] == 0
    made_from = ("--base", base) if "--current" in options else ()
    options = ("--replicas", "8", *options, base) if made_from else options
    assert plan("experts", profile, "--ranks", "4", *options, "-o", path)[0] == 0
    code, out, err = plan("verify", path, "--profile", profile, *made_from)
    assert (code, err) == (0, "")
    assert out == f"{path}: every number is correct | tokens and placements\n"
    segments, former = read_profile(profile), parse_expert_plan(json.loads(base.read_text()), "base")

    def is_accepted(document):
        try:
            read = parse_expert_plan(document, path.name)
            return not verify_experts(read, segments, "profile", former if made_from else None, window=20)
        except UsageError:
            return False

    tried = [each for each in forged(json.loads(path.read_text())) if each[0][-1] not in GIVEN]
    assert len(tried) > 20
    assert [(where, value, other) for where, value, other, changed in tried if is_accepted(changed)] == []


def test_experts_slow_link_keeps_experts_in_place(plan, profile):
    options = ("experts", profile, "--ranks", "4", "--replicas", "4", "--format", "json", "--horizon", "1")
    moved = json.loads(plan(*options, "--bandwidth", "1000", "--expert-bytes", "1000")[1])
    stayed = json.loads(plan(*options, "--bandwidth", "0.001", "--expert-bytes", "1000000000")[1])
    assert moved["layers"][0]["moves"]
    assert stayed["layers"][0]["moves"] == []
    assert stayed["reason"] == "no expert moves"


def test_experts_even_shares_split_replicas_equally(plan, profile):
    out = plan("experts", profile, "--ranks", "4", "--replicas", "4", "--shares", "even", "--format", "json")[1]
    layer = json.loads(out)["layers"][0]
    for expert, total in enumerate(layer["tokens"]):
        parts = [each["tokens"] for rank in layer["ranks"] for each in rank if each["expert"] == expert]
        assert max(parts) - min(parts) <= 1
        assert sum(parts) == total


def test_experts_wrong_numbers_are_refused_with_a_remedy(plan, profile, tmp_path):
    code, _, err = plan("experts", profile, "--ranks", "4", "--replicas", "3")
    assert code == 2
    assert "use --replicas 4" in err
    code, _, err = plan("experts", EVENTS)
    assert code == 2
    assert "no step has x_counts.expert_tokens" in err
    first = tmp_path / "experts.json"
    assert plan("experts", profile, "--ranks", "2", "-o", first)[0] == 0
    code, _, err = plan("experts", profile, "--ranks", "4", "--current", first)
    assert code == 2
    assert "use --ranks 2" in err


@pytest.fixture
def run_with_slots(tmp_path):
    """A profile of two ranks with two experts each and room for a copy, of the MLP of the first layer."""
    records = [json.loads(line) for line in EVENTS.read_text().splitlines()]
    header = records[0]
    item = header["items"][2]["name"]
    header |= {
        "expert_parallel_size": 2,
        "data_parallel_size": 2,
        "x_expert_copies": {"slots": 3, "weight_bytes": 4, "param_count": {item: 40_000}},
    }
    for worker in header["workers"]:
        worker["ranks"] = [2 * worker["worker"], 2 * worker["worker"] + 1]
        worker["hosts"] = ["node0", "node0"]
    for record in records:
        if record["record"] == "step":
            record["x_counts"] = {"expert_tokens": {item: [90.0, 10.0, 10.0, 10.0]}}
    path = tmp_path / "slots.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_experts_replicas_beyond_the_memory_are_left_out_with_the_bytes(plan, run_with_slots):
    options = ("experts", run_with_slots, "--replicas", "2", "--shares", "even", "--format", "json")
    free = json.loads(plan(*options, "--memory", "1GB")[1])
    assert sum(map(len, free["layers"][0]["ranks"])) > 4
    assert "bytes" not in free["reason"]
    code, out, _ = plan(*options, "--memory", "1MB")
    full = json.loads(out)
    assert code == 0
    assert sum(map(len, full["layers"][0]["ranks"])) == 4
    assert "fewer replicas, with all of which rank " in full["reason"]
    assert "bytes of 1,000,000" in full["reason"]


def test_experts_beyond_the_memory_of_the_ranks_are_refused_with_the_bytes(plan, run_with_slots):
    code, _, err = plan("experts", run_with_slots, "--ranks", "1", "--memory", "1MB")
    assert code == 2
    assert "rank 0 of the experts of worker 0 would need" in err
    assert "of 1,000,000 without any copy; use more ranks" in err
