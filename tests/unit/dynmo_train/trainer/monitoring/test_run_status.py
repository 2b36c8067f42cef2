"""The status of a run from its files, complete or not, and after a restart, a resume or a release."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.trainer.monitoring.live_view import LiveView, incident_line
from dynmo_train.trainer.monitoring.monitor import format_status
from dynmo_train.trainer.monitoring.run_status import (
    NextMigration,
    RunFollower,
    read_run_status,
    status_document,
)
from tests.unit.dynmo_train.trainer.monitoring.run_fixture import append, cost_line, header, plan, step_line, write_run


def test_status_has_mfu_of_a_known_device(tmp_path):
    run = write_run(tmp_path / "run")
    status = read_run_status(run)
    # 1.1e15 FLOPs in 0.83305 s on four devices of 989e12 FLOP/s.
    assert status.mfu == pytest.approx(1.1e15 / 0.83305 / (4 * 989e12))
    assert read_run_status(run, peak_flops_per_s=1e15).mfu == pytest.approx(1.1e15 / 0.83305 / 4e15)


def test_status_has_no_mfu_of_an_unknown_device(tmp_path):
    run = write_run(tmp_path / "run")
    document = json.loads((run / "run.json").read_text())
    document["engine"] = {"device": "cpu"}
    (run / "run.json").write_text(json.dumps(document))
    assert read_run_status(run).mfu is None


def test_status_has_time_left(tmp_path):
    status = read_run_status(write_run(tmp_path / "run"))
    assert status.time_left_s == pytest.approx(660 * 0.83305)


def test_status_has_next_migration_at_next_boundary(tmp_path):
    run = write_run(tmp_path / "run")
    migration = NextMigration(
        plan_id=2, step=350, moves=2, bytes=9_500_000, gain_fraction=0.05, pause_ns=10**7, released=[]
    )
    follower = RunFollower(run)
    assert follower.poll().next_migration == migration
    (run / "plans" / "plan-000003.json").write_text(json.dumps(plan(3, 4, apply_at_step=401)))
    assert follower.poll().next_migration.step == 450
    append(
        run / "profile.jsonl",
        {"record": "plan_result", "plan_id": 2, "step": 350, "result": "superseded", "reason": "r"},
        {"record": "plan_result", "plan_id": 3, "step": 350, "result": "refused", "reason": "r"},
    )
    status = follower.poll()
    assert status.next_migration is None
    assert status.next_boundary == 350
    assert [each.result for each in status.plans] == ["initial", "applied", "superseded", "refused"]


def test_status_without_online_balancing_has_no_next_migration(tmp_path):
    run = write_run(tmp_path / "run")
    document = json.loads((run / "run.json").read_text())
    document["config"]["balance"]["balance"] = "off"
    (run / "run.json").write_text(json.dumps(document))
    status = read_run_status(run)
    assert (status.next_boundary, status.next_migration) == (None, None)


def test_status_has_partition_of_the_active_plan(tmp_path):
    run = write_run(tmp_path / "run", workers=2)
    moved = plan(
        1, 2, stages=[{"stage": 0, "worker": 0, "items": ["embedding"]}, {"stage": 1, "worker": 1, "items": []}]
    )
    (run / "plans" / "plan-000001.json").write_text(json.dumps(moved))
    status = read_run_status(run)
    assert status.active_plan_id == 1
    assert [(each.layers, each.num_layers) for each in status.workers] == [("embedding", 1), ("(empty)", 0)]


def test_status_has_released_and_joined_workers(tmp_path):
    run = write_run(tmp_path / "run")
    follower = RunFollower(run)
    assert follower.poll().released == []
    append(run / "profile.jsonl", header([0, 2], segment=1), cost_line(30, 2))
    status = follower.poll()
    assert (status.released, status.joined, status.segment) == ([1, 3], [], 1)
    assert [each.worker for each in status.workers] == [0, 2]
    assert status.loads == [0.95, 0.85]
    (run / "requests").mkdir()
    (run / "requests" / "resize.json").write_text('{"workers": 6}')
    append(run / "profile.jsonl", header(6, segment=2))
    status = follower.poll()
    assert (status.released, status.joined, status.requested_workers) == ([], [1, 3, 4, 5], 6)
    assert status.loads == []
    assert status.bubble is None


def test_status_of_a_resumed_run_discards_repeated_steps(tmp_path):
    run = write_run(tmp_path / "run", steps=100)
    follower = RunFollower(run)
    before = follower.poll()
    append(run / "metrics.jsonl", step_line(3, lm_loss=9.0), step_line(4, lm_loss=9.0))
    status = follower.poll()
    assert (before.step, status.step) == (100, 4)
    assert before.skipped == status.skipped == 1
    assert len(status.loss_curve) == 4
    assert status.losses == [9.0, 9.0]


def test_status_of_a_new_run_in_the_same_directory(tmp_path):
    run = write_run(tmp_path / "run")
    follower = RunFollower(run)
    assert follower.poll().step == 340
    shutil.rmtree(run)
    with pytest.raises(UsageError, match="is not a run directory"):
        follower.poll()
    write_run(run, steps=5, workers=2)
    document = json.loads((run / "run.json").read_text()) | {"run_id": "second"}
    (run / "run.json").write_text(json.dumps(document))
    status = follower.poll()
    assert (status.step, len(status.workers), len(status.loss_curve)) == (5, 2, 5)


def test_status_of_an_event_that_is_announced(tmp_path):
    run = write_run(tmp_path / "run")
    follower = RunFollower(run)
    assert follower.poll().next_event == ("pruned", 400)
    append(run / "profile.jsonl", {"record": "event", "kind": "pruned", "step": 400, "next_expected_step": None})
    assert follower.poll().next_event is None


def test_status_counts_records_that_it_cannot_read(tmp_path):
    run = write_run(tmp_path / "run")
    append(run / "metrics.jsonl", {"step": "x", "step_ns": 1, "tokens": 1})
    append(run / "profile.jsonl", {"record": "step"}, {"no": "record"})
    append(run / "events.jsonl", {"kind": "checkpoint"})
    (run / "plans" / "plan-000003.json").write_text("{")
    status = read_run_status(run)
    assert status.invalid_lines == 4
    assert status.step == 340
    assert len(status.plans) == 3


def test_status_of_a_directory_without_steps(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    status = read_run_status(tmp_path)
    assert (status.step, status.idle_s, status.workers, status.active_plan_id) == (0, None, [], None)
    assert json.loads(json.dumps(status_document(status)))["time_left_s"] is None


@pytest.mark.parametrize("document", ["[]", "{", '{"config": 1, "engine": 2}'])
def test_run_json_of_another_program_is_refused_or_ignored(tmp_path, document):
    (tmp_path / "run.json").write_text(document)
    if "config" in document:
        assert read_run_status(tmp_path).train_iters is None
    else:
        with pytest.raises(UsageError, match="is not a run directory"):
            read_run_status(tmp_path)


def test_idle_time_is_that_of_the_metrics(tmp_path):
    run = write_run(tmp_path / "run")
    os.utime(run / "metrics.jsonl", (1000, 1000))
    assert RunFollower(run, now=lambda: 1090.0).poll().idle_s == pytest.approx(90)


def test_status_sums_the_losses_of_incidents(tmp_path):
    run = write_run(tmp_path / "run")
    assert (read_run_status(run).num_incidents, incident_line(read_run_status(run))) == (0, None)
    incident = {"kind": "incident", "step": 130, "message": "rank 1 hangs", "seconds_lost": 60.5, "steps_lost": 30}
    append(run / "events.jsonl", incident, incident | {"message": "restarted", "seconds_lost": 29.5, "steps_lost": 0})
    append(run / "events.jsonl", {"kind": "incident", "message": "of another version"})
    status = read_run_status(run)
    assert (status.num_incidents, status.seconds_lost, status.steps_lost) == (2, 90.0, 30)
    assert status.invalid_lines == 1
    assert incident_line(status) == "2 incidents, 30 steps and 1 min 30 s lost; last at step 130: restarted"
    assert incident_line(status) in format_status(status)
    assert any("2 incidents" in line.plain for line in LiveView(status).lines(100, 50))


def test_status_marks_a_slow_worker(tmp_path):
    run = write_run(tmp_path / "run")
    assert "slow:" not in format_status(read_run_status(run))
    detail = {"workers": [0, 1, 2, 3], "relative_speed": [1.0, 1.0, 0.2, 1.0]}
    event = {"record": "event", "kind": "worker_speed", "step": 300, "detail": detail, "next_expected_step": None}
    append(run / "profile.jsonl", event)
    status = read_run_status(run)
    assert [each.relative_speed for each in status.workers] == [1.0, 1.0, 0.2, 1.0]
    assert "slow: 2 (0.20)" in format_status(status)
    append(run / "profile.jsonl", event | {"detail": detail | {"relative_speed": [1.0] * 4}})
    assert "slow:" not in format_status(read_run_status(run))
