"""Trainer and planner: plans are taken, refused or superseded as the design says, and nothing of it changes a bit."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from whole_runs import command, events, figures, lines, tensors, train, write_data

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


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


def wait_for(condition, process, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the run ended before {what}: {process.stdout.read()[-2000:]}"
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.01)


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
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


def test_lockstep_answers_every_ask_and_moves_change_nothing(static):
    folder, data, expected, weights = static
    run = folder / "lockstep"
    train(data, run, 2, "--balance", "online", "--balance-lockstep", "--balance-policy", "always")
    assert figures(run) == expected
    assert tensors(run, 24) == weights
    records = lines(run / "profile.jsonl")
    asks = [record["step"] for record in records if record["record"] == "ask"]
    answers = [record for record in records if record["record"] == "plan_result"]
    assert asks == [3, 6, 9, 12, 15, 18, 21]
    assert [record["step"] for record in answers] == asks
    assert {record["result"] for record in answers} <= {"taken", "kept"}
    taken = [record for record in answers if record["result"] == "taken"]
    assert taken
    assert all(record["bytes"] > 0 and record["pause_ns"] > 0 for record in taken)
    assert not planners(run), "the planner outlived the run"


def test_a_killed_planner_changes_nothing_but_that_no_more_plans_come(static):
    folder, data, expected, weights = static
    run = folder / "killed"
    process = start(data, run, "--balance", "online", train_iters="24", rebalance_interval="1")
    for kill in range(4):
        wait_for(lambda: planners(run), process, f"planner {kill}")
        for pid in planners(run):
            os.kill(pid, signal.SIGKILL)
    finish(process)
    assert figures(run) == expected
    assert tensors(run, 24) == weights
    told = [event["message"] for event in events(run, "planner")]
    assert any("started again" in message for message in told)
    assert not planners(run)


def test_a_missing_planner_is_told_and_training_goes_on(static):
    folder, data, expected, _ = static
    run = folder / "external"
    train(data, run, 2, "--balance", "online", "--planner", "external")
    assert figures(run) == expected
    assert not planners(run)


def test_plans_from_outside(static):
    """Garbage is refused with a line, a good plan is taken, an older good one superseded, a stale one refused."""
    folder, data, expected, weights = static
    run = folder / "outside"
    process = start(data, run, "--balance", "online", "--planner", "external", rebalance_interval="2", train_iters="24")
    first = run / "plans" / "plan-000000.json"
    wait_for(lambda: steps_done(run) >= 1, process, "first step")
    initial = json.loads(first.read_text())
    items = [name for stage in initial["stages"] for name in stage["items"]]

    def plan(number: int, cut: int, base: int) -> dict:
        document = copy.deepcopy(initial) | {
            "plan_id": number,
            "base_plan_id": base,
            "balancer": "manual",
            "reason": f"cut at {cut}",
        }
        document["stages"][0]["items"], document["stages"][1]["items"] = items[:cut], items[cut:]
        return document

    def put(number: int, content: str) -> None:
        temporary = run / "plans" / f".{number}"
        temporary.write_text(content)
        os.link(temporary, run / "plans" / f"plan-{number:06d}.json")

    def answered(number: int) -> bool:
        return any(r.get("plan_id") == number and r["record"] == "plan_result" for r in lines(run / "profile.jsonl"))

    put(1, "{ this is no plan")
    wait_for(lambda: answered(1), process, "answer to garbage")
    # The lower number first: both are there when the next boundary looks.
    os.kill(process.pid, signal.SIGCONT)
    put(2, json.dumps(plan(2, 3, 0)))
    put(3, json.dumps(plan(3, 7, 0)))
    wait_for(lambda: answered(3), process, "answer to a good plan")
    put(4, json.dumps(plan(4, 4, 0)))
    wait_for(lambda: answered(4), process, "answer to a stale plan")
    put(5, json.dumps(plan(5, 4, 3) | {"run_id": "another"}))
    wait_for(lambda: answered(5), process, "answer to a plan of another run")
    finish(process)
    assert figures(run) == expected
    assert tensors(run, 24) == weights
    results = {r["plan_id"]: r for r in lines(run / "profile.jsonl") if r["record"] == "plan_result"}
    assert results[1]["result"] == "refused"
    assert results[3]["result"] == "taken"
    assert results[2]["result"] in ("superseded", "taken")
    assert results[4]["result"] == "refused"
    assert "stale" in results[4]["reason"]
    assert results[5]["result"] == "refused"
    assert "another" in results[5]["reason"]
    assert "not" in events(run, "plan_refused")[0]["message"] or "json" in events(run, "plan_refused")[0]["message"]


def test_offline_starts_from_a_plan(static):
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
