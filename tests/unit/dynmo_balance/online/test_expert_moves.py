"""Experts and layers in one plan of the online planner."""

from __future__ import annotations

import json

import pytest

from dynmo_balance.analysis.verify.inputs import load_inputs
from dynmo_balance.analysis.verify.plan import verify
from dynmo_balance.formats.plan import plan_numbers, plan_path, read_plan
from dynmo_balance.online.decision import WatchOptions
from dynmo_balance.online.watch import Watcher
from tests.unit.dynmo_balance.online.watched_run import append, event, newest, result, step

EXPERTS = WatchOptions(experts=True)
MLP = "layers.0.mlp", "layers.3.mlp"
SKEWED, EVEN = [40, 40, 10, 10], [25, 25, 25, 25]


@pytest.fixture
def run(run):
    """Two workers whose layers have four experts each on two ranks; the first and the last MLP may be skewed."""
    header = json.loads((run / "profile.jsonl").read_text())
    header |= {"data_parallel_size": 2, "expert_parallel_size": 2}
    (run / "profile.jsonl").write_text(json.dumps(header) + "\n")
    return run


def record(number, first, last, plan=0, **changes):
    """A step whose experts have these tokens in the first and the last MLP; MLPs take 800 us when even."""
    counts = {"expert_tokens": {MLP[0]: first, MLP[1]: last}}
    found = step(number, plan, **changes)
    for at, tokens in ((2, first), (8, last)):
        heaviest = max(tokens[0] + tokens[1], tokens[2] + tokens[3])
        found["forward_ns"][at] = 800_000 * heaviest // 50
    found["backward_ns"] = [2 * ns for ns in found["forward_ns"]]
    return found | {"x_counts": counts}


def plan_of(run, first, last, options=EXPERTS, **changes):
    append(run, *(record(number, first, last, **changes) for number in range(1, 4)))
    Watcher(run, options).poll()
    return newest(run)


def faults(run, plan):
    base = read_plan(plan_path(run / "plans", 0))
    return [str(fault) for fault in verify(plan, load_inputs(plan, run), base)]


def ranks_have_equal_loads(plan):
    return {layer.max_tokens * 2 for layer in plan.experts} == {sum(plan.experts[0].tokens)}


def test_skew_on_both_stages_is_cured_by_experts_alone(run):
    plan = plan_of(run, SKEWED, SKEWED)
    assert [layer.item for layer in plan.experts] == list(MLP)
    assert ranks_have_equal_loads(plan)
    assert plan.extra["x_experts"]["moves"] == 4
    assert plan.migration.moves == ()
    assert plan.action == "move"
    assert plan.predicted.gain_fraction > 0.1
    assert faults(run, plan) == []


def test_skew_where_no_stage_waits_moves_no_experts(run):
    """The other stage is longer by far, and its layers cannot be divided any further."""
    plan = plan_of(run, [26, 24, 25, 25], EVEN, WatchOptions(experts=True, policy="always"), back=4)
    assert plan.migration.moves
    assert plan.expert_placements == {}


def test_experts_stay_where_their_transfer_takes_longer_than_the_horizon(run):
    options = WatchOptions(experts=True, horizon=200)
    header = json.loads((run / "profile.jsonl").read_text())
    header["x_replica_link"] = {"bandwidth_bytes_per_s": 1000, "latency_ns": 0}
    (run / "profile.jsonl").write_text(json.dumps(header) + "\n")
    append(run, *(record(number, SKEWED, SKEWED) for number in range(1, 4)))
    Watcher(run, options).poll()
    assert plan_numbers(run / "plans") == [0]


def test_experts_stay_without_the_option(run):
    append(run, *(record(number, SKEWED, SKEWED) for number in range(1, 4)))
    Watcher(run, WatchOptions()).poll()
    assert plan_numbers(run / "plans") == [0]


def test_layers_alone_move_where_experts_are_even(run):
    plan = plan_of(run, EVEN, EVEN, back=3)
    assert plan.expert_placements == {}
    assert plan.migration.moves
    assert faults(run, plan) == []


