"""The monitor reads the files of a run, complete or not."""

from __future__ import annotations

import json

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.trainer.monitoring.monitor import format_status, read_run_status, sparkline, status_document, watch


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_at(folder, steps):
    (folder / "plans").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": {"training": {"train_iters": 4}}}))
    metrics = [
        {"step": n, "lm_loss": 4.0 - n, "step_ns": 10**8, "tokens": 50, "learning_rate": 1e-3, "updated": n != 2}
        for n in range(1, steps + 1)
    ]
    write(folder / "metrics.jsonl", *metrics, {"step": steps, "validation_loss": 3.5})
    header = {"record": "header", "segment": 0}
    costs = {"record": "step", "step_ns": 100, "busy_ns": [90, 50], "peak_memory_bytes": [10**9, 2 * 10**9]}
    result = {"record": "plan_result", "plan_id": 1, "step": 2, "result": "applied", "reason": "r"}
    write(folder / "profile.jsonl", {"record": "step", "busy_ns": [1], "step_ns": 1}, header, costs, costs, result)
    for number, balancer in ((0, "initial"), (1, "exact"), (2, "exact")):
        plan = {"plan_id": number, "balancer": balancer, "read_to_step": number, "reason": f"reason {number}"}
        (folder / "plans" / f"plan-{number:06d}.json").write_text(json.dumps(plan))
    write(folder / "events.jsonl", {"message": "saved step-00000003"})
    return folder


def test_monitor_shows_a_run_in_progress(tmp_path):
    view = read_run_status(run_at(tmp_path / "run", 3))
    assert (view.step, view.train_iters, view.is_done) == (3, 4, False)
    assert view.loss == pytest.approx(2.0)
    assert view.tokens_per_s == pytest.approx(500)
    assert view.loads == [0.9, 0.5]
    assert view.bubble == pytest.approx(0.3)
    assert view.skipped == 1
    assert [(plan.plan_id, plan.result, plan.step) for plan in view.plans] == [
        (0, "initial", 0),
        (1, "applied", 2),
        (2, "waiting", 2),
    ]
    text = format_status(view)
    for part in (
        "step 3 of 4",
        "loss 2.0000",
        "validation 3.5000",
        "500 tokens/s",
        "bubble 30.0%",
        "plan 1 applied at step 2: reason 1",
    ):
        assert part in text
    assert "saved step-00000003" in text
    assert json.loads(json.dumps(status_document(view)))["loads"] == [0.9, 0.5]


def test_monitor_ends_with_the_run(tmp_path, capsys):
    watch(run_at(tmp_path / "run", 4), 0.01)
    assert "step 4 of 4, done" in " ".join(capsys.readouterr().out.split())  # lines are as wide as the terminal


def test_monitor_shows_a_run_without_steps(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    view = read_run_status(tmp_path)
    assert (view.step, view.loss, view.loads, view.bubble, view.plans) == (0, None, [], None, [])
    assert "loss -" in format_status(view)


def test_monitor_of_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a run directory"):
        read_run_status(tmp_path)


def test_curve_spans_lowest_to_highest_value():
    assert sparkline([1, 2, 3]) == "▁▅█"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([]) == ""
