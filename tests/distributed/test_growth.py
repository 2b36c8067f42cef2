"""A node joins a run that trains: the other ranks keep their processes, and no bit changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.distributed.dying_worker import DEATHS, PAUSE, PIDS
from tests.distributed.ports import free_port
from tests.distributed.test_continue import LAUNCHER, SHORT, assert_same_bits, headers, incidents
from tests.distributed.whole_runs import arguments, check_fields, events, figures, tensors, train, write_data
from tests.paths import ROOT
from tests.waiting import wait_for

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run in one process, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_data(folder / "data")
    train(data, folder / "run", 1, **SHORT)
    return folder / "run"


class Cluster:
    """Launchers of a run, as several nodes of this machine; each of one process but for ``nproc``."""

    def __init__(self, whole, tmp_path, deaths="", pause="1:7", nnodes="1:2", **changed):
        self.folder, self.run, self.pids = tmp_path, tmp_path / "run", tmp_path / "pids"
        self.pids.mkdir()
        options = SHORT | {"peer_checkpoint_interval": "4"} | changed
        self.words = arguments(whole.parent / "data", self.run, **options)
        self.port, self.nnodes, self.nodes = free_port(), nnodes, []
        self.environment = os.environ | {DEATHS: deaths, PIDS: str(self.pids), PAUSE: pause}

    def start(self, rank, nproc=1, words=(), launcher=LAUNCHER):
        """Start a launcher with further ``words``."""
        place = self.folder / f"err-{len(self.nodes)}"
        with place.open("w") as err:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", launcher),
                    *map(str, (self.folder / "logs", nproc, rank, self.nnodes, self.port)),
                    *(*self.words, *words),
                ],
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )
        self.nodes.append(process)
        return process

    def err(self, number):
        """What a launcher printed so far, by the order of the starts."""
        return (self.folder / f"err-{number}").read_text()

    def finish(self):
        """Wait for the end; the exit codes."""
        codes = [node.wait(timeout=1000) for node in self.nodes]
        assert codes[0] == 0, "\n".join(self.err(number) for number in range(len(codes)))
        check_fields(self.run)
        return codes

    def started(self):
        """Rank and process id of each process that was started."""
        return sorted(path.name for path in self.pids.iterdir())

    def ranks(self):
        return [name.split("-")[0] for name in self.started()]


def growths(run):
    return [
        (each["step"], each["ranks"], each["steps_lost"])
        for each in events(run, "incident")
        if each["incident"] == "growth"
    ]


def sizes(run):
    return [[len(worker["ranks"]) for worker in header["workers"]] for header in headers(run)]


def test_lost_node_returns_and_grows_the_run_in_place(whole, tmp_path):
    cluster = Cluster(whole, tmp_path, "1:node:6")
    first, second = cluster.start(0), cluster.start(1)
    second.wait(timeout=600)
    before = cluster.started()
    cluster.start(1)
    assert cluster.finish() == [0, -signal.SIGKILL, 0]
    assert cluster.ranks() == ["0", "1", "2"]  # one process of node 0, from the start to the end
    assert set(before) < set(cluster.started())
    assert incidents(cluster.run) == [("continued", 4, 1, [1])]
    assert growths(cluster.run) == [(8, [2], 0)]
    assert sizes(cluster.run) == [[1, 1], [1], [1, 1]]
    assert "rank 2 joined; continuing without restart on rank 0, 2" in cluster.err(0)
    assert "node 1 joined" in [each["cause"] for each in events(cluster.run, "incident")]
    assert_same_bits(cluster.run, whole)
    assert first.returncode == 0


def grown_after_loss(whole, tmp_path, deaths, **changed):
    """A run that loses node 1 in step 6 and gets it back, with further deaths; the cluster."""
    cluster = Cluster(whole, tmp_path, ",".join(["1:node:6", *deaths]), **changed)
    cluster.start(0)
    cluster.start(1).wait(timeout=600)
    cluster.start(1)
    return cluster


def test_joining_process_that_dies_in_its_imports_disturbs_nothing(whole, tmp_path):
    cluster = grown_after_loss(whole, tmp_path, ["2:start:0"])
    assert cluster.finish() == [0, -signal.SIGKILL, 0]
    assert cluster.ranks() == ["0", "1", "2", "3"]
    assert "node 1 does not join: the process of rank 2 ended before it joined" in cluster.err(0)
    # The next attempt of the same launcher succeeds.
    assert incidents(cluster.run) == [("continued", 4, 1, [1])]
    assert growths(cluster.run) == [(8, [3], 0)]
    assert_same_bits(cluster.run, whole)


def test_joining_node_that_dies_in_its_imports_disturbs_nothing(whole, tmp_path):
    cluster = grown_after_loss(whole, tmp_path, ["2:start:1"])
    cluster.nodes[2].wait(timeout=600)
    cluster.start(1)
    assert cluster.finish() == [0, -signal.SIGKILL, -signal.SIGKILL, 0]
    assert cluster.ranks() == ["0", "1", "2", "3"]
    assert "node 1 does not join: node 1 left before it joined" in cluster.err(0)
    assert incidents(cluster.run) == [("continued", 4, 1, [1])]
    assert growths(cluster.run) == [(8, [3], 0)]
    assert_same_bits(cluster.run, whole)


def test_joining_process_that_dies_at_the_boundary_is_not_awaited(whole, tmp_path):
    cluster = grown_after_loss(whole, tmp_path, ["2:boundary:0"])
    assert cluster.finish() == [0, -signal.SIGKILL, 0]
    log = next((cluster.folder / "logs" / "node-0").glob("*/attempt_0/0/stdout.log")).read_text()
    assert "ranks that waited do not join after iteration 8: the process of rank 2 ended before it joined" in log
    assert incidents(cluster.run) == [("continued", 4, 1, [1])]
    assert [each[1] for each in growths(cluster.run)] in ([], [[3]])  # after step 12, if it was fast enough
    assert_same_bits(cluster.run, whole)


def test_joining_node_that_dies_at_the_boundary_is_awaited_briefly(whole, tmp_path):
    cluster = grown_after_loss(whole, tmp_path, ["2:boundary:1"])
    assert cluster.finish() == [0, -signal.SIGKILL, -signal.SIGKILL]
    assert "node 1 does not join: its processes did not answer within 5 s" in cluster.err(0)
    assert cluster.ranks() == ["0", "1", "2"]
    assert incidents(cluster.run) == [("continued", 4, 1, [1])]
    assert growths(cluster.run) == []
    assert_same_bits(cluster.run, whole)


def test_joining_process_that_dies_during_the_growth_restarts_the_run(whole, tmp_path):
    cluster = grown_after_loss(whole, tmp_path, ["2:recovery:2"], save_interval="3")
    assert cluster.finish() == [0, -signal.SIGKILL, 0]
    assert [each[0] for each in incidents(cluster.run)] == ["continued", "process_death", "restart"]
    assert growths(cluster.run) == []
    assert sizes(cluster.run) == [[1, 1], [1], [1, 1]]
    assert_same_bits(cluster.run, whole)


def test_node_with_other_options_is_refused_and_training_continues(whole, tmp_path):
    cluster = Cluster(whole, tmp_path, "1:node:6")
    cluster.start(0)
    cluster.start(1).wait(timeout=600)
    cluster.start(1, words=["--lr", "1e-3"])
    assert cluster.finish() == [0, -signal.SIGKILL, 0]
    assert cluster.ranks() == ["0", "1", "2"]
    assert "the processes were started differently" in cluster.err(0)
    assert "it waits until the next restart" in cluster.err(0)
    (refused,) = events(cluster.run, "resize_refused")
    assert "--lr" in refused["message"]
    assert incidents(cluster.run) == [("continued", 4, 1, [1])]
    assert growths(cluster.run) == []
    assert_same_bits(cluster.run, whole)


# Node 0 starts alone, and waits for both others before it lets one of them join.
PATIENT = LAUNCHER.replace("FIRST_JOIN_S = 300.0", "FIRST_JOIN_S = 0.1").replace(
    "logs, nproc,",
    "import functools\n"
    "rendezvous.Limits = functools.partial(rendezvous.Limits, quiet_s=300.0, max_wait_s=300.0)\nlogs, nproc,",
    1,
)


def test_run_on_one_node_grows_by_two_nodes_at_once(whole, tmp_path):
    cluster = Cluster(whole, tmp_path, pause="0:3", nnodes="1:3")
    first = cluster.start(0, launcher=PATIENT)
    wait_for(lambda: cluster.started(), "the first process", first)
    cluster.start(2)
    cluster.start(1)
    assert cluster.finish() == [0, 0, 0]
    assert cluster.ranks() == ["0", "1", "2"]
    assert incidents(cluster.run) == []
    assert growths(cluster.run) == [(4, [1, 2], 0)]
    assert sizes(cluster.run) == [[1], [1, 1, 1]]
    assert_same_bits(cluster.run, whole)


def test_grown_replicas_have_the_bits_of_a_restart_with_their_layout(whole, tmp_path):
    # Two replicas of two stages on two nodes; without one of them a pipeline of two stages remains.
    sizes_of_all = {"pipeline_model_parallel_size": "2", "save_interval": "4"}
    cluster = Cluster(whole, tmp_path, "2:node:6", **sizes_of_all)
    cluster.start(0, nproc=2)
    cluster.start(1, nproc=2).wait(timeout=600)
    cluster.start(1, nproc=2)
    assert cluster.finish() == [0, -signal.SIGKILL, 0]
    assert cluster.ranks() == ["0", "1", "2", "3", "4", "5"]
    assert growths(cluster.run) == [(8, [4, 5], 0)]
    assert sizes(cluster.run) == [[2, 2], [1, 1], [2, 2]]
    restarted = tmp_path / "restarted"
    load = ("--load", str(cluster.run / "checkpoints" / "step-00000008"))
    train(whole.parent / "data", restarted, 4, *load, **SHORT | {"pipeline_model_parallel_size": "2"})
    assert {step: each for step, each in figures(cluster.run).items() if step > 8} == figures(restarted)
    assert tensors(cluster.run, 14) == tensors(restarted, 14)
