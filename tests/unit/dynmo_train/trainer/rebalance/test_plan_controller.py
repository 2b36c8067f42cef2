"""The trainer's side of the handshake in one process: each plan has one result, a planner that hangs is restarted."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
from types import SimpleNamespace

import pytest

from dynmo_train._common.document import Problem, complete_lines, parse_json
from dynmo_train.formats.plan import initial_plan, read_plan, write_plan
from dynmo_train.formats.profile import append_record
from dynmo_train.launch.watch.heartbeat import silent_heartbeat
from dynmo_train.pipeline.migration import MoveError
from dynmo_train.trainer.rebalance import plan_controller as module
from dynmo_train.trainer.rebalance.plan_controller import PlanController, PlanControllerSettings
from dynmo_train.trainer.rebalance.planner_process import (
    HEARTBEAT_S,
    MAX_LOG_BYTES,
    MIN_TIMEOUT_HEARTBEATS,
    REFILL_S,
    RESTARTS,
    STARTUP_S,
    PlannerProcess,
)
from tests.paths import CONTRACTS
from tests.waiting import wait_for


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "plans").mkdir()
    monkeypatch.setattr(module, "broadcast_object", lambda _world, document: document)
    return tmp_path


def put_plan(run, number, **changes):
    document = initial_plan(
        run_id="r",
        stages=[["a"], ["b"]],
        stage_workers=[0, 1],
        schedule="1f1b",
        virtual_stages_per_worker=1,
        plan_id=number,
    )
    write_plan(run / "plans", {**document, "base_plan_id": 0, "action": "keep", "balancer": "manual", **changes})


def controller_of(run, problems_of=lambda *_: []):
    partition = SimpleNamespace(stages=(("a",), ("b",)))
    world = SimpleNamespace(is_rank0=True, worker_ids=(0, 1))
    engine = SimpleNamespace(world=world, partition=partition, heartbeat=silent_heartbeat())
    return PlanController(
        engine,
        PlanControllerSettings(interval=1, lockstep=False, timeout_s=1.0),
        plans=run / "plans",
        append=lambda record: append_record(run / "profile.jsonl", record),
        problems_of=problems_of,
        active_plan_id=0,
        log_event=lambda *_, **__: None,
        log_incident=lambda _incident: None,
        log_change=lambda _event: None,
        finish_saves=lambda: None,
    )


def results(run):
    if not (run / "profile.jsonl").exists():
        return []
    records = [parse_json(line) for line in complete_lines((run / "profile.jsonl").read_bytes())]
    return [(record["plan_id"], record["step"], record["result"]) for record in records]


def test_plan_written_during_a_decision_is_read_at_the_next_boundary(run, monkeypatch):
    put_plan(run, 1)

    def read_while_another_is_written(path):
        if not (run / "plans" / "plan-000002.json").exists():
            put_plan(run, 2)
        return read_plan(path)

    monkeypatch.setattr(module, "read_plan", read_while_another_is_written)
    controller = controller_of(run)
    controller.at_boundary(1)
    assert results(run) == [(1, 1, "unchanged")]
    controller.at_boundary(2)
    assert results(run) == [(1, 1, "unchanged"), (2, 2, "unchanged")]


def test_unreadable_plan_newer_than_a_waiting_one_is_refused_once(run):
    put_plan(run, 1, apply_at_step=3)
    (run / "plans" / "plan-000002.json").write_text("{")
    controller = controller_of(run)
    for step in (1, 2, 3):
        controller.at_boundary(step)
    assert results(run) == [(2, 1, "refused"), (1, 3, "unchanged")]


def test_invalid_plan_newer_than_a_waiting_one_is_refused_once(run):
    put_plan(run, 1, apply_at_step=3)
    put_plan(run, 2)
    controller = controller_of(run, lambda plan, *_: [Problem("", "stale", "the plan is stale")] * (plan.plan_id == 2))
    for step in (1, 2, 3):
        controller.at_boundary(step)
    assert results(run) == [(2, 1, "refused"), (1, 3, "unchanged")]


class Moves:
    """An engine that notes placements of experts, and fails to move layers."""

    def __init__(self):
        dispatcher = SimpleNamespace(hosts_of=lambda item, _experts: self.placed[item])
        family = SimpleNamespace(items=[SimpleNamespace(name="a", metrics=(("expert_tokens", 4),))])
        self.item_store = SimpleNamespace(sharding=SimpleNamespace(dispatcher=dispatcher, family=family))
        self.world = SimpleNamespace(is_rank0=True, worker_ids=(0, 1))
        self.partition = SimpleNamespace(stages=(("a",), ("b",)))
        self.heartbeat = silent_heartbeat()
        self.placed = {"a": (0, 0, 1, 1)}
        self.placements = []

    def place_experts(self, placements):
        self.placed = {**self.placed, **placements}
        self.placements.append(dict(placements))

    def repartition(self, _partition):
        raise MoveError("damaged")


def test_experts_return_where_the_move_of_layers_fails(run):
    put_plan(run, 1, action="move", x_experts={"layers": [{"item": "a", "ranks": [0, [1, 0], 0, 1]}]})
    controller = controller_of(run)
    controller.engine = Moves()
    assert controller.at_boundary(1) is None
    assert results(run) == [(1, 1, "rolled_back")]
    assert controller.engine.placements == [{"a": ((0,), (1, 0), (0,), (1,))}, {"a": (0, 0, 1, 1)}]


@pytest.mark.parametrize(
    "experts",
    [
        3,
        {},
        {"layers": [{"item": "a"}]},
        *({"layers": [{"item": "a", "ranks": [on]}]} for on in ("x", [], ["x"], [-1])),
    ],
)
def test_plan_with_damaged_experts_is_refused(run, experts):
    put_plan(run, 1)
    path = run / "plans/plan-000001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"x_experts": experts}))
    controller_of(run).at_boundary(1)
    assert results(run) == [(1, 1, "refused")]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def wait_for_heartbeat(planner):
    """Wait for the first heartbeat."""

    def has_beaten():
        assert planner.check() is None
        return planner.has_beaten

    wait_for(has_beaten, "heartbeat")


@pytest.fixture
def planner(run, request):
    shutil.copy(CONTRACTS / "profile/valid/header-only.jsonl", run / "profile.jsonl")
    clock = Clock()
    planner = PlannerProcess(run, ["--poll-ms", "5"], timeout_s=getattr(request, "param", 30.0), now=clock)
    assert planner.start() is None
    yield planner, clock
    planner.stop()


def test_stopped_planner_is_killed_and_restarted(planner):
    process, clock = planner
    wait_for_heartbeat(process)
    before = process.pid
    os.kill(before, signal.SIGSTOP)
    process.check()  # reads the heartbeats from before the stop
    clock.now += 29
    assert process.check() is None
    clock.now += 2
    assert process.check() == "the planner sent no heartbeat for 31 s and was killed; restarted (2 restarts left)"
    assert process.pid not in (None, before)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    wait_for_heartbeat(process)
    assert process.restarts_left == RESTARTS - 1
    clock.now += REFILL_S
    assert select.select([process.heartbeats], [], [], 60)[0]
    assert process.check() is None
    assert process.restarts_left == RESTARTS  # it has worked for long enough


def test_log_of_the_planner_is_bounded(planner):
    process, log = planner[0], planner[0].run_dir / "planner.log"
    with log.open("ab") as file:
        file.write(b"x" * MAX_LOG_BYTES)
    assert process.check() is None
    older = log.with_name("planner.log.1").stat().st_size
    assert older >= MAX_LOG_BYTES
    assert log.stat().st_size < 1000
    process.stop()
    log.unlink()
    log.mkdir()  # as on a disk that takes no file
    assert process.start() is None


def test_planner_survives_its_start_and_a_long_step(planner):
    process, clock = planner
    clock.now += 30 + STARTUP_S
    assert process.check() is None
    wait_for_heartbeat(process)
    assert select.select([process.heartbeats], [], [], 60)[0]  # another heartbeat waits in the pipe
    clock.now += 3600
    assert process.check() is None


@pytest.mark.parametrize("planner", [0.5], indirect=True)
def test_planner_timeout_is_at_least_ten_heartbeats(planner):
    process, clock = planner
    wait_for_heartbeat(process)
    os.kill(process.pid, signal.SIGSTOP)
    process.check()  # reads the heartbeats from before the stop
    clock.now += MIN_TIMEOUT_HEARTBEATS * HEARTBEAT_S
    assert process.check() is None
    clock.now += 1
    assert "sent no heartbeat for 11 s and was killed" in process.check()


def test_stop_terminates_a_stopped_planner(planner):
    process, _ = planner
    wait_for_heartbeat(process)
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
