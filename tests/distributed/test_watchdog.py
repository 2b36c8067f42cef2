"""The watchdog with real processes: a stopped rank of a training, a rank that sleeps, and a slow save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed.ports import free_port
from tests.distributed.test_launch_train import command, losses, place, worker  # noqa: F401 - place is a fixture
from tests.distributed.whole_runs import check_fields, events, lines
from tests.waiting import wait_for

pytestmark = [pytest.mark.complete, pytest.mark.distributed]

NODE = """
import sys
from pathlib import Path
from dynmo_train.launch.elastic import rendezvous
from dynmo_train.launch.launcher import LocalLaunch, launch_local
from dynmo_train.launch.options import ExitOptions, NodeConfig
rendezvous.FIRST_JOIN_S = rendezvous.RESTART_JOIN_S = 300.0
rank, count, port, program = sys.argv[1:5]
nodes = NodeConfig(node_rank=int(rank), nnodes=count, master_port=int(port), join_timeout_s=300, node_timeout_s=300.0)
exits = ExitOptions(grace_s=1.0, max_restarts=0, hang_min_s=4.0)
launch = LocalLaunch(nproc=1, arguments=(), log_dir=Path("logs"), command=(sys.executable, "-c", program), nodes=nodes,
                     exits=exits)
sys.exit(launch_local(launch))
"""

# Ranks that sum a tensor in each step; PROGRAM is what a rank does within it.
STEPS = """
import json, os, time
from pathlib import Path
import torch, torch.distributed as dist
from dynmo_train.launch.watch.heartbeat import Phase, open_heartbeat
rank = int(os.environ["RANK"])
Path("run/requests").mkdir(parents=True, exist_ok=True)
beat = open_heartbeat(os.environ, 600.0)
if rank == 0:
    Path(os.environ["DYNMO_LAUNCH_FILE"]).write_text(os.path.abspath("run"))
dist.init_process_group("gloo")
for step in range(1, 9):
    beat.begin_step(step, is_cold=step == 1)
    beat.enter(Phase.FORWARD, 0)
    PROGRAM
    beat.enter(Phase.REDUCTION)
    dist.all_reduce(torch.zeros(1))
    beat.end_step()
    if rank == 0:
        with open("run/metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps({"step": step}) + "\\n")
os._exit(0)
"""


def start_nodes(folder, program, count=2):
    port = free_port()
    arguments = [str(port), STEPS.replace("PROGRAM", program.replace("\n", "\n    "))]
    return [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(rank), str(count), *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize("records", [True, False])
def test_sleeping_rank_on_another_node_is_found_and_named(tmp_path, monkeypatch, records):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000" if records else "0")
    program = "if rank == 1 and step == 5:\n    time.sleep(1000)"
    nodes = start_nodes(tmp_path, program)
    ends = [(node.communicate(timeout=300), node.returncode) for node in nodes]
    (_, err), code = ends[0]
    assert code == 137, ends
    assert "rank 1 on " in err
    assert "hangs in step 5: no progress during forward of microbatch 0" in err
    assert "the others wait in all_reduce" in err
    [incident] = events(tmp_path / "run", "incident")
    assert (incident["incident"], incident["ranks"], incident["step"]) == ("hang", [1], 4)
    assert incident["phase"] == "forward of microbatch 0"
    assert incident["collective"].startswith("all_reduce")
    check_fields(tmp_path / "run")
    stacks = {path.name: path.read_text() for path in (tmp_path / "logs").glob("node-*/stacks/round-0/*")}
    assert sorted(stacks) == sorted(
        ["rank-0.txt", "rank-1.txt"] + ["rank-0.flight.json", "rank-1.flight.json", "collectives.txt"] * records
    )
    if records:
        text = "rank 1 did not enter gloo:all_reduce number 5 of group 0"
        assert text in stacks["collectives.txt"]
        assert f"flight recorder: {text}" in err
    else:
        assert "no flight recorder on gloo" in err
    assert "in all_reduce" in stacks["rank-0.txt"]
    assert "all_reduce" not in stacks["rank-1.txt"]


def test_slow_save_is_not_a_hang(tmp_path):
    program = "if rank == 0 and step == 5:\n    beat.enter(Phase.SAVE)\n    time.sleep(9)"
    nodes = start_nodes(tmp_path, program)
    ends = [(node.communicate(timeout=300), node.returncode) for node in nodes]
    assert [code for _, code in ends] == [0, 0], ends
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 8
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_stopped_rank_is_found_and_the_run_continues_bit_for_bit(place):  # noqa: F811
    whole = subprocess.run(command(run_dir="whole"), cwd=place, capture_output=True, text=True, timeout=600)
    assert whole.returncode == 0, whole.stderr
    launch = ("launch", "local", "--nproc", 2, "--max-restarts", 1, "--grace-s", 1, "--hang-min-s", 6, "--log-dir")
    process = subprocess.Popen(
        command(*launch, "logs", "--", run_dir="run", save_interval=10),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = place / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(lines(metrics)) >= 15, "step 15", process)
    pid = worker(process.pid, 1)
    os.kill(pid, signal.SIGSTOP)
    since = time.monotonic()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the stopped rank", process)
    found_s = time.monotonic() - since
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "hangs in step" in err
    incidents = events(place / "run", "incident")
    # A loaded machine may really starve a worker.
    [hang, restart] = [each for each in incidents if each["incident"] in ("hang", "restart", "process_death")]
    assert (hang["incident"], hang["ranks"], restart["incident"]) == ("hang", [1], "restart")
    assert hang["cause"].startswith("stopped (state T)")
    assert restart["cause"] == "a rank hung"
    check_fields(place / "run")
    steps = [json.loads(line)["step_ns"] for line in metrics.read_text().splitlines()[1:15]]
    # Polls, stacks and the end of the process take some seconds on a loaded machine.
    assert found_s < 3 * max(steps) / 1e9 + 6 + 20
    assert "State" not in (place / "logs/stacks/round-0/rank-0.txt").read_text()
    assert "state T" in (place / "logs/stacks/round-0/rank-1.txt").read_text()
    assert losses(place / "run") == losses(place / "whole")
