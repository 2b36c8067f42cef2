"""The online planner over many decisions: rollback, policies with a memory, restarts."""

from __future__ import annotations

import itertools
import json
import math
import random
import re

import pytest

from dynmo_balance._common.document import append_line
from dynmo_balance.formats.plan import plan_numbers, plan_path, read_plan
from dynmo_balance.online import watch as watch_module
from dynmo_balance.online.decision import WatchOptions, decide
from dynmo_balance.online.watch import Watcher, watch
from dynmo_train.trainer.monitoring.worker_speed import SpeedMonitor, SpeedSample
from tests.paths import CONTRACTS
from tests.unit.dynmo_balance.online.watched_run import append, event, newest, result, step


def test_rollback_harmful_move_is_undone(run):
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
def test_rollback_ignores_drift_after_move(run, back, rolls_back):
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


def test_rollback_blocks_only_its_partition(run):
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
    for number in range(16, 30):  # other costs plan_request for another partition, which is proposed without a wait
        append(run, step(number, plan=back.plan_id, front=9))
        watcher.poll()
    assert newest(run).plan_id > back.plan_id
    assert newest(run).boundaries not in (back.boundaries, read_plan(plan_path(run / "plans", 1)).boundaries)


def test_rollback_blocks_partition_after_another_move(run):
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
def test_watch_once_decides_on_the_last_record(run, policy, steps, capsys):
    append(run, *(step(n, back=2) for n in range(1, steps + 1)))
    watch(run, WatchOptions(policy=policy), once=True, poll_s=0.01, parent_pid=None)
    assert f"step {steps}: move from plan 0" in capsys.readouterr().err
    assert newest(run).plan_id == 1


def test_regret_after_restart_is_the_same(run):
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


def test_watch_oscillating_costs_plans_pass_verify(tmp_path):
    from dynmo_balance.analysis.verify.inputs import load_inputs
    from dynmo_balance.analysis.verify.plan import verify

    plans = drive(tmp_path, WatchOptions(every=10, window=20, objective="bottleneck"), 300)
    assert len(plans) > 3
    for base, plan in itertools.pairwise(plans):
        assert verify(plan, load_inputs(plan, tmp_path), base) == []


@pytest.mark.complete
@pytest.mark.parametrize("policy", ["threshold", "regret"])
def test_watcher_restarted_at_each_step_decides_the_same(tmp_path, policy):
    options = WatchOptions(policy=policy, every=10, window=20, objective="bottleneck")
    whole, pieces = drive(tmp_path / "whole", options, 100), drive(tmp_path / "pieces", options, 100, restarts=True)
    assert [(p.read_to_step, p.boundaries, p.reason) for p in whole] == [
        (p.read_to_step, p.boundaries, p.reason) for p in pieces
    ]
    assert len(whole) > 2


@pytest.mark.parametrize("policy", ["threshold", "regret"])
def test_watcher_restart_repeats_newest_decisions_only(run, monkeypatch, policy):
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
def test_watcher_uninterrupted_ignores_replay_limit(tmp_path, monkeypatch, policy):
    options = WatchOptions(policy=policy, every=10, window=20, objective="bottleneck")
    plans = drive(tmp_path / "one", options, 100)
    monkeypatch.setattr(watch_module, "MAX_REPLAYED_RECORDS", 0)
    limited = drive(tmp_path / "other", options, 100)
    assert [(p.read_to_step, p.boundaries, p.reason) for p in plans] == [
        (p.read_to_step, p.boundaries, p.reason) for p in limited
    ]
    assert len(plans) > 2


@pytest.mark.parametrize("policy", ["threshold", "regret"])
def test_poll_several_records_publishes_overdue_plan(run, policy):
    watcher = Watcher(run, WatchOptions(policy=policy))
    append(run, *(step(n, back=2) for n in range(1, 31)))  # due at 3, 8, ... 28
    watcher.poll()
    assert (newest(run).plan_id, newest(run).read_to_step) == (1, 30)
    Watcher(run, WatchOptions(policy=policy)).poll()
    assert plan_numbers(run / "plans") == [0, 1]


def test_watcher_first_poll_beats_at_each_line_and_decision(run, monkeypatch):
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


