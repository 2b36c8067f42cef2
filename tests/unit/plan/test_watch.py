"""The online planner, decision by decision, against a run directory that the test writes."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynmo_balance._common.document import append_line
from dynmo_balance.formats.plan import plan_numbers, plan_path, read_plan
from dynmo_balance.online import watch as watch_module
from dynmo_balance.online.decision import WatchOptions, decide
from dynmo_balance.online.watch import Watcher, watch

CONTRACTS = Path(__file__).parents[2] / "contracts" / "fixtures"
LOCKSTEP = WatchOptions(lockstep=True, min_records=1)


@pytest.fixture
def run(tmp_path):
    """A run with a header and the initial partition: items 0 to 4 on worker 0, 5 to 9 on worker 1."""
    (tmp_path / "plans").mkdir()
    shutil.copy(CONTRACTS / "plan/valid/initial.json", tmp_path / "plans/plan-000000.json")
    shutil.copy(CONTRACTS / "profile/valid/header-only.jsonl", tmp_path / "profile.jsonl")
    return tmp_path


def step(number, plan=0, front=1, back=1, **changes):
    forward = [ns * front for ns in (200_000, 400_000, 800_000, 400_000, 800_000)]
    forward += [ns * back for ns in (400_000, 800_000, 400_000, 800_000, 1_200_000)]
    record = {
        "record": "step",
        "step": number,
        "plan_id": plan,
        "step_ns": 10**8,
        "forward_ns": forward,
        "backward_ns": [2 * ns for ns in forward],
        "activation_bytes": [0] * 10,
        "busy_ns": [1, 1],
        "peak_memory_bytes": [1, 1],
    }
    return {**record, **changes}


def append(run, *records):
    for record in records:
        append_line(run / "profile.jsonl", record)


def ask(number):
    return {"record": "ask", "step": number}


def event(number, kind="pruned", following=None):
    return {"record": "event", "step": number, "kind": kind, "detail": {}, "next_expected_step": following}


def result(plan, number, what="taken", pause=10**6):
    return {
        "record": "plan_result",
        "plan_id": plan,
        "step": number,
        "result": what,
        "pause_ns": pause,
        "bytes": 0,
        "reason": what,
    }


def newest(run):
    return read_plan(plan_path(run / "plans", plan_numbers(run / "plans")[-1]))


def test_an_unbalanced_run_gets_a_plan(run):
    append(run, *(step(n, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions()).poll()
    plan = newest(run)
    assert (plan.plan_id, plan.base_plan_id, plan.read_to_step, plan.action) == (1, 0, 3, "move")
    assert plan.run_id == "gpt-small"
    assert len(plan.stages[0].items) > 5
    assert plan.optimality.optimal
    assert plan.predicted.gain_fraction > 0.1
    assert {move.to_worker for move in plan.migration.moves} == {0}


def test_a_balanced_run_gets_none(run):
    append(run, *(step(n, front=1.6) for n in range(1, 4)))
    lines = (run / "profile.jsonl").read_text().replace(".0", "")
    (run / "profile.jsonl").write_text(lines)
    Watcher(run, WatchOptions()).poll()
    assert plan_numbers(run / "plans") == [0]


def test_nothing_is_decided_on_few_records(run, capfd):
    watcher = Watcher(run, WatchOptions(min_records=3))
    append(run, step(1, back=2), step(2, back=2))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0]
    append(run, step(3, back=2))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0, 1]
    assert "step 3: move from plan 0" in capfd.readouterr().err


def test_an_event_voids_the_costs_before_it(run):
    watcher = Watcher(run, WatchOptions())
    append(run, step(1, back=2), step(2, back=2), event(2), step(3), step(4))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0]
    append(run, step(5, front=3))
    watcher.poll()
    assert watcher._state.window.costs().forward_ns[0] == 200_000


def test_no_second_plan_while_one_has_no_result(run):
    watcher = Watcher(run, WatchOptions(every=1))
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher.poll()
    for number in range(4, 9):
        append(run, step(number, back=2))
        watcher.poll()
    assert plan_numbers(run / "plans") == [0, 1]
    append(run, result(1, 8, "refused"))
    for number in range(9, 16):
        append(run, step(number, back=2))
        watcher.poll()
    assert plan_numbers(run / "plans") == [0, 1, 2]


def test_after_a_move_the_next_plan_is_based_on_it(run):
    watcher = Watcher(run, WatchOptions(every=1))
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher.poll()
    append(run, result(1, 3), *(step(n, plan=1, front=4) for n in range(4, 8)))
    watcher.poll()
    plan = newest(run)
    assert (plan.plan_id, plan.base_plan_id) == (2, 1)
    assert len(plan.stages[0].items) < 5


def test_a_rolled_back_plan_leaves_the_old_one_in_force(run):
    watcher = Watcher(run, WatchOptions(every=1))
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher.poll()
    append(run, result(1, 3, "taken"), result(1, 3, "rolled_back"))
    watcher.poll()
    assert watcher._state.in_force == 0


def test_every_ask_is_answered(run):
    watcher = Watcher(run, LOCKSTEP)
    append(run, step(1), step(2, back=2))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0]  # nothing was asked
    append(run, ask(2))
    watcher.poll()
    assert (newest(run).action, newest(run).read_to_step) == ("move", 2)
    append(run, result(1, 2), step(3, plan=1, back=2), ask(3))
    watcher.poll()
    plan = newest(run)
    assert (plan.plan_id, plan.action, plan.base_plan_id, plan.read_to_step) == (2, "keep", 1, 3)
    assert plan.stages == read_plan(plan_path(run / "plans", 1)).stages
    assert plan.migration.moves == ()


def test_an_ask_before_any_step_is_answered(run):
    append(run, ask(0))
    Watcher(run, LOCKSTEP).poll()
    assert newest(run).action == "keep"


def test_an_ask_is_answered_once_across_restarts(run):
    append(run, step(1, back=2), ask(1))
    Watcher(run, LOCKSTEP).poll()
    Watcher(run, LOCKSTEP).poll()
    assert plan_numbers(run / "plans") == [0, 1]


def test_a_restarted_planner_goes_on_where_it_was(run):
    whole, pieces = run / "whole", run / "pieces"
    for copy in (whole, pieces):
        shutil.copytree(run / "plans", copy / "plans")
        shutil.copy(run / "profile.jsonl", copy / "profile.jsonl")
    watcher = Watcher(whole, LOCKSTEP)
    taken = 0
    for number in range(1, 30):
        drift = 1 + number % 7
        for copy in (whole, pieces):
            append(copy, step(number, plan=taken, back=drift), ask(number))
        watcher.poll()
        Watcher(pieces, LOCKSTEP).poll()
        plan = newest(whole)
        for copy in (whole, pieces):
            append(copy, result(plan.plan_id, number, "taken" if plan.action == "move" else "kept"))
        taken = plan.plan_id if plan.action == "move" else taken
    documents = [[json.loads(path.read_text()) for path in sorted((c / "plans").iterdir())] for c in (whole, pieces)]
    for document in documents[0] + documents[1]:
        del document["created_utc"]
    assert documents[0] == documents[1]
    assert any(document["action"] == "move" for document in documents[0][1:])


def test_a_new_segment_starts_from_its_own_initial_plan(run):
    append(run, *(step(n, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions()).poll()
    initial = json.loads((CONTRACTS / "plan/valid/initial.json").read_text())
    names = [name for stage in initial["stages"] for name in stage["items"]]
    initial["plan_id"] = 2
    initial["stages"][0]["items"], initial["stages"][1]["items"] = names[:3], names[3:]
    plan_path(run / "plans", 2).write_text(json.dumps(initial))
    header = json.loads((run / "profile.jsonl").read_text().splitlines()[0])
    append(run, {**header, "segment": 1}, *(step(n, plan=2) for n in range(4, 8)))
    Watcher(run, WatchOptions()).poll()
    assert newest(run).base_plan_id == 2
    assert newest(run).extra == {"x_segment": 1, "x_cost_records": 4}


def test_plans_on_top_of_foreign_garbage(run):
    (run / "plans/plan-000007.json").write_text("garbage")
    append(run, *(step(n, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions()).poll()
    assert newest(run).plan_id == 8
    assert newest(run).base_plan_id == 0


def test_a_broken_line_is_skipped_and_told(run, capfd):
    append(run, step(1, back=2), step(2, back=2))
    with open(run / "profile.jsonl", "a") as handle:
        handle.write('{"record": "step", \n')
    append(run, step(3, back=2))
    Watcher(run, WatchOptions()).poll()
    assert plan_numbers(run / "plans") == [0, 1]
    assert "skipped line 4" in capfd.readouterr().err


def test_an_incomplete_line_waits_for_its_end(run):
    watcher = Watcher(run, WatchOptions(min_records=1))
    line = json.dumps(step(1, back=2)) + "\n"
    with open(run / "profile.jsonl", "a") as handle:
        handle.write(line[:50])
    assert not watcher.poll() or plan_numbers(run / "plans") == [0]
    with open(run / "profile.jsonl", "a") as handle:
        handle.write(line[50:])
    watcher.poll()
    assert plan_numbers(run / "plans") == [0, 1]


def test_a_replaced_profile_starts_anew(run, capfd):
    watcher = Watcher(run, WatchOptions(min_records=3))
    append(run, step(1, back=2), step(2, back=2))
    watcher.poll()
    shutil.copy(CONTRACTS / "profile/valid/header-only.jsonl", run / "new")
    os.replace(run / "new", run / "profile.jsonl")
    append(run, step(1, back=2))
    watcher.poll()
    assert "starting from scratch" in capfd.readouterr().err
    assert plan_numbers(run / "plans") == [0]


def test_missing_samples_are_carried_forward(run):
    full = step(1, back=2)
    sparse = step(2, forward_ns=[None] * 10, backward_ns=[None] * 10)
    append(run, full, sparse, {**sparse, "step": 3})
    Watcher(run, WatchOptions()).poll()
    assert newest(run).action == "move"


def test_items_never_sampled_make_no_plan(run, capfd):
    missing = [None, *step(1)["forward_ns"][1:]]
    append(run, *(step(n, forward_ns=missing, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions()).poll()
    assert "1 items are not sampled yet" in capfd.readouterr().err
    assert plan_numbers(run / "plans") == [0]


def test_a_gain_that_does_not_outweigh_the_pause_is_left(run, capfd):
    append(run, step(4, back=2), event(4, following=6), step(5, back=2))
    Watcher(run, WatchOptions(min_records=1)).poll()
    assert "1 steps would save 47 ms, less than the pause" in capfd.readouterr().err
    assert plan_numbers(run / "plans") == [0]


@pytest.mark.parametrize("policy", ["never", "always"])
def test_the_simple_policies(run, policy):
    append(run, *(step(n, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions(policy=policy)).poll()
    assert plan_numbers(run / "plans") == ([0] if policy == "never" else [0, 1])


def test_slow_workers_are_measured_at_their_speed(run):
    header = json.loads((run / "profile.jsonl").read_text())
    header["workers"][1]["relative_speed"] = 0.5
    (run / "profile.jsonl").write_text(json.dumps(header) + "\n")
    # Worker 1 is half as fast, so what it measured is twice the normal cost: the items are even.
    append(run, *(step(n, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions(objective="bottleneck")).poll()
    plan = newest(run)
    # 18.6 ms of work at normal speed in all, on one worker and a half
    assert plan.optimality.lower_bound_ns == plan.predicted.bottleneck_ns == 14_400_000
    assert [len(stage.items) for stage in plan.stages] == [7, 3]


def start(run, *options):
    program = "from dynmo_balance.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "watch", str(run), *options], stderr=subprocess.PIPE, text=True
    )


def wait_for(condition, timeout_s=600.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_the_process_follows_a_growing_run_and_ends_on_sigterm(run):
    process = start(run, "--lockstep", "--min-records", "1")
    try:
        append(run, step(1, back=2), ask(1))
        wait_for(lambda: plan_numbers(run / "plans") == [0, 1])
        append(run, result(1, 1), step(2, plan=1, back=2), ask(2))
        wait_for(lambda: plan_numbers(run / "plans") == [0, 1, 2])
    finally:
        process.terminate()
        _, err = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "wrote plan 1" in err


def test_the_process_ends_with_its_parent(run):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    process = start(run, "--parent-pid", str(sleeper.pid))
    wait_for(lambda: process.poll() is None)
    sleeper.kill()
    sleeper.wait()
    assert process.wait(timeout=600) == 0
    process.stderr.close()


def test_once_reads_and_ends(run):
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watch(run, WatchOptions(), once=True, poll_s=1, parent_pid=None)
    assert plan_numbers(run / "plans") == [0, 1]


def test_packing_releases_what_is_not_needed(run):
    header = json.loads((run / "profile.jsonl").read_text())
    header["workers"].append({**header["workers"][1], "worker": 2, "ranks": [2]})
    (run / "profile.jsonl").write_text(json.dumps(header) + "\n")
    initial = json.loads((run / "plans/plan-000000.json").read_text())
    names = [name for stage in initial["stages"] for name in stage["items"]]
    spans = [(0, 3), (3, 7), (7, 10)]
    initial["stages"] = [{"stage": s, "worker": s, "items": names[a:b]} for s, (a, b) in enumerate(spans)]
    (run / "plans/plan-000000.json").write_text(json.dumps(initial))
    append(run, *(step(n, busy_ns=[1] * 3, peak_memory_bytes=[1] * 3) for n in range(1, 4)))
    Watcher(run, WatchOptions(pack_keep=0.99)).poll()
    assert newest(run).released_workers == ()
    append(run, *(step(n, busy_ns=[1] * 3, peak_memory_bytes=[1] * 3) for n in range(4, 10)))
    Watcher(run, WatchOptions(pack_to=2)).poll()
    plan = newest(run)
    assert plan.released_workers == (2,)
    assert [stage.worker for stage in plan.stages] == [0, 1]
    assert {move.from_worker for move in plan.migration.moves} >= {2}
    append(
        run,
        result(plan.plan_id, 9),
        *(step(n, plan=plan.plan_id, busy_ns=[1] * 3, peak_memory_bytes=[1] * 3) for n in (10, 11, 12)),
    )
    watcher = Watcher(run, WatchOptions(pack_to=2))
    watcher.poll()
    assert newest(run).released_workers in ((), (2,))
    assert [stage.worker for stage in newest(run).stages] == [0, 1]


def test_a_move_that_made_things_worse_is_taken_back(run):
    watcher = Watcher(run, WatchOptions(every=1, window=8))
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher.poll()
    append(run, result(1, 3))
    for number in range(4, 16):
        append(run, step(number, plan=1, back=2, step_ns=2 * 10**8))
        watcher.poll()
    plan = newest(run)
    assert (plan.base_plan_id, plan.balancer, plan.action) == (1, "manual", "move")
    assert plan.boundaries == read_plan(plan_path(run / "plans", 0)).boundaries
    assert plan.reason.startswith("rolling back plan 1")
    append(run, result(plan.plan_id, 15))
    for number in range(16, 40):
        append(run, step(number, plan=plan.plan_id, back=2))
        watcher.poll()
    assert newest(run).plan_id == plan.plan_id  # it waits before it tries again


def modelled_step_ns(plan, back):
    """The step time of the cost model: all stages once, the slowest for each further microbatch."""
    forward = step(1, back=back)["forward_ns"]
    stages = [sum(3 * ns for ns in forward[a:b]) for a, b in itertools.pairwise(plan.boundaries)]
    return sum(stages) + 7 * max(stages)


@pytest.mark.parametrize(("back", "rolls_back"), [(8, False), (1, False)])
def test_drift_after_a_move_is_not_blamed_on_the_move(run, back, rolls_back):
    initial = read_plan(plan_path(run / "plans", 0))
    watcher = Watcher(run, WatchOptions(every=1, window=8))
    append(run, *(step(n, back=2, step_ns=modelled_step_ns(initial, 2)) for n in range(1, 4)))
    watcher.poll()
    moved = newest(run)
    assert moved.plan_id == 1
    append(run, result(1, 3))
    # The model's own costs change: steps take longer (or shorter) for a reason that is not the move.
    for number in range(4, 16):
        append(run, step(number, plan=1, back=back, step_ns=modelled_step_ns(moved, back)))
        watcher.poll()
    plans = [read_plan(plan_path(run / "plans", number)) for number in plan_numbers(run / "plans")]
    assert any(plan.balancer == "manual" for plan in plans) == rolls_back


def test_rollback_refuses_only_the_partition_that_was_rolled_back(run):
    watcher = Watcher(run, WatchOptions(every=1, window=8))
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher.poll()
    append(run, result(1, 3))
    for number in range(4, 16):
        append(run, step(number, plan=1, back=2, step_ns=2 * 10**8))
        watcher.poll()
    back = newest(run)
    assert back.balancer == "manual"
    append(run, result(back.plan_id, 15))
    for number in range(16, 30):  # other costs ask for another partition, which is proposed without a wait
        append(run, step(number, plan=back.plan_id, front=9))
        watcher.poll()
    assert newest(run).plan_id > back.plan_id
    assert newest(run).boundaries not in (back.boundaries, read_plan(plan_path(run / "plans", 1)).boundaries)


def test_rollback_refuses_the_partition_after_another_move(run):
    watcher = Watcher(run, WatchOptions(every=1, window=8))
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher.poll()
    append(run, result(1, 3))
    for number in range(4, 16):
        append(run, step(number, plan=1, back=2, step_ns=2 * 10**8))
        watcher.poll()
    refused, back = read_plan(plan_path(run / "plans", 1)).boundaries, newest(run)
    assert back.balancer == "manual"
    append(run, result(back.plan_id, 15))
    for number in range(16, 25):
        append(run, step(number, plan=back.plan_id, front=9))
        watcher.poll()
    other = newest(run)
    assert other.plan_id > back.plan_id
    append(run, result(other.plan_id, 25))
    for number in range(26, 60):  # the costs of the refused partition return
        append(run, step(number, plan=other.plan_id, back=2))
        watcher.poll()
    assert refused not in [read_plan(plan_path(run / "plans", n)).boundaries for n in plan_numbers(run / "plans")[2:]]


@pytest.mark.parametrize("policy", ["threshold", "regret", "always"])
@pytest.mark.parametrize("steps", [4, 13, 29])
def test_once_decides_on_the_last_record(run, policy, steps, capsys):
    append(run, *(step(n, back=2) for n in range(1, steps + 1)))
    watch(run, WatchOptions(policy=policy), once=True, poll_s=0.01, parent_pid=None)
    assert f"step {steps}: move from plan 0" in capsys.readouterr().err
    assert newest(run).plan_id == 1


def test_regret_is_the_same_after_a_restart(run):
    options = WatchOptions(policy="regret", every=2, window=6)
    append(run, *(step(n, back=2) for n in range(1, 30)))
    watcher = Watcher(run, WatchOptions(policy="regret", every=2, window=6, min_records=100))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0]
    Watcher(run, options).poll()
    assert newest(run).action == "move"
    assert "within 200 steps" in newest(run).reason  # what was missed in the records before the restart counts


def oscillating_run(folder, period=60, items=16):
    """A run of four workers on its uniform partition, and the times of its step records, which swing end to end."""
    header = json.loads((CONTRACTS / "profile/valid/header-only.jsonl").read_text().splitlines()[0])
    sizes = {"param_count": 10**7, "param_bytes": 4 * 10**7, "gradient_bytes": 0, "optimizer_bytes": 8 * 10**7}
    one = {**header["items"][1], **sizes, "cut_before": True, "tied_to": None}
    header["items"] = [{**one, "name": f"layers.{i}.x", "layer": f"layers.{i}"} for i in range(items)]
    header["workers"] = [{**header["workers"][0], "worker": p, "ranks": [p]} for p in range(4)]
    header["microbatches"] = 16
    initial = json.loads((CONTRACTS / "plan/valid/initial.json").read_text())
    initial["run_id"] = header["run_id"]
    names = [item["name"] for item in header["items"]]
    initial["stages"] = [{"stage": p, "worker": p, "items": names[4 * p : 4 * p + 4]} for p in range(4)]
    (folder / "plans").mkdir(parents=True)
    (folder / "plans/plan-000000.json").write_text(json.dumps(initial))
    append_line(folder / "profile.jsonl", header)
    rng = random.Random(1)

    def record(number, plan):
        swing = 0.6 * math.sin(2 * math.pi * number / period)
        shares = [1 + swing * math.cos(math.pi * i / (items - 1)) for i in range(items)]
        forward = [int(2e6 * share * rng.gauss(1, 0.02)) for share in shares]
        stages = [3 * sum(forward[a:b]) for a, b in itertools.pairwise(plan.boundaries)]
        times = {"forward_ns": forward, "backward_ns": [2 * ns for ns in forward], "activation_bytes": [0] * items}
        times["step_ns"] = sum(stages) + 15 * max(stages)
        return step(number, plan=plan.plan_id, **times, busy_ns=[1] * 4, peak_memory_bytes=[1] * 4)

    return record


def drive(folder, options, steps, *, restarts=False):
    """Run a planner over a growing run, step by step; whatever it writes is taken. Restart it at each step or not."""
    record, active, watcher = oscillating_run(folder), read_plan(folder / "plans/plan-000000.json"), None
    for number in range(1, steps + 1):
        append(folder, record(number, active))
        watcher = Watcher(folder, options) if restarts or watcher is None else watcher
        watcher.poll()
        plan = newest(folder)
        if plan.plan_id > active.plan_id:
            append(folder, result(plan.plan_id, number, pause=3 * 10**8))
            active = plan
    return [read_plan(plan_path(folder / "plans", number)) for number in plan_numbers(folder / "plans")]


def test_plans_of_the_default_policy_on_oscillating_costs_pass_verify(tmp_path):
    from dynmo_balance.analysis.verify.plan import verify
    from dynmo_balance.analysis.verify.setting import load_setting

    plans = drive(tmp_path, WatchOptions(every=10, window=20, objective="bottleneck"), 300)
    assert len(plans) > 3
    for base, plan in itertools.pairwise(plans):
        assert verify(plan, load_setting(plan, tmp_path), base) == []


@pytest.mark.parametrize("policy", ["threshold", "regret"])
def test_watcher_restarted_at_each_step_decides_the_same(tmp_path, policy):
    options = WatchOptions(policy=policy, every=10, window=20, objective="bottleneck")
    whole, pieces = drive(tmp_path / "whole", options, 100), drive(tmp_path / "pieces", options, 100, restarts=True)
    assert [(p.read_to_step, p.boundaries, p.reason) for p in whole] == [
        (p.read_to_step, p.boundaries, p.reason) for p in pieces
    ]
    assert len(whole) > 2


@pytest.mark.parametrize("policy", ["threshold", "regret"])
def test_restart_repeats_the_decisions_of_the_newest_records_only(run, monkeypatch, policy):
    decided = []

    def decide_and_count(state, *rest):
        decided.append(state.last_step)
        return decide(state, *rest)

    monkeypatch.setattr(watch_module, "decide", decide_and_count)
    monkeypatch.setattr(watch_module, "MAX_REPLAYED_RECORDS", 20)
    append(run, *(step(n, front=18, back=13) for n in range(1, 101)))  # balanced
    Watcher(run, WatchOptions(policy=policy, every=2)).poll()
    assert decided == list(range(80, 101, 2))


@pytest.mark.parametrize("policy", ["threshold", "regret"])
def test_limit_of_repeated_decisions_changes_none_of_an_uninterrupted_watch(tmp_path, monkeypatch, policy):
    options = WatchOptions(policy=policy, every=10, window=20, objective="bottleneck")
    plans = drive(tmp_path / "one", options, 100)
    monkeypatch.setattr(watch_module, "MAX_REPLAYED_RECORDS", 0)
    limited = drive(tmp_path / "other", options, 100)
    assert [(p.read_to_step, p.boundaries, p.reason) for p in plans] == [
        (p.read_to_step, p.boundaries, p.reason) for p in limited
    ]
    assert len(plans) > 2


@pytest.mark.parametrize("policy", ["threshold", "regret"])
def test_poll_of_several_records_publishes_what_was_due_within_them(run, policy):
    watcher = Watcher(run, WatchOptions(policy=policy))
    append(run, *(step(n, back=2) for n in range(1, 31)))  # due at 3, 8, ... 28
    watcher.poll()
    assert (newest(run).plan_id, newest(run).read_to_step) == (1, 30)
    Watcher(run, WatchOptions(policy=policy)).poll()
    assert plan_numbers(run / "plans") == [0, 1]


def test_watcher_beats_at_every_line_and_past_decision_of_a_first_poll(run, monkeypatch):
    append(run, *(step(n, back=2) for n in range(1, 30)))
    happened = []
    monkeypatch.setattr(watch_module, "decide", lambda *rest: happened.append("decision") or decide(*rest))
    watcher = Watcher(run, WatchOptions(policy="regret", every=2, window=6), beat=lambda: happened.append("beat"))
    watcher.poll()
    lines = 1 + 29  # the header and the steps: each is read, then processed
    assert happened[:lines] == ["beat"] * lines
    assert happened.count("beat") >= 2 * lines
    assert happened.count("decision") > 5
    assert ("decision", "decision") not in itertools.pairwise(happened)


def test_every_number_of_a_written_plan_can_be_verified(run):
    from dynmo_balance.analysis.verify.plan import verify
    from dynmo_balance.analysis.verify.setting import load_setting

    watcher = Watcher(run, WatchOptions(every=1, window=4))
    drift = [1, 2, 2, 2, 2, 3, 1, 1, 1, 4, 4, 4, 4]
    in_force = 0
    for number, back in enumerate(drift, start=1):
        append(run, step(number, plan=in_force, front=1 + number % 2 if number < 10 else 9, back=back))
        if number == 9:
            append(run, event(9))
        watcher.poll()
        plan = newest(run)
        if plan.plan_id > in_force:
            base = read_plan(plan_path(run / "plans", plan.base_plan_id))
            assert verify(plan, load_setting(plan, run), base) == []
            append(run, result(plan.plan_id, number))
            in_force = plan.plan_id
    assert in_force > 1
