"""Training under the launcher: a worker that is killed, and input that only one process can see is bad."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS, ScriptedPlanner
from tests.distributed.whole_runs import check_fields, events

pytestmark = [pytest.mark.complete, pytest.mark.distributed]

OPTIONS = {
    "--num-layers": 2,
    "--hidden-size": 16,
    "--num-attention-heads": 2,
    "--seq-length": 16,
    "--micro-batch-size": 2,
    "--global-batch-size": 4,
    "--train-iters": 120,
    "--lr": 0.01,
    "--vocab-size": 16,
    "--data-path": "x",
    "--split": "1",
    "--eval-iters": 0,
    "--log-interval": 1000,
}


def command(*launch, **changes):
    given = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    options = [str(word) for pair in given.items() for word in pair]
    return [sys.executable, "-m", "dynmo_train", *map(str, launch), "pretrain", "gpt", *options]


@pytest.fixture
def place(tmp_path):
    documents = np.random.RandomState(0).randint(0, 16, (60, 21)).astype("<u2")
    count = len(documents)
    lengths = np.full(count, 21, "<i4")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    offsets, boundaries = np.arange(count, dtype="<i8") * 42, np.arange(count + 1, dtype="<i8")
    (tmp_path / "x.bin").write_bytes(documents.tobytes())
    (tmp_path / "x.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())
    return tmp_path


def worker(launcher, rank):
    """The process id of a rank, by the environment of the launcher's children."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no process of rank {rank}")


def losses(run):
    """Step to the bits of its loss; of steps that were done twice, the second time."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["lm_loss"] for line in map(json.loads, lines)}


def test_killed_worker_changes_no_bit(place):
    whole = subprocess.run(command(run_dir="whole"), cwd=place, capture_output=True, text=True, timeout=600)
    assert whole.returncode == 0, whole.stderr
    launch = ("launch", "local", "--nproc", 2, "--max-restarts", 1, "--grace-s", 1, "--log-dir", "logs", "--")
    process = subprocess.Popen(
        [*command(*launch, run_dir="broken", save_interval=20, rebalance_interval=50), *SCRIPTED_PLANNER_OPTIONS],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    planner = ScriptedPlanner(place / "broken")
    planner.wait_for_ask(50, process)
    os.kill(worker(process.pid, 1), signal.SIGKILL)
    planner.keep_until_end(process)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "rank 1 was killed by SIGKILL" in err
    assert "processes: 2" in err
    assert "Traceback" not in err, err
    check_fields(place / "broken")
    kinds = ("process_death", "restart")
    incidents = [each for each in events(place / "broken", "incident") if each["incident"] in kinds]
    assert [each["incident"] for each in incidents] == ["process_death", "restart"]
    death, restart = incidents
    assert (death["step"], death["steps_lost"], death["ranks"]) == (50, 10, [1])
    assert death["cause"] == "killed by SIGKILL"
    assert (restart["step"], restart["cause"]) == (40, "a process failed")
    assert json.loads((place / "broken" / "run.json").read_text())["segment"] == 1
    assert losses(place / "broken") == losses(place / "whole")
    assert len(losses(place / "whole")) == 120


FAULTY = """
import os, sys
import torch
from dynmo_train.__main__ import run
from dynmo_train.trainer.loop import Trainer
train_step = Trainer.train_step
def faulty(self):
    if self.step == 5 and os.environ["RANK"] in os.environ["FAULTY_RANKS"]:
        raise RuntimeError("injected fault")
    train_step(self)
Trainer.train_step = faulty
run()
"""
FAULTY_LAUNCH = """
import sys
from pathlib import Path
from dynmo_train.launch.launcher import LocalLaunch, launch_local
from dynmo_train.launch.options import ExitOptions
exits = ExitOptions(max_restarts=1, grace_s=1.0, verbose=sys.argv[1] == "verbose")
command = (sys.executable, "faulty.py")
launch = LocalLaunch(nproc=3, arguments=tuple(sys.argv[2:]), log_dir=Path("logs"), exits=exits, command=command)
sys.exit(launch_local(launch))
"""


def run_with_fault(place, ranks, mode="quiet"):
    (place / "faulty.py").write_text(FAULTY)
    words = command(run_dir="run", num_layers=3, save_interval=5, train_iters=8)[3:]
    done = subprocess.run(
        [sys.executable, "-c", FAULTY_LAUNCH, mode, *words],
        cwd=place,
        env={**os.environ, "FAULTY_RANKS": ranks},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    return done.stdout, [line for line in done.stderr.splitlines() if not line.startswith("apex: ")]


@pytest.mark.parametrize("ranks", ["1", "012"])
def test_exception_is_one_line_with_rank_and_log_and_no_stack(place, ranks):
    out, err = run_with_fault(place, ranks)
    errors = [line for line in err if "error" in line.lower()]
    # The first round, and its repetition without progress.
    assert len(errors) == 2
    for line in errors:
        assert re.fullmatch(
            r"dynmo-train: error: rank [012] exited with code 1 on \S+: RuntimeError: injected fault.*", line
        )
        assert ranks != "1" or "error: rank 1 " in line
        log = Path(line.rpartition("its log is ")[2])
        assert "Traceback (most recent call last)" in (place / log).read_text()
    assert err[1:2] == [line for line in err if "restarting from" in line]
    assert len(err) == 3, err
    assert "Traceback" not in out
    # The options are printed once, and after the restart only what changed.
    assert out.count("end of arguments") == 1
    assert "arguments: as in the previous start" in out
    incidents = [each for each in events(place / "run", "incident") if each["incident"] == "process_death"]
    assert ranks != "1" or [each["ranks"] for each in incidents] == [[1], [1]]


def test_exception_verbose_prints_the_stack_of_the_first_cause(place):
    _, err = run_with_fault(place, "1", "verbose")
    assert sum("Traceback" in line for line in err) == 2


def test_error_on_one_process_ends_all(place):
    (place / "file").write_text("")
    launch = ("launch", "local", "--nproc", 2, "--grace-s", 1, "--")
    done = subprocess.run(command(*launch, run_dir="file/run"), cwd=place, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if not line.startswith("apex: ")]
    assert len(errors) == 1
    assert errors[0].startswith("dynmo-train: error: cannot write the run directory file/run")
