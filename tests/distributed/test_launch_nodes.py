"""Several launchers that act as several nodes on this machine: order of ranks, failures, lost nodes, growth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.distributed.ports import free_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.complete, pytest.mark.distributed]

NODE = """
import sys
from pathlib import Path
from dynmo_train.launch.elastic import rendezvous
from dynmo_train.launch.launcher import LocalLaunch, launch_local
from dynmo_train.launch.options import ExitOptions, NodeConfig
# On a loaded machine one node may start a minute after the other. In each test the nodes that are expected come.
rendezvous.FIRST_JOIN_S = 300.0
rank, least, most, port, log_dir, restarts, silence_s, program = sys.argv[1:9]
nodes = NodeConfig(node_rank=int(rank), nnodes=f"{least}:{most}", master_port=int(port), join_timeout_s=300,
              node_timeout_s=float(silence_s), rejoin_s=0, reconnect_s=2)
launch = LocalLaunch(nproc=1, arguments=(), log_dir=Path(log_dir), command=(sys.executable, "-c", program), nodes=nodes,
                     exits=ExitOptions(grace_s=1.0, max_restarts=int(restarts)))
sys.exit(launch_local(launch))
"""

GROUP = """
import json, os, select, sys, time
from pathlib import Path
import torch, torch.distributed as dist
rank, start = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RUN_ID"]
def put(path, text):
    Path(f"{path}-{rank}").write_text(text)
    os.replace(f"{path}-{rank}", path)
def linger():  # until it is ended, or its launcher is gone
    select.select([os.pidfd_open(os.getppid())], [], [])
dist.init_process_group("gloo")
total = torch.tensor([rank + 1])
dist.all_reduce(total)
put(f"recorded-{start}-{rank}", json.dumps([os.environ["GROUP_RANK"], int(total), *sys.argv[1:]]))
Path("run/requests").mkdir(parents=True, exist_ok=True)
if rank == 0:
    put(os.environ["DYNMO_LAUNCH_FILE"], os.path.abspath("run"))
dist.barrier()
code = 0
try:
    PROGRAM
except SystemExit as stop:
    code = stop.code or 0
