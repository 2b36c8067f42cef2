"""The online planner, decision by decision, against a run directory that the test writes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

from dynmo_balance.formats.plan import plan_numbers, plan_path, read_plan
from dynmo_balance.online.decision import WatchOptions
from dynmo_balance.online.watch import Watcher, watch
from tests.paths import CONTRACTS
from tests.unit.dynmo_balance.online.watched_run import append, event, newest, plan_request, result, step
from tests.waiting import wait_for

LOCKSTEP = WatchOptions(lockstep=True, min_records=1)


def test_watch_unbalanced_run_gets_a_plan(run):
    append(run, *(step(n, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions()).poll()
    plan = newest(run)
    assert (plan.plan_id, plan.base_plan_id, plan.read_to_step, plan.action) == (1, 0, 3, "move")
    assert plan.run_id == "gpt-small"
    assert len(plan.stages[0].items) > 5
    assert plan.optimality.optimal
    assert plan.predicted.gain_fraction > 0.1
    assert {move.to_worker for move in plan.migration.moves} == {0}


def test_watch_full_disk_delays_a_plan(run, monkeypatch, capfd):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher = Watcher(run, WatchOptions())
    with monkeypatch.context() as full:
        full.setattr("dynmo_balance.online.watch.publish", refuse)
        watcher.poll()
        watcher.poll()
    assert plan_numbers(run / "plans") == [0]
    monkeypatch.setattr("dynmo_balance.online.watch.time.monotonic", lambda: float("inf"))
    watcher.poll()
    assert newest(run).action == "move"
    assert capfd.readouterr().err.count("No space left on device; trying again") == 1


def test_watch_balanced_run_gets_no_plan(run):
    append(run, *(step(n, front=1.6) for n in range(1, 4)))
    lines = (run / "profile.jsonl").read_text().replace(".0", "")
    (run / "profile.jsonl").write_text(lines)
    Watcher(run, WatchOptions()).poll()
    assert plan_numbers(run / "plans") == [0]


def test_watch_few_records_make_no_decision(run, capfd):
    watcher = Watcher(run, WatchOptions(min_records=3))
    append(run, step(1, back=2), step(2, back=2))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0]
    append(run, step(3, back=2))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0, 1]
    assert "step 3: move from plan 0" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["pruned", "frozen", "a kind of another package"])
def test_watch_cost_event_voids_earlier_costs(run, kind):
    watcher = Watcher(run, WatchOptions())
    append(run, step(1, back=2), step(2, back=2), event(2, kind), step(3), step(4))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0]
    append(run, step(5, front=3))
    watcher.poll()
    assert watcher.state.window.costs().forward_ns[0] == 200_000


def test_watch_decides_on_the_first_record_after_each_pruning(run):
    """Gradual pruning every second step: three records of the same model never come."""
    watcher, heavy = Watcher(run, WatchOptions()), {2: {"back": 4}, 4: {"front": 6}, 6: {"back": 9}}
    append(run, step(1), step(2))
    watcher.poll()
    plan, costs = 0, {}
    for number in range(2, 8):
        if number in heavy:
            append(run, event(number, "pruned"))
            costs = heavy[number]
        append(run, step(number + 1, plan=plan, **costs))
        watcher.poll()
        if number in heavy:
            plan += 1
            assert plan_numbers(run / "plans")[-1] == plan, number
            append(run, result(plan, number + 1))


def test_watch_pending_plan_blocks_a_second(run):
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


def test_watch_next_plan_is_based_on_applied_plan(run):
    watcher = Watcher(run, WatchOptions(every=1))
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher.poll()
    append(run, result(1, 3), *(step(n, plan=1, front=4) for n in range(4, 8)))
    watcher.poll()
    plan = newest(run)
    assert (plan.plan_id, plan.base_plan_id) == (2, 1)
    assert len(plan.stages[0].items) < 5


def test_watch_rolled_back_plan_keeps_old_base(run):
    watcher = Watcher(run, WatchOptions(every=1))
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watcher.poll()
    append(run, result(1, 3, "applied"), result(1, 3, "rolled_back"))
    watcher.poll()
    assert watcher.state.active_plan_id == 0


def test_watch_answers_every_plan_request(run):
    watcher = Watcher(run, LOCKSTEP)
    append(run, step(1), step(2, back=2))
    watcher.poll()
    assert plan_numbers(run / "plans") == [0]  # nothing was asked
    append(run, plan_request(2))
    watcher.poll()
    assert (newest(run).action, newest(run).read_to_step) == ("move", 2)
    append(run, result(1, 2), step(3, plan=1, back=2), plan_request(3))
    watcher.poll()
    plan = newest(run)
    assert (plan.plan_id, plan.action, plan.base_plan_id, plan.read_to_step) == (2, "keep", 1, 3)
    assert plan.stages == read_plan(plan_path(run / "plans", 1)).stages
    assert plan.migration.moves == ()


def test_watch_answers_request_before_first_step(run):
    append(run, plan_request(0))
    Watcher(run, LOCKSTEP).poll()
    assert newest(run).action == "keep"


def test_watch_answers_request_once_across_restarts(run):
    append(run, step(1, back=2), plan_request(1))
    Watcher(run, LOCKSTEP).poll()
    Watcher(run, LOCKSTEP).poll()
    assert plan_numbers(run / "plans") == [0, 1]


def test_watch_restarted_planner_resumes(run):
    whole, pieces = run / "whole", run / "pieces"
    for copy in (whole, pieces):
        shutil.copytree(run / "plans", copy / "plans")
        shutil.copy(run / "profile.jsonl", copy / "profile.jsonl")
    watcher = Watcher(whole, LOCKSTEP)
    taken = 0
    for number in range(1, 30):
        drift = 1 + number % 7
        for copy in (whole, pieces):
            append(copy, step(number, plan=taken, back=drift), plan_request(number))
        watcher.poll()
        Watcher(pieces, LOCKSTEP).poll()
        plan = newest(whole)
        for copy in (whole, pieces):
            append(copy, result(plan.plan_id, number, "applied" if plan.action == "move" else "unchanged"))
        taken = plan.plan_id if plan.action == "move" else taken
    documents = [[json.loads(path.read_text()) for path in sorted((c / "plans").iterdir())] for c in (whole, pieces)]
    for document in documents[0] + documents[1]:
        del document["created_utc"]
    assert documents[0] == documents[1]
    assert any(document["action"] == "move" for document in documents[0][1:])


def test_watch_new_segment_starts_from_its_initial_plan(run):
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


def test_watch_publishes_above_invalid_plans(run):
    (run / "plans/plan-000007.json").write_text("garbage")
    append(run, *(step(n, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions()).poll()
    assert newest(run).plan_id == 8
    assert newest(run).base_plan_id == 0


def test_watch_invalid_line_is_skipped_and_reported(run, capfd):
    append(run, step(1, back=2), step(2, back=2))
    with open(run / "profile.jsonl", "a") as handle:
        handle.write('{"record": "step", \n')
    append(run, step(3, back=2))
    Watcher(run, WatchOptions()).poll()
    assert plan_numbers(run / "plans") == [0, 1]
    assert "skipped line 4" in capfd.readouterr().err


def test_watch_incomplete_line_is_read_when_complete(run):
    watcher = Watcher(run, WatchOptions(min_records=1))
    line = json.dumps(step(1, back=2)) + "\n"
    with open(run / "profile.jsonl", "a") as handle:
        handle.write(line[:50])
    assert not watcher.poll() or plan_numbers(run / "plans") == [0]
    with open(run / "profile.jsonl", "a") as handle:
        handle.write(line[50:])
    watcher.poll()
    assert plan_numbers(run / "plans") == [0, 1]


def test_watch_replaced_profile_resets(run, capfd):
    watcher = Watcher(run, WatchOptions(min_records=3))
    append(run, step(1, back=2), step(2, back=2))
    watcher.poll()
    shutil.copy(CONTRACTS / "profile/valid/header-only.jsonl", run / "new")
    os.replace(run / "new", run / "profile.jsonl")
    append(run, step(1, back=2))
    watcher.poll()
    assert "starting from scratch" in capfd.readouterr().err
    assert plan_numbers(run / "plans") == [0]


def test_watch_missing_samples_are_carried_forward(run):
    full = step(1, back=2)
    sparse = step(2, forward_ns=[None] * 10, backward_ns=[None] * 10)
    append(run, full, sparse, {**sparse, "step": 3})
    Watcher(run, WatchOptions()).poll()
    assert newest(run).action == "move"


def test_watch_unsampled_items_make_no_plan(run, capfd):
    missing = [None, *step(1)["forward_ns"][1:]]
    append(run, *(step(n, forward_ns=missing, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions()).poll()
    assert "1 items are not sampled yet" in capfd.readouterr().err
    assert plan_numbers(run / "plans") == [0]


def test_watch_gain_below_pause_keeps_partition(run, capfd):
    append(run, step(4, back=2), event(4, following=6), step(5, back=2))
    Watcher(run, WatchOptions(min_records=1)).poll()
    assert "gain over the horizon 47 ms, less than the pause" in capfd.readouterr().err
    assert plan_numbers(run / "plans") == [0]


@pytest.mark.parametrize("policy", ["never", "always"])
def test_watch_never_and_always_decide_without_costs(run, policy):
    append(run, *(step(n, back=2) for n in range(1, 4)))
    Watcher(run, WatchOptions(policy=policy)).poll()
    assert plan_numbers(run / "plans") == ([0] if policy == "never" else [0, 1])


def test_watch_slow_worker_is_measured_at_its_speed(run):
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


def speeds(number, *values):
    return event(number, "worker_speed") | {"detail": {"workers": [0, 1], "relative_speed": list(values)}}


def test_watch_moves_layers_off_a_worker_that_became_slow_and_back(run):
    watcher = Watcher(run, WatchOptions(objective="bottleneck", min_records=2))
    append(run, *(step(n) for n in range(1, 4)))
    watcher.poll()
    before = newest(run)
    append(run, speeds(4, 1.0, 0.25))
    # Items of the slow worker take four times as long; at normal speed nothing has changed.
    append(run, *(step(n, back=4) for n in range(5, 9)))
    watcher.poll()
    moved = newest(run)
    assert moved.plan_id == before.plan_id + 1
    assert len(moved.stages[1].items) < len(before.stages[1].items)
    append(run, result(moved.plan_id, 9), speeds(9, 1.0, 1.0))
    append(run, *(step(n, plan=moved.plan_id) for n in range(10, 14)))
    watcher.poll()
    assert newest(run).boundaries == before.boundaries
    assert watcher.state.header.workers[1].relative_speed == 1.0


def test_watch_ignores_speeds_of_another_form(run):
    append(run, *(step(n) for n in range(1, 4)))
    for detail in ({}, {"workers": [0], "relative_speed": [0.5, 1.0]}, {"workers": [1], "relative_speed": ["slow"]}):
        append(run, event(4, "worker_speed") | {"detail": detail})
    watcher = Watcher(run, WatchOptions())
    watcher.poll()
    assert [worker.relative_speed for worker in watcher.state.header.workers] == [1.0, 1.0]


def start(run, *options):
    program = "from dynmo_balance.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "watch", str(run), *options], stderr=subprocess.PIPE, text=True
    )


def test_watch_process_exits_on_sigterm(run):
    process = start(run, "--lockstep", "--min-records", "1")
    try:
        append(run, step(1, back=2), plan_request(1))
        wait_for(lambda: plan_numbers(run / "plans") == [0, 1], "plan 1", process)
        append(run, result(1, 1), step(2, plan=1, back=2), plan_request(2))
        wait_for(lambda: plan_numbers(run / "plans") == [0, 1, 2], "plan 2", process)
    finally:
        process.terminate()
        _, err = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "wrote plan 1" in err


def test_watch_process_exits_with_its_parent(run):
    sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    process = start(run, "--min-records", "1", "--parent-pid", str(sleeper.pid))
    append(run, step(1, back=2))
    wait_for(lambda: plan_numbers(run / "plans") == [0, 1], "plan 1", process)
    sleeper.kill()
    sleeper.wait()
    assert process.wait(timeout=600) == 0
    process.stderr.close()


def test_watch_once_returns(run):
    append(run, *(step(n, back=2) for n in range(1, 4)))
    watch(run, WatchOptions(), once=True, poll_s=1, parent_pid=None)
    assert plan_numbers(run / "plans") == [0, 1]


def test_watch_pack_to_releases_workers(run):
    header = json.loads((run / "profile.jsonl").read_text())
    header["workers"].append({**header["workers"][1], "worker": 2, "ranks": [2]})
    (run / "profile.jsonl").write_text(json.dumps(header) + "\n")
    initial = json.loads((run / "plans/plan-000000.json").read_text())
    names = [name for stage in initial["stages"] for name in stage["items"]]
    spans = [(0, 3), (3, 7), (7, 10)]
    initial["stages"] = [{"stage": s, "worker": s, "items": names[a:b]} for s, (a, b) in enumerate(spans)]
    (run / "plans/plan-000000.json").write_text(json.dumps(initial))
    append(run, *(step(n, busy_ns=[1] * 3, peak_memory_bytes=[1] * 3) for n in range(1, 4)))
    Watcher(run, WatchOptions(min_throughput_fraction=0.99)).poll()
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
