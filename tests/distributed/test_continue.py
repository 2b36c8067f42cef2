"""A run that loses a rank continues on the other processes from copies in memory, with unchanged bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed.dying_worker import DEATHS, PIDS, POISONED
from tests.distributed.ports import free_port
from tests.distributed.whole_runs import arguments, check_fields, events, figures, lines, tensors, train, write_data
from tests.paths import ROOT

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(1200)]

# A launcher whose workers kill themselves at the points in their environment.
LAUNCHER = """
import os, sys
from pathlib import Path
from dynmo_train.launch.launcher import LocalLaunch, launch_local
from dynmo_train.launch.elastic import rendezvous
from dynmo_train.launch.options import ExitOptions, NodeConfig
rendezvous.FIRST_JOIN_S = 300.0  # on a loaded machine one node may start a minute after the other
logs, nproc, rank, nnodes, port, *words = sys.argv[1:]
command = (sys.executable, "-m", "tests.distributed.dying_worker")
exits = ExitOptions(max_restarts=1, grace_s=1.0)
nodes = NodeConfig(node_rank=int(rank), nnodes=nnodes, master_port=int(port), node_timeout_s=10, rejoin_s=0)
sys.exit(launch_local(LocalLaunch(
    nproc=int(nproc), arguments=tuple(words), log_dir=Path(logs), exits=exits, command=command, nodes=nodes
)))
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


def launch(whole, tmp_path, deaths, *extra, nodes=(3,), nnodes="1", changed=()):
    """Run processes of which some die; the run directory, the stderr of the launchers, and the started processes.

    Args:
        nodes: number of processes of each node.
        nnodes: MIN:MAX.
        changed: further options.
    """
    run, pids, port = tmp_path / "run", tmp_path / "pids", free_port()
    pids.mkdir()
    words = arguments(whole.parent / "data", run, *extra, **SHORT | {"peer_checkpoint_interval": "4"} | dict(changed))
    launchers = []
    for rank, nproc in enumerate(nodes):
        with (tmp_path / f"err-{rank}").open("w") as err:
            launchers.append(
                subprocess.Popen(
                    [sys.executable, "-c", LAUNCHER, *map(str, (tmp_path / "logs", nproc, rank, nnodes, port)), *words],
                    cwd=ROOT,
                    env=os.environ | {DEATHS: deaths, PIDS: str(pids)},
                    stdout=subprocess.DEVNULL,
                    stderr=err,
                )
            )
    for launcher in launchers:
        launcher.wait(timeout=1000)
    errors = "".join((tmp_path / f"err-{rank}").read_text() for rank in range(len(nodes)))
    assert launchers[0].returncode == 0, errors
    check_fields(run)
    return run, errors, sorted(path.name.split("-")[0] for path in pids.iterdir())


def assert_same_bits(run, whole):
    assert figures(run) == figures(whole)
    assert len(figures(run)) == 14
    assert tensors(run, 14) == tensors(whole, 14)


def headers(run):
    return [record for record in lines(run / "profile.jsonl") if record["record"] == "header"]


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


def test_rank_of_another_node_dies_and_then_that_whole_node(whole, tmp_path):
    run, err, started = launch(whole, tmp_path, "1:backward:6,2:node:11", nodes=(1, 2), nnodes="1:2")
    assert started == ["0", "1", "2"]
    assert incidents(run) == [("continued", 4, 1, [1]), ("continued", 8, 2, [2])]
    assert "rank 2 was lost with node 1; continuing without restart on rank 0" in err
    assert_same_bits(run, whole)


def test_rank_of_one_replica_dies_and_the_bits_are_those_of_a_restart(whole, tmp_path):
    # Two replicas of two stages: nothing is sent before, and three ranks are left, which make one longer pipeline.
    sizes = {"pipeline_model_parallel_size": "2", "save_interval": "4"}
    run, _, started = launch(whole, tmp_path, "3:backward:7", nodes=(4,), changed=sizes)
    assert started == ["0", "1", "2", "3"]
    assert incidents(run) == [("continued", 4, 2, [3])]
    assert [[len(worker["ranks"]) for worker in header["workers"]] for header in headers(run)] == [[2, 2], [1, 1, 1]]
    restarted = tmp_path / "restarted"
    checkpoint = run / "checkpoints" / "step-00000004"
    train(
        whole.parent / "data", restarted, 3, "--load", str(checkpoint), **SHORT | {"pipeline_model_parallel_size": "3"}
    )
    assert {step: each for step, each in figures(run).items() if step > 4} == figures(restarted)
    assert tensors(run, 14) == tensors(restarted, 14)


def test_death_after_a_rollback_continues_from_a_copy_after_it(whole, tmp_path, monkeypatch):
    # Step 10 has a loss spike: back to the checkpoint of step 8. The copy of step 9 before that is of no use any more.
    monkeypatch.setenv(POISONED, "72:80")
    rollback = {
        "save_interval": "4",
        "peer_checkpoint_interval": "3",
        "loss_spike_threshold": "10",
        "loss_spike_window": "8",
        "loss_spike_action": "rollback",
        "loss_spike_skip_batches": "1",
    }
    run, _, started = launch(whole, tmp_path, "1:again:9", changed=rollback)
    assert started == ["0", "1", "2"]
    assert incidents(run) == [("continued", 8, 0, [1])]
    assert [each["skipped_samples"] for each in events(run, "incident") if each["incident"] == "rollback"] == [[72, 80]]
    expected = tmp_path / "expected"
    train(whole.parent / "data", expected, 1, "--skip-train-samples", "72:80", **SHORT)
    assert figures(run) == figures(expected)
    assert tensors(run, 14) == tensors(expected, 14)
