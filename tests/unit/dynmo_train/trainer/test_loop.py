"""Errors that end a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from dynmo_train._common.errors import DynmoError
from dynmo_train.data.loader import BatchLoader
from dynmo_train.trainer.failures import lost_connection, naming_causes, out_of_memory
from tests.waiting import wait_for, wait_for_exit


def test_out_of_memory_is_found_in_what_caused_an_error():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    wrapped = RuntimeError("[Stage 0] failed to run forward")
    wrapped.__cause__ = raised.value
    problem = out_of_memory(wrapped)
    assert problem is not None
    assert "--recompute-granularity full" in problem
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) is not None


def test_out_of_memory_leaves_other_errors():
    assert out_of_memory(RuntimeError("shapes differ")) is None


def test_lost_connection_is_named_in_a_few_words():
    closed = RuntimeError("[../third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    assert lost_connection(closed) == "connection closed by peer"
    outer = RuntimeError("the step failed")
    outer.__cause__ = closed
    assert lost_connection(outer) == "connection closed by peer"
    assert lost_connection(RuntimeError("shapes do not match")) is None
    assert lost_connection(None) is None


@pytest.mark.parametrize(("number", "word"), [(signal.SIGKILL, "killed"), (signal.SIGTERM, "terminated")])
def test_killed_worker_of_the_loader_is_named(number, word):
    def shard(consumed, step):
        if step > 1:
            os.kill(os.getpid(), number)
        return step

    loader = BatchLoader(shard, lambda consumed: 1, 9, num_workers=1, pin_memory=False)

    def read_all():
        with naming_causes(3, "host7"):
            for step in range(1, 10):
                loader.batch(step - 1, step)

    with pytest.raises(DynmoError, match=rf"rank 3 on host7: .* \(--num-workers\), pid \d+, was killed: {word}$"):
        read_all()
    loader.close()


def test_causes_that_are_not_known_keep_their_error():
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), naming_causes(0, "host"):
        raise RuntimeError("shapes differ")


def test_worker_of_the_loader_prints_no_stack_when_its_reader_ends(tmp_path, monkeypatch):
    def printed(kind, error, _trace):
        with open(tmp_path / "printed", "a") as sink:
            print(kind.__name__, error, file=sink)

    def shard(consumed, step):
        for error in (EOFError(), ConnectionResetError(), ValueError("other")):
            sys.excepthook(type(error), error, None)
        return step

    monkeypatch.setattr(sys, "excepthook", printed)
    loader = BatchLoader(shard, lambda consumed: 1, 1, num_workers=1, pin_memory=False)
    assert loader.batch(0, 1) == 1
    loader.close()
    assert (tmp_path / "printed").read_text() == "ValueError other\n"


BUSY_LOADER = """
import os, sys, time
from pathlib import Path
from dynmo_train.data.loader import BatchLoader
def shard(consumed, step):
    Path(f"{sys.argv[1]}.part").write_text(str(os.getpid()))
    os.replace(f"{sys.argv[1]}.part", sys.argv[1])
    time.sleep(600)
BatchLoader(shard, lambda consumed: 1, 9, num_workers=1, pin_memory=False).batch(0, 1)
"""


def test_worker_of_the_loader_ends_with_a_killed_trainer(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", BUSY_LOADER, tmp_path / "pid"])
    wait_for((tmp_path / "pid").exists, "the worker", process)
    worker = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait(60)
    wait_for_exit(worker, seconds=30)
