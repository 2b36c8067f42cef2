"""Trainer and planner: plans are applied, refused or superseded, and none of them changes a bit."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS, ScriptedPlanner
from tests.distributed.whole_runs import command, events, figures, lines, tensors, train, write_data
from tests.waiting import wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """Data, and a run on two stages whose partition never changed."""
    folder = tmp_path_factory.mktemp("handshake")
    data = write_data(folder / "data")
    train(data, folder / "static", 2)
    return folder, data, figures(folder / "static"), tensors(folder / "static", 24)


def start(data: Path, run: Path, *extra: str, **options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(data, run, 2, *extra, **options),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out[-3000:]
    return out


def steps_done(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def planners(run: Path) -> list[int]:
    """Process ids of the planners that watch this run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\x00")
            except OSError:
                continue
            if b"watch" in words and str(run).encode() in words and any(b"dynmo-plan" in word for word in words):
                found.append(int(entry.name))
    return found


def test_lockstep_answers_every_request_and_moves_change_no_bit(static):
    folder, data, expected, weights = static
    run = folder / "lockstep"
    train(data, run, 2, "--balance", "online", "--balance-lockstep", "--balance-policy", "always")
    assert figures(run) == expected
    assert tensors(run, 24) == weights
    records = lines(run / "profile.jsonl")
    requests = [record["step"] for record in records if record["record"] == "plan_request"]
    answers = [record for record in records if record["record"] == "plan_result"]
    assert requests == [3, 6, 9, 12, 15, 18, 21]
    assert [record["step"] for record in answers] == requests
    assert {record["result"] for record in answers} <= {"applied", "unchanged"}
    taken = [record for record in answers if record["result"] == "applied"]
    assert taken
    assert all(record["bytes"] > 0 and record["pause_ns"] > 0 for record in taken)
    assert not planners(run), "the planner outlived the run"


def test_killed_planner_is_restarted_and_changes_no_bit(static):
    """The run is far longer than its planners live, and is ended once four of them were killed."""
    folder, data, expected, weights = static
    run = folder / "killed"
    long = {"train_iters": "100000", "lr_decay_iters": "24", "save_interval": "24", "eval_interval": "12"}
    process = start(data, run, "--balance", "online", rebalance_interval="1", keep_checkpoints="100000", **long)
    killed: set[int] = set()
    for number in range(4):
        for pid in wait_for(lambda: set(planners(run)) - killed, f"planner {number}", process):
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: steps_done(run) > 30, "step 30", process)
    process.terminate()
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 143, out[-3000:]
    assert {step: value for step, value in figures(run).items() if step <= 24} == expected
    assert tensors(run, 24) == weights
    messages = [event["message"] for event in events(run, "planner")]
    assert any("restarted" in message for message in messages)
    assert not planners(run)


def test_training_continues_without_a_planner(static):
    folder, data, expected, _ = static
    run = folder / "external"
    train(data, run, 2, "--balance", "online", "--planner", "external")
    assert figures(run) == expected
    assert not planners(run)


def test_external_plans_are_applied_superseded_or_refused(static):
    """Garbage is refused with a line, a good plan is taken, an older good one superseded, a stale one refused."""
    folder, data, expected, weights = static
    run = folder / "outside"
    process = start(data, run, *SCRIPTED_PLANNER_OPTIONS)
    planner = ScriptedPlanner(run)
    planner.wait_for_ask(3, process)
    initial, items = planner.active(), planner.items()

    def plan(step: int, cut: int, base: int, **changes: Any) -> dict:
        document = copy.deepcopy(initial) | {
            "base_plan_id": base,
            "read_to_step": step,
            "balancer": "manual",
            "reason": f"cut at {cut}",
        }
        document["stages"][0]["items"], document["stages"][1]["items"] = items[:cut], items[cut:]
        return document | changes

    # The trainer waits until a plan has read up to step 3: all three are there when it looks.
    assert planner.write("{ invalid") == 1
    assert planner.write(plan(0, 3, 0)) == 2
    assert planner.write(plan(3, 7, 0)) == 3
    planner.wait_for_ask(6, process)
    assert planner.write(plan(6, 4, 0)) == 4
    planner.wait_for_ask(9, process)
    assert planner.write(plan(9, 4, 3, run_id="another")) == 5
    planner.wait_for_ask(12, process)
    planner.keep_until_end(process)
    finish(process)
    assert figures(run) == expected
    assert tensors(run, 24) == weights
    results = {r["plan_id"]: r for r in lines(run / "profile.jsonl") if r["record"] == "plan_result"}
    assert [results[number]["result"] for number in range(1, 6)] == [
        "refused",
        "superseded",
        "applied",
        "refused",
        "refused",
    ]
    assert "stale" in results[4]["reason"]
    assert "another" in results[5]["reason"]
    assert "not" in events(run, "plan_refused")[0]["message"] or "json" in events(run, "plan_refused")[0]["message"]


def test_offline_run_starts_from_a_plan(static):
    folder, data, expected, weights = static
    plan = json.loads((folder / "static" / "plans" / "plan-000000.json").read_text())
    items = [name for stage in plan["stages"] for name in stage["items"]]
    plan["stages"][0]["items"], plan["stages"][1]["items"] = items[:2], items[2:]
    (folder / "mine.json").write_text(json.dumps(plan))
    run = folder / "offline"
    train(data, run, 2, "--balance", "offline", "--plan", str(folder / "mine.json"))
    assert figures(run) == expected
    assert tensors(run, 24) == weights
    started = json.loads((run / "plans" / "plan-000000.json").read_text())
    assert [stage["items"] for stage in started["stages"]] == [items[:2], items[2:]]
