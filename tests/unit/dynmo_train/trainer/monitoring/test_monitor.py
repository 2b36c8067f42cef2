"""The monitor reads the files of a run, complete or not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.launch.run_lock import hold, release
from dynmo_train.trainer.monitoring.live_view import LiveView, sparkline
from dynmo_train.trainer.monitoring.monitor import format_status, watch
from dynmo_train.trainer.monitoring.run_status import read_run_status, status_document
from tests.unit.dynmo_train.trainer.monitoring.pseudo_terminal import Terminal
from tests.unit.dynmo_train.trainer.monitoring.run_fixture import append, step_line, write, write_run


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
    assert "step 4 of 4 | done" in " ".join(capsys.readouterr().out.split())  # lines are as wide as the terminal


@pytest.mark.parametrize(("code", "segment", "is_over"), [(130, 1, True), (0, 1, True), (1, 1, False), (130, 0, False)])
def test_monitor_of_a_stopped_run_prints_that_and_ends(tmp_path, capsys, code, segment, is_over):
    """A failed start may be restarted by its launcher; of an earlier start the last one continues."""
    run = run_at(tmp_path / "run", 3)
    (run / "run.json").write_text(json.dumps({"segment": 1, "config": {"training": {"train_iters": 4}}}))
    write(run / "events.jsonl", {"kind": "stopped", "message": "m", "step": 3, "exit_code": code, "segment": segment})
    status = read_run_status(run)
    assert (status.is_done, status.is_over) == (False, is_over)
    text = format_status(status)
    assert (f"step 3 of 4, stopped (exit code {code})" in text) == (segment == 1)
    assert (" left" in text) == (segment == 0)
    if is_over:
        watch(run, 0.01)
        assert f"stopped (exit code {code})" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("code", "is_over"), [(None, True), (75, False)])
def test_monitor_of_a_run_without_processes_prints_that_and_ends(tmp_path, capsys, code, is_over):
    run = run_at(tmp_path / "run", 3)
    (run / "run.json").write_text(json.dumps({"segment": 0, "config": {"training": {"train_iters": 4}}}))
    if code is not None:  # a scheduler starts it again
        write(run / "events.jsonl", {"kind": "stopped", "message": "m", "step": 3, "exit_code": code, "segment": 0})
    lock = hold(run)
    assert (read_run_status(run).is_over, read_run_status(run).has_processes) == (False, True)
    release(lock)
    status = read_run_status(run)
    assert (status.is_over, status.has_processes) == (is_over, False)
    text = "stopped (no process of it is left)" if code is None else "stopped (exit code 75)"
    assert f"step 3 of 4, {text}\n" in format_status(status)
    if is_over:
        watch(run, 0.01)
        assert text in " ".join(capsys.readouterr().out.split())


def test_monitor_of_one_pipeline_rank_has_no_bubble(tmp_path):
    run = run_at(tmp_path / "run", 3)
    header = {"record": "header", "segment": 0, "workers": [{"worker": 0, "ranks": [0]}]}
    write(run / "profile.jsonl", header, {"record": "step", "step_ns": 100, "busy_ns": [24]})
    status = read_run_status(run)
    assert (status.loads, status.bubble) == ([0.24], None)
    assert "bubble" not in format_status(status)


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


@pytest.fixture
def terminal():
    opened = []

    def start(*arguments, **options):
        opened.append(Terminal(*arguments, **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def rule(title: str, width: int) -> str:
    return f"── {title} ".ljust(width, "─")


def view(run, width: int, height: int) -> list[str]:
    text = LiveView(read_run_status(run)).render(width, height).plain
    return [line.rstrip() for line in text.split("\n")]


def test_live_view_follows_a_run_and_resizes(tmp_path, terminal):
    run = tmp_path / "run"
    shown = terminal("--every-s", "0.1", run)
    shown.wait_for("waiting for run.json")
    write_run(run, steps=1)
    shown.wait_for("step 1 of 1,000")
    shown.wait_for(rule("Plans", 60))
    append(run / "metrics.jsonl", step_line(2))
    shown.wait_for("step 2 of 1,000")
    shown.resize(120, 30)
    shown.wait_for(rule("Plans", 120))
    # Truncated, and written again by a run that starts from scratch.
    write(run / "metrics.jsonl", step_line(1))
    shown.wait_for("step 1 of 1,000")
    for width, height in ((80, 24), (200, 50), (200, 40), (40, 10)):
        shown.resize(width, height)
        shown.wait_for(rule("Throughput" if height == 10 else "Plans", width) + "\n")
        shown.drain()
        assert shown.display.lines == view(run, width, height)
    shown.type("q")
    code, output = shown.end()
    assert code == 0
    assert "\x1b[?1049l" in output
    assert "\x1b[?25h" in output
    # The last view stays, on the screen that was there before.
    assert "step 1 of 1,000" in shown.display.lines[0]
    assert termios.tcgetattr(shown.terminal) == shown.settings


@pytest.mark.complete
def test_live_view_reports_an_unreadable_run(tmp_path, terminal):
    # A byte that is not UTF-8 and a control character are legal in names of files.
    run = tmp_path / os.fsdecode(b"run\xff\x1b")
    run.mkdir()
    shown = terminal(run, "--every-s", "0.1", size=(200, 24))
    shown.wait_for("no such file")
    (run / "run.json").write_text("{")
    shown.wait_for("Expecting property name")
    assert shown.display.lines[0] == f"waiting for run.json (q quits): {tmp_path}/run"
    shown.type("q")
    assert shown.end()[0] == 0


@pytest.mark.complete
def test_live_view_ends_with_the_run(tmp_path, terminal):
    run = write_run(tmp_path / "run", steps=3, train_iters=4)
    shown = terminal("--every-s", "0.1", run)
    shown.wait_for("step 3 of 4")
    append(run / "metrics.jsonl", step_line(4))
    assert shown.end()[0] == 0
    assert "step 4 of 4 | done" in shown.display.lines[0]


def test_ctrl_c_restores_the_terminal(tmp_path, terminal):
    shown = terminal(write_run(tmp_path / "run"))
    shown.wait_for(rule("Events", 60))
    assert termios.tcgetattr(shown.terminal) != shown.settings
    shown.type("\x03")
    code, output = shown.end()
    assert code == 130
    assert "\x1b[?1049l" in output
    assert "\x1b[?25h" in output
    assert "Traceback" not in output
    assert termios.tcgetattr(shown.terminal) == shown.settings


@pytest.mark.complete
def test_update_draws_changed_lines_only(tmp_path, terminal):
    run = write_run(tmp_path / "run")
    shown = terminal("--every-s", "0.2", run, size=(80, 24))
    first = shown.wait_for(rule("Events", 80))
    append(run / "metrics.jsonl", step_line(341))
    update = shown.wait_for("step 341 of 1,000")
    shown.drain()
    assert len((update + shown.output).encode()) < len(first.encode()) / 2
    # The lines that were not drawn again are still those of the whole view.
    assert shown.display.lines == view(run, 80, 24)
    shown.output = ""
    shown.drain()
    assert shown.output == ""
    shown.type("q")
    assert shown.end()[0] == 0


@pytest.mark.complete
def test_live_view_is_ascii_without_utf8(tmp_path, terminal):
    run = write_run(tmp_path / "run")
    append(run / "events.jsonl", {"step": 340, "kind": "planner", "message": "3 ä"})
    shown = terminal(run, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    shown.wait_for("3 ?")
    assert "\n".join(shown.display.lines).isascii()
    shown.type("q")
    assert shown.end()[0] == 0


@pytest.mark.complete
def test_once_is_ascii_without_utf8(tmp_path):
    run = write_run(tmp_path / "run")
    # Characters that ASCII lacks are escaped, in JSON as JSON.
    append(run / "events.jsonl", {"step": 340, "kind": "planner", "message": "3 ä"})
    command = [sys.executable, "-m", "dynmo_train", "monitor", str(run), "--once"]
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, capture_output=True, check=True, env=plain)
    assert rb"3 \xe4" in done.stdout
    assert b"_  last 60 losses" in done.stdout
    report = subprocess.run([*command, "--format", "json"], capture_output=True, check=True, env=plain)
    assert json.loads(report.stdout)["events"][-1] == "3 ä"


@pytest.mark.complete
def test_no_color_draws_without_colors(tmp_path, terminal):
    shown = terminal(write_run(tmp_path / "run"), NO_COLOR="1")
    output = shown.wait_for(rule("Events", 60))
    assert not re.search(r"\x1b\[(\d+;)*3\d(;\d+)*m", output)
    shown.type("q")
    assert shown.end()[0] == 0


@pytest.mark.complete
def test_color_is_drawn_without_no_color(tmp_path, terminal):
    shown = terminal(write_run(tmp_path / "run"))
    assert re.search(r"\x1b\[(\d+;)*3\d(;\d+)*m", shown.wait_for(rule("Events", 60)))


@pytest.mark.complete
def test_dumb_terminal_gets_one_plain_summary(tmp_path, terminal):
    shown = terminal(write_run(tmp_path / "run"), TERM="dumb")
    code, output = shown.end()
    assert code == 0
    assert "\x1b" not in output
    assert "step 340 of 1,000, 9 min 10 s left" in output


def test_pipe_gets_one_plain_summary(tmp_path):
    run = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "dynmo_train", "monitor", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert done.stdout == format_status(read_run_status(run)) + "\n"
    assert "next migration: plan 2 after step 350, moves 2 items (9.5 MB), predicted gain 5.0%" in done.stdout
    assert "MFU 33.4%" in done.stdout
    report = subprocess.run([*command, "--format", "json", "--peak-tflops", "1978"], capture_output=True, check=True)
    assert json.loads(report.stdout)["mfu"] == pytest.approx(0.3338 / 2, rel=1e-3)
