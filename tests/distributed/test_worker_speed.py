"""A worker that becomes slow is named within 20 steps, loses layers, and gets them back once it has recovered."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.distributed.test_launch_train import command, losses, place  # noqa: F401 - place is a fixture
from tests.distributed.whole_runs import check_fields, events, lines

pytestmark = [pytest.mark.complete, pytest.mark.distributed]

SLOW_FROM, SLOW_TO, STEPS = 21, 60, 90
LAYERS = 4


def write_trace(path):
    """The profile of a run whose blocks take 12 ms of a microbatch, and the other items no time."""
    blocks = [f"layers.{layer}.{part}" for layer in range(LAYERS) for part in ("attention", "mlp")]
    names = ["embedding", *blocks, "head"]
    forward = [2_000_000 if name in blocks else 0 for name in names]
    header = {"format": "dynmo.profile", "version": 1, "record": "header", "items": [{"name": name} for name in names]}
    step = {"record": "step", "step": 1, "forward_ns": forward, "backward_ns": [2 * ns for ns in forward]}
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, step)))


def partitions(run):
    """Step from which a partition was active, and the number of blocks of each worker."""
    found = []
    for record in lines(run / "profile.jsonl"):
        if record["record"] == "plan_result" and record["result"] == "applied":
            plan = json.loads((run / "plans" / f"plan-{record['plan_id']:06d}.json").read_text())
            items = [sum(name.startswith("layers.") for name in stage["items"]) // 2 for stage in plan["stages"]]
            found.append((record["step"], items))
    return found


def test_layers_leave_a_slow_worker_and_return(place):  # noqa: F811
    write_trace(place / "trace.jsonl")
    shape = {"num_layers": LAYERS, "train_iters": STEPS}
    whole = subprocess.run(command(run_dir="whole", **shape), cwd=place, capture_output=True, text=True, timeout=600)
    assert whole.returncode == 0, whole.stderr
    options = {"balance": "online", "rebalance_interval": 5, "planner_timeout_s": 300, "emulate": "trace.jsonl"}
    slow = {"emulate_slow": f"1:5:{SLOW_FROM}:{SLOW_TO}"}
    words = command(
        "launch", "local", "--nproc", 2, "--log-dir", "logs", "--", run_dir="run", **shape, **options, **slow
    )
    done = subprocess.run([*words, "--balance-lockstep"], cwd=place, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    run = place / "run"
    check_fields(run)
    found = [event for event in events(run, "incident") if event["incident"] != "slow_step"]
    assert [event["incident"] for event in found] == ["slow_worker", "worker_recovered"], found
    named, recovered = found
    assert SLOW_FROM <= named["step"] < SLOW_FROM + 20
    assert SLOW_TO < recovered["step"] <= SLOW_TO + 20
    assert (named["ranks"], named["cause"].partition(":")[0]) == ([1], "slow device")
    # A loaded machine wakes sleepers late, so that layers of even times move by one, too.
    active = [(step, blocks) for step, blocks in partitions(run) if named["step"] <= step < recovered["step"]]
    assert active, partitions(run)
    assert active[0][0] < SLOW_FROM + 20
    assert active[-1][1][1] <= 1
    assert partitions(run)[-1][1][1] >= 2
    assert losses(run) == losses(place / "whole")