@pytest.mark.parametrize("policy", ["threshold", "regret", "always"])
def test_policy_moves_experts(run, policy):
    assert plan_of(run, SKEWED, SKEWED, WatchOptions(experts=True, policy=policy)).experts


def test_policy_never_moves_no_experts(run):
    append(run, *(record(number, SKEWED, SKEWED) for number in range(1, 4)))
    Watcher(run, WatchOptions(experts=True, policy="never")).poll()
    assert plan_numbers(run / "plans") == [0]


def test_later_plan_of_layers_keeps_the_placement(run):
    watcher = Watcher(run, WatchOptions(experts=True, every=1))
    append(run, *(record(number, SKEWED, SKEWED) for number in range(1, 4)))
    watcher.poll()
    placed = newest(run).expert_placements
    append(run, result(1, 3), event(3, "experts_moved"))
    # The tokens are as before, and even on the new placement: times no longer show a skew.
    later = [record(number, EVEN, EVEN, plan=1, back=3) for number in range(4, 8)]
    tokens = {"expert_tokens": dict.fromkeys(MLP, SKEWED)}
    append(run, *(each | {"x_counts": tokens} for each in later))
    watcher.poll()
    plan = newest(run)
    assert (plan.plan_id, plan.base_plan_id) == (2, 1)
    assert plan.migration.moves
    assert plan.expert_placements == placed
    assert plan.extra["x_experts"]["moves"] == 0
    assert [str(each) for each in verify(plan, load_inputs(plan, run), read_plan(plan_path(run / "plans", 1)))] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: layer.update(ranks=[0, 0, 0, 1]), "same number"),
        (lambda layer: layer.update(max_tokens=layer["max_tokens"] - 1), "recomputed"),
        (lambda layer: layer.update(max_tokens_before=layer["max_tokens_before"] + 1), "recomputed"),
        (lambda layer: layer.update(tokens=[1, 1, 1, 1]), "not those of the profile"),
        (lambda layer: layer.update(tokens=[], max_tokens=0, max_tokens_before=0), "must be stated"),
        (lambda layer: layer.update(ranks=[0, 0, 1, 1]), "recomputed"),
    ],
)
def test_verify_finds_wrong_experts(run, change, message):
    plan_of(run, SKEWED, SKEWED)
    path = run / "plans/plan-000001.json"
    document = json.loads(path.read_text())
    change(document["x_experts"]["layers"][0])
    path.write_text(json.dumps(document))
    found = faults(run, read_plan(path))
    assert any("x_experts" in each and message in each for each in found), found


HOT = [90, 4, 4, 2]
COPIES = {"slots": 3, "weight_bytes": 4, "param_count": dict.fromkeys(MLP, 1000)}


def change_header(run, **keys):
    header = json.loads((run / "profile.jsonl").read_text())
    (run / "profile.jsonl").write_text(json.dumps(header | keys) + "\n")


def hosts_of(plan):
    """The ranks of the first expert of each layer that a plan placed."""
    return [placed[0] for placed in plan.expert_placements.values()]


def test_hot_experts_are_copied_where_the_run_has_slots(run):
    change_header(run, x_expert_copies=COPIES)
    plan = plan_of(run, HOT, HOT)
    assert ranks_have_equal_loads(plan)
    assert hosts_of(plan) == [(0, 1), (0, 1)]
    assert plan.extra["x_experts"]["copies"] >= 2
    assert faults(run, plan) == []


@pytest.mark.parametrize(
    "copies", [None, 5, {"slots": 0}, COPIES | {"slots": "3"}, COPIES | {"param_count": {"a": "b"}}]
)
def test_no_expert_is_copied_where_the_run_has_no_slots(run, copies):
    change_header(run, x_expert_copies=copies)
    plan = plan_of(run, SKEWED, SKEWED)
    assert len(hosts_of(plan)) == 2
    assert all(isinstance(placed, int) for placed in hosts_of(plan))
    assert faults(run, plan) == []