def test_watch_plan_passes_verify(run):
    from dynmo_balance.analysis.verify.inputs import load_inputs
    from dynmo_balance.analysis.verify.plan import verify

    watcher = Watcher(run, WatchOptions(every=1, window=4))
    drift = [1, 2, 2, 2, 2, 3, 1, 1, 1, 4, 4, 4, 4]
    active = 0
    for number, back in enumerate(drift, start=1):
        append(run, step(number, plan=active, front=1 + number % 2 if number < 10 else 9, back=back))
        if number == 9:
            append(run, event(9))
        watcher.poll()
        plan = newest(run)
        if plan.plan_id > active:
            base = read_plan(plan_path(run / "plans", plan.base_plan_id))
            assert verify(plan, load_inputs(plan, run), base) == []
            append(run, result(plan.plan_id, number))
            active = plan.plan_id
    assert active > 1


def pass_on(run, watcher, plan, number):
    """Poll, and apply a new plan as the trainer does; the active plan."""
    watcher.poll()
    if newest(run).plan_id > plan.plan_id:
        plan = newest(run)
        append(run, result(plan.plan_id, number))
    return plan


@pytest.mark.parametrize("quota", [0.25, 0.5])
def test_layers_return_once_to_a_worker_under_a_quota(run, quota):
    """With few layers the quota starves it no longer, so that it looks as fast as the others."""
    monitor, watcher, plan = SpeedMonitor(), Watcher(run, WatchOptions(every=1, window=8)), newest(run)
    forward, items = step(1)["forward_ns"], [name for stage in plan.stages for name in stage.items]
    taken, plans = [], {}
    for number in range(1, 141):
        busy = [8 * sum(3 * ns for ns in forward[a:b]) for a, b in itertools.pairwise(plan.boundaries)]
        pipeline = sum(busy) // 8 + 7 * max(busy) // 8
        taken.append(max(pipeline, round(busy[1] / quota)))
        stalls = (1.0, 1 / quota if taken[-1] > pipeline else 1.0)
        found = zip(stalls, busy, strict=True)
        change = monitor.add([SpeedSample(calibration_ns=1, stall=stall, busy_ns=ns) for stall, ns in found])
        if change is not None:
            speeds = {"workers": [0, 1], "relative_speed": [each.speed for each in change.speeds]}
            append(run, event(number, "worker_speed") | {"detail": speeds})
        factors = [monitor.published[int(item in plan.stages[1].items)].time_factor for item in items]
        elapsed = [round(ns * factor) for ns, factor in zip(forward, factors, strict=True)]
        costs = {"forward_ns": elapsed, "backward_ns": [2 * ns for ns in elapsed]}
        append(run, step(number, plan=plan.plan_id, step_ns=taken[-1], **costs))
        plan = pass_on(run, watcher, plan, number)
        plans[plan.plan_id] = taken[-1]
    assert len(plans) == 4  # it leaves, returns once to see whether the quota is still there, and leaves
    assert plan.boundaries == (0, 9, 10)
    assert sum(taken) < 1.15 * (7 * taken[0] + 133 * taken[-1])  # of the first answer alone


def test_plans_that_deliver_nothing_become_rare(run, capsys):
    """Other load on the host: now one worker looks slow, now the other, and a step takes as long whatever the plan."""
    watcher, plan, plans, speeds = Watcher(run, WatchOptions(every=1, window=8)), newest(run), set(), [1.0, 1.0]
    items = [name for stage in plan.stages for name in stage.items]
    for number in range(1, 191):
        if number % 10 == 0:
            speeds = [1.0, 0.4] if number % 20 else [0.4, 1.0]
            append(run, event(number, "worker_speed") | {"detail": {"workers": [0, 1], "relative_speed": speeds}})
        at = [speeds[item in plan.stages[1].items] for item in items]
        forward = [round(ns / speed) for ns, speed in zip(step(1)["forward_ns"], at, strict=True)]
        append(run, step(number, plan=plan.plan_id, forward_ns=forward, backward_ns=[2 * ns for ns in forward]))
        plan = pass_on(run, watcher, plan, number)
        plans.add(plan.plan_id)
    assert 2 <= len(plans) <= 6
    log = capsys.readouterr().err
    assert re.search(r"plan 1 promised \+\d+\.\d% and delivered .*: nothing moves before step \d+", log)