sys.stdout.flush()
os._exit(code)  # a process group's threads may end the process by SIGABRT while the interpreter is torn down
"""


def worker_of(program):
    return GROUP.replace("PROGRAM", program.strip().replace("\n", "\n    "))


def start(folder, program, *, nodes=2, least=None, restarts=0, silence_s=300):
    port = free_port()
    command = [sys.executable, "-c", NODE]
    return [
        subprocess.Popen(
            [
                *command,
                *map(
                    str, (rank, least or nodes, nodes, port, folder / "logs", restarts, silence_s, worker_of(program))
                ),
            ],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in reversed(range(nodes))
    ][::-1]


def finish(process):
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def recorded(folder, start):
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"recorded-round-{start}-*"))]


def test_ranks_follow_node_ranks_and_node_zero_prints(tmp_path):
    ends = [finish(node) for node in start(tmp_path, "print('sum', int(total), rank, flush=True)", nodes=3)]
    assert [(code, out) for code, out, _ in ends] == [(0, "sum 6 0\n"), (0, ""), (0, "")], ends
    assert recorded(tmp_path, 0) == [["0", 6], ["1", 6], ["2", 6]]
    assert sorted(path.name for path in (tmp_path / "logs").glob("node-*")) == ["node-0", "node-1", "node-2"]


def test_failure_on_one_node_ends_all_with_its_exit_code(tmp_path):
    program = "sys.exit(7) if rank == 1 else linger()"
    (first, out, err), (second, _, words) = (finish(node) for node in start(tmp_path, program))
    assert (first, second, out) == (7, 7, "")
    assert "rank 1 exited with code 7" in words
    assert "terminated the processes of node 0: processes of node 1 failed" in err


def test_run_continues_without_a_killed_node(tmp_path):
    program = "linger() if start == 'round-0' else None"
    first, second = start(tmp_path, program, least=1, restarts=1, silence_s=15)
    wait_for(lambda: len(recorded(tmp_path, 0)) == 2, "start of both nodes", first, second)
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    code, _, err = finish(first)
    assert code == 0, err
    assert "node 1 sent no heartbeat for 15 s" in err
    assert "lost node 1" in err
    place = str((tmp_path / "run").resolve())
    more = ["--run-dir", place, "--save", place, "--load", place, "--pipeline-model-parallel-size", "1"]
    assert recorded(tmp_path, 1) == [["0", 1, *more]]
    assert "processes: 1" in err


def test_terminated_node_leaves_immediately(tmp_path):
    program = "linger() if start == 'round-0' else None"
    first, second = start(tmp_path, program, least=1, restarts=1)
    wait_for(lambda: len(recorded(tmp_path, 0)) == 2, "start of both nodes", first, second)
    second.send_signal(signal.SIGTERM)
    assert finish(second)[0] == 143
    code, _, err = finish(first)
    assert code == 0, err
    assert "drained node 1" in err


def test_loss_of_node_zero_requests_a_relaunch(tmp_path):
    first, second = start(tmp_path, "linger()", least=1, restarts=1)
    wait_for(lambda: len(recorded(tmp_path, 0)) == 2, "start of both nodes", first, second)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    code, _, err = finish(second)
    assert code == 75
    assert "node 0 at 127.0.0.1" in err
    assert "launch again" in err
    assert err.count("\n") <= 3, err  # no C++ frames


def test_launcher_that_is_stopped_at_the_end_fails_no_complete_run(tmp_path):
    os.mkfifo(tmp_path / "end")
    first, second = start(tmp_path, "if rank == 0:\n    Path('end').read_text()", silence_s=3)
    wait_for(lambda: len(recorded(tmp_path, 0)) == 2, "start of both nodes", first, second)
    second.send_signal(signal.SIGSTOP)
    (tmp_path / "end").write_text("")
    warning = "dynmo-train: warning: lost node 1 after the processes of node 0 had finished\n"
    try:
        assert finish(first) == (0, "", warning)
    finally:
        second.send_signal(signal.SIGCONT)
    assert finish(second)[0] == 0


def test_finished_node_does_not_end_the_others(tmp_path):
    os.mkfifo(tmp_path / "end")
    program = "if rank == 0:\n    Path('end').read_text()\nprint('still here', flush=True)"
    first, second = start(tmp_path, program)
    code, _, err = finish(second)
    assert (code, err) == (0, "")
    assert first.poll() is None
    (tmp_path / "end").write_text("")
    assert finish(first) == (0, "still here\n", "")


def test_growth_admits_a_waiting_node(tmp_path):
    program = (
        "if start == 'round-0':\n    put('run/requests/resize.json', '{\"workers\": 2}')\n    sys.exit(75)\n"
        "print('sum', int(total), flush=True)\n"
    )
    port = free_port()
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", NODE]

    def node(rank, least):
        words = map(str, (rank, least, 2, port, tmp_path / "logs", 0, 300, worker_of(program)))
        return subprocess.Popen([*command, *words], cwd=tmp_path, stdout=-1, stderr=-1, text=True)

    # The first start waits for the second node no longer than the join time; here both come, and the run grows to both.
    first, second = node(0, 1), node(1, 1)
    code, out, err = finish(first)
    assert (code, out) == (0, "sum 3\n"), err
    assert finish(second)[0] == 0


def test_node_without_a_rendezvous_reports_it(tmp_path):
    text = NODE.replace("join_timeout_s=300", "join_timeout_s=2")
    words = map(str, (1, 2, 2, free_port(), tmp_path / "logs", 0, 300, "pass"))
    ended = subprocess.run(
        [sys.executable, "-c", text, *words], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert "node 1 cannot reach node 0 at 127.0.0.1" in ended.stderr
