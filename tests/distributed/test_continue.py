"""A run that loses a rank continues on the other processes from copies in memory, with unchanged bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed.dying_worker import DEATHS, PIDS
from tests.distributed.whole_runs import arguments, check_fields, events, figures, lines, tensors, train, write_data
from tests.paths import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

# A launcher whose workers kill themselves at the points in their environment.
LAUNCHER = """
import os, sys
from pathlib import Path
from dynmo_train.launch.launcher import LocalLaunch, launch_local
from dynmo_train.launch.options import ExitOptions
logs, nproc, *words = sys.argv[1:]
command = (sys.executable, "-m", "tests.distributed.dying_worker")
exits = ExitOptions(max_restarts=1, grace_s=1.0)
sys.exit(launch_local(
    LocalLaunch(nproc=int(nproc), arguments=tuple(words), log_dir=Path(logs), exits=exits, command=command)
))
"""
SHORT = {
    "train_iters": "14",
    "lr_decay_iters": "14",
    "eval_interval": "14",
    "global_batch_size": "8",
    "pruning_start_iter": "2",
    "pruning_end_iter": "10",
    "pruning_freq": "4",
    "freeze_schedule": "3:1,9:2",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run in one process, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_data(folder / "data")
    train(data, folder / "run", 1, **SHORT)
    return folder / "run"


def launch(whole, tmp_path, deaths, *extra):
    """Run 3 processes of which some die; the run directory, the stderr of the launcher, and the started processes."""
    run, pids = tmp_path / "run", tmp_path / "pids"
    pids.mkdir()
    options = SHORT | {"peer_checkpoint_interval": "4"}
    words = arguments(whole.parent / "data", run, *extra, **options)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "logs"), "3", *words],
        cwd=ROOT,
        env=os.environ | {DEATHS: deaths, PIDS: str(pids)},
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_fields(run)
    return run, done.stderr, sorted(path.name.split("-")[0] for path in pids.iterdir())


def assert_same_bits(run, whole):
    assert figures(run) == figures(whole)
    assert len(figures(run)) == 14
    assert tensors(run, 14) == tensors(whole, 14)


def incidents(run):
    kinds = ("continued", "process_death", "restart")
    return [
        (each["incident"], each["step"], each["steps_lost"], each["ranks"])
        for each in events(run, "incident")
        if each["incident"] in kinds
    ]


def test_rank_that_is_killed_in_a_step_changes_no_bit(whole, tmp_path):
    run, err, started = launch(whole, tmp_path, "1:backward:7")
    assert started == ["0", "1", "2"]  # no other process was started: the survivors trained on
    assert incidents(run) == [("continued", 4, 2, [1])]
    assert "killed by SIGKILL" in [each["cause"] for each in events(run, "incident")]
    assert "rank 1 was killed by SIGKILL; continuing without restart on rank 0, 2" in err
    assert_same_bits(run, whole)
    copies = [line for line in lines(run / "metrics.jsonl") if "peer_copy_s" in line]
    assert copies
    assert all(0 < line["peer_copy_stalled_s"] <= line["peer_copy_s"] for line in copies)


def test_first_rank_dies_and_then_one_during_a_copy(whole, tmp_path):
    # In its second generation rank 2 makes copies after steps 4, 8 and 12: the fourth to the sixth that it makes.
    run, _, started = launch(whole, tmp_path, "0:backward:6,2:copy:4")
    assert started == ["0", "1", "2"]
    assert [each[0] for each in incidents(run)] == ["continued", "continued"]
    assert incidents(run)[0] == ("continued", 4, 1, [0])
    # The copy after step 8 was not complete: that from which the first continuation started was not overwritten.
    assert incidents(run)[1][1:2] == (4,)
    assert incidents(run)[1][3] == [2]
    assert_same_bits(run, whole)


def test_second_death_before_the_others_train_restarts_from_disk(whole, tmp_path):
    run, err, started = launch(whole, tmp_path, "1:backward:7,2:recovery:1", "--save-interval", "3")
    assert started == ["0", "0", "1", "1", "2", "2"]
    assert incidents(run) == [("process_death", 6, 0, [1, 2]), ("restart", 6, 0, [])]
    assert "restarting from" in err
    assert_same_bits(run, whole)
