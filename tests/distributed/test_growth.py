"""A node joins a run that trains: the other ranks keep their processes, and no bit changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.distributed.dying_worker import DEATHS, HELD, PIDS
from tests.distributed.ports import free_port
from tests.distributed.test_continue import LAUNCHER, SHORT, assert_same_bits, headers, incidents
from tests.distributed.whole_runs import arguments, check_fields, events, figures, tensors, train, write_data
from tests.paths import ROOT
from tests.waiting import wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run in one process, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_data(folder / "data")
    train(data, folder / "run", 1, **SHORT)
    return folder / "run"


class Cluster:
    """Launchers of a run, as several nodes of this machine; each of one process but for ``nproc``."""

    def __init__(self, whole, tmp_path, deaths="", held="7", nnodes="1:2", **changed):
        self.folder, self.run, self.pids = tmp_path, tmp_path / "run", tmp_path / "pids"
        self.pids.mkdir()
        options = SHORT | {"peer_checkpoint_interval": "4"} | changed
        self.words = arguments(whole.parent / "data", self.run, **options)
        self.port, self.nnodes, self.nodes = free_port(), nnodes, []
        self.environment = os.environ | {DEATHS: deaths, PIDS: str(self.pids), HELD: held}

    def start(self, rank, nproc=1, words=()):
        """Start a launcher."""
        place = self.folder / f"err-{len(self.nodes)}"
        with place.open("w") as err:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", LAUNCHER),
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
