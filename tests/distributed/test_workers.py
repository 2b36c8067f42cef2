"""The pools of processes that play the scenarios of the distributed tests."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynmo_train.pipeline import pipeline_stage
from dynmo_train.trainer import engine
from tests.distributed import ports, workers
from tests.distributed.ports import free_port
from tests.distributed.workers import run_workers
from tests.paths import ROOT
from tests.waiting import wait_for_exit

pytestmark = pytest.mark.distributed
SIZE = 2


def processes(world):
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.getpid(), int(total), world.rank


def state(world):
    return (
        os.environ.get("EXITED"),
        os.getcwd(),
        sys.argv,
        signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        len(warnings.filters),
        random.random(),
        np.random.random(),
        torch.rand(1).item(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        engine.ItemSquares is None,
        engine.Engine.train_step is None,
        pipeline_stage.ItemStage.backward_one_chunk is pipeline_stage.ItemStage.forward_one_chunk,
    )


def disorder(world):
    os.environ["EXITED"] = "1"
    os.chdir("/")
    sys.argv = ["other"]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("error")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    engine.ItemSquares = None
    engine.Engine.train_step = None
    pipeline_stage.ItemStage.backward_one_chunk = pipeline_stage.ItemStage.forward_one_chunk
    return os.getpid()


def fault(world, kind):
    if world.rank == 1:
        if kind == "raises":
            raise KeyError("by intent")
        if kind == "dies":
            os._exit(3)
        time.sleep(3600)  # until the pool ends this process
    dist.barrier()


def leaves_a_file(world, path):
    globals()["_kept"] = open(path, "w")  # noqa: SIM115
    return os.getpid()


def test_scenarios_of_a_size_share_processes_in_new_worlds():
    first, second = run_workers(processes, SIZE), run_workers(processes, SIZE)
    assert first == second
    assert [(total, rank) for _, total, rank in first] == [(2, 0), (2, 1)]
    (own, _, _), _ = run_workers(processes, SIZE, fresh=True)
    assert own not in {pid for pid, _, _ in first}
    assert run_workers(processes, SIZE) == first


def test_scenario_does_not_see_the_previous_one():
    before = run_workers(state, SIZE)
    pids = run_workers(disorder, SIZE)
    assert run_workers(state, SIZE) == before
    assert [pid for pid, _, _ in run_workers(processes, SIZE)] == pids


@pytest.mark.parametrize(
    ("kind", "message"), [("raises", "by intent"), ("dies", "worker 1 of 2 died"), ("hangs", "did not answer")]
)
def test_failed_scenario_ends_only_its_pool(monkeypatch, kind, message):
    before, alone = run_workers(processes, SIZE), run_workers(processes, 1)
    if kind == "hangs":  # of the scenario below alone: on a loaded machine the others may take longer
        monkeypatch.setattr(workers, "TIMEOUT_S", 3)
    with pytest.raises(AssertionError, match=message):
        run_workers(fault, SIZE, kind)
    monkeypatch.undo()
    assert not any(Path(f"/proc/{pid}").exists() for pid, _, _ in before)
    after = run_workers(processes, SIZE)
    assert not {pid for pid, _, _ in before} & {pid for pid, _, _ in after}
    assert run_workers(processes, 1) == alone


@pytest.mark.complete
def test_scenario_with_an_open_file_ends_its_pool(tmp_path):
    left = run_workers(leaves_a_file, SIZE, str(tmp_path / "file"))
    assert not set(left) & {pid for pid, _, _ in run_workers(processes, SIZE)}


@pytest.mark.complete
def test_world_starts_on_another_port_where_its_port_is_taken(monkeypatch):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        given = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(workers, "free_port", lambda: given.pop(0))
        assert [total for _, total, _ in run_workers(processes, SIZE)] == [SIZE] * SIZE
    assert not given


@pytest.mark.complete
def test_no_port_is_given_twice(monkeypatch, tmp_path):
    monkeypatch.setattr(ports, "_RESERVED", tmp_path / "reserved")
    monkeypatch.setattr(ports, "FIRST", ports.LAST - 200)
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == len(given)
    os.utime(tmp_path / "reserved" / str(given[0]), (0, 0))  # a port of long ago
    monkeypatch.setattr(ports, "FIRST", given[0])
    monkeypatch.setattr(ports, "LAST", given[0] + 1)
    assert free_port() == given[0]


@pytest.mark.complete
def test_port_of_any_address_is_not_given(monkeypatch, tmp_path):
    monkeypatch.setattr(ports, "_RESERVED", tmp_path / "reserved")
    port = free_port()
    with socket.create_server(("127.0.0.2", port)):
        monkeypatch.setattr(ports, "_RESERVED", tmp_path / "another")
        monkeypatch.setattr(ports, "FIRST", port)
        monkeypatch.setattr(ports, "LAST", port + 2)
        assert free_port() == port + 1


@pytest.mark.complete
def test_workers_end_with_the_process_that_started_them():
    program = (
        "import os, sys\nfrom tests.distributed.workers import _Pool\nif __name__ == '__main__':\n    pool = _Pool(1)\n"
        "    print(pool.processes[0].pid, flush=True)\n    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=-1, stderr=-1, text=True, timeout=600)
    assert done.returncode == -9, done.stderr
    wait_for_exit(int(done.stdout))