@pytest.mark.parametrize(("rate", "is_copied"), [(10**9, True), (10**5, False)])
def test_experts_are_copied_where_the_link_is_fast_enough(run, rate, is_copied):
    """A copy transfers 12 kB in each step: 12 us or 120 ms; a stage takes about 50 ms."""
    change_header(run, x_expert_copies=COPIES, x_replica_link={"bandwidth_bytes_per_s": rate, "latency_ns": 0})
    append(run, *(record(number, HOT, HOT) for number in range(1, 4)))
    Watcher(run, EXPERTS).poll()
    hosts = hosts_of(newest(run))
    assert any(isinstance(placed, tuple) for placed in hosts) is is_copied


def test_rank_without_memory_gets_no_copies_and_the_line_has_the_reason(run, capsys):
    change_header(run, x_expert_copies=COPIES)
    peaks = plan_of(run, HOT, HOT).predicted.peak_memory_bytes
    assert "no copies" not in capsys.readouterr().err
    # On worker 0: 8000 bytes for the sums of two experts, 12,000 for a copy.
    for path in (run / "plans").glob("plan-*1.json"):
        path.unlink()
    options = WatchOptions(experts=True, memory_bytes=max(peaks) + 9000)
    Watcher(run, options).poll()
    first = newest(run).expert_placements.get(MLP[0], ())
    assert not any(isinstance(placed, tuple) for placed in first)
    assert "of worker 0 gets no copies, with which it would need" in capsys.readouterr().err


def test_later_plan_removes_copies_that_save_nothing(run):
    """The tokens become even: a copy still takes 1.2 ms of each step."""
    change_header(run, x_expert_copies=COPIES, x_replica_link={"bandwidth_bytes_per_s": 10**7, "latency_ns": 0})
    watcher = Watcher(run, WatchOptions(experts=True, every=1, policy="always"))
    append(run, *(record(number, HOT, HOT) for number in range(1, 4)))
    watcher.poll()
    assert any(isinstance(placed, tuple) for placed in hosts_of(newest(run)))
    append(run, result(1, 3), event(3, "experts_moved"))
    # More steps than the mean over tokens has.
    append(run, *(record(number, EVEN, EVEN, plan=1) for number in range(4, 30)))
    watcher.poll()
    plan = newest(run)
    assert plan.base_plan_id == 1
    assert not any(isinstance(placed, tuple) for placed in hosts_of(plan))
    assert [str(each) for each in verify(plan, load_inputs(plan, run), read_plan(plan_path(run / "plans", 1)))] == []


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[0, 0], 0, 1, 1], "different ones of 2 ranks"),
        ([[0, 2], 0, 1, 1], "different ones of 2 ranks"),
        ([[], 0, 1, 1], "different ones of 2 ranks"),
        ([[0, 1]] * 4, "a rank has 4 experts and copies; the run has 3 slots"),
        ([0, 0, 0, 1], "recomputed"),
    ],
)
def test_verify_finds_wrong_copies(run, ranks, message):
    change_header(run, x_expert_copies=COPIES)
    plan_of(run, HOT, HOT)
    path = run / "plans/plan-000001.json"
    document = json.loads(path.read_text())
    document["x_experts"]["layers"][0]["ranks"] = ranks
    path.write_text(json.dumps(document))
    found = faults(run, read_plan(path))
    assert any("x_experts" in each and message in each for each in found), found


def test_verify_counts_copies(run):
    change_header(run, x_expert_copies=COPIES)
    plan_of(run, HOT, HOT)
    path = run / "plans/plan-000001.json"
    document = json.loads(path.read_text())
    document["x_experts"]["copies"] += 1
    path.write_text(json.dumps(document))
    assert any("copies are" in each for each in faults(run, read_plan(path)))


@pytest.mark.parametrize(
    "damaged",
    [
        {"layers": [{"item": "a", "ranks": [[[0]]]}]},
        5,
        {},
        {"layers": 3},
        {"layers": [{"item": "a"}]},
        {"layers": [[]]},
    ],
)
def test_damaged_experts_are_a_fault_and_no_placement(run, damaged):
    plan_of(run, SKEWED, SKEWED)
    path = run / "plans/plan-000001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"x_experts": damaged}))
    plan = read_plan(path)
    assert plan.expert_placements == {}
    assert any("x_experts" in each for each in faults(run, plan))
