"""Two hosts for real: namespaces joined by a veth, a launcher in each, gloo between them, and one that is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS, ScriptedPlanner
from tests.distributed.whole_runs import arguments, events, figures, lines, tensors, train, write_data
from tests.faults.network_hosts import network, reason_to_skip
from tests.waiting import wait_for

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

LONG = {"train_iters": "48", "save_interval": "6", "eval_interval": "48"}


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts():
    """Names of two namespaces, with the addresses 10.213.0.1 and 10.213.0.2 on the ends of one link."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = [f"dynmo-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.213.0.{number + 1}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in map(int, listed.split()):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(name, rank, folder, words, nnodes="1:2", reconnect_s="5"):
    """A launcher of one process on a host."""
    node = ["launch", "node", "--nproc", "1", "--nnodes", nnodes, "--node-rank", str(rank), "--max-restarts", "1"]
    node += ["--master-addr", "10.213.0.1", "--master-port", "29500", "--node-timeout-s", "4", "--grace-s", "1"]
    node += ["--rejoin-s", "0", "--reconnect-s", reconnect_s]
    node += ["--log-dir", str(folder / "logs"), "--"]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", "dynmo_train", *node, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sent_bytes(name):
    """What has left the host by the wire."""
    fields = ip("netns", "exec", name, "cat", "/proc/net/dev").split("wire:")[1].split()
    return int(fields[8])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Data, and a run in one process."""
    folder = tmp_path_factory.mktemp("hosts")
    data = write_data(folder / "data")
    train(data, folder / "static", 1, **LONG)
    return folder, data


def test_moves_between_hosts_and_a_lost_host_change_no_bit(hosts, undisturbed):
    folder, data = undisturbed
    run = folder / "two"
    words = arguments(data, run, *SCRIPTED_PLANNER_OPTIONS, "--save", str(run), "--load", str(run), **LONG)
    first, second = (start(name, rank, folder, words) for rank, name in enumerate(hosts))
    planner = ScriptedPlanner(run)
    for step, cut in ((3, 2), (6, 7)):
        planner.wait_for_ask(step, first, second)
        planner.answer([planner.items()[:cut], planner.items()[cut:]])
    planner.wait_for_ask(9, first, second)
    over_the_wire = sent_bytes(hosts[1])
    ip("-n", hosts[0], "link", "set", "wire", "down")  # the cable is cut: nobody hears of it but by silence
    _, words = first.communicate(timeout=600)
    assert first.returncode == 0, words
    assert "node 1 sent no heartbeat for 4 s" in words
    assert "processes: 1" in words
    _, other = second.communicate(timeout=600)
    assert second.returncode == 75, other
    assert "node 0 at 10.213.0.1" in other
    assert [event["bytes"] > 10_000 for event in events(run, "plan_applied")] == [True, True]
    assert "nothing to move" in events(run, "planner")[-1]["message"]
    assert over_the_wire > 100_000
    assert len([record for record in lines(run / "profile.jsonl") if record["record"] == "header"]) == 2
    assert figures(run) == figures(folder / "static")
    assert tensors(run, 48) == tensors(folder / "static", 48)


def test_host_that_was_cut_off_joins_again_by_itself_and_changes_no_bit(undisturbed):
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    folder, data = undisturbed
    run, place = folder / "rejoined", folder / "rejoin"
    place.mkdir()
    words = arguments(data, run, *SCRIPTED_PLANNER_OPTIONS, "--save", str(run), "--load", str(run), **LONG)
    # Three hosts: two of them still ask the planner at each boundary, and so wait while the third joins.
    with network(3, f"{os.getpid()}-rejoin") as made:
        nodes = [
            start(name, rank, place, words, nnodes="1:3", reconnect_s="600") for rank, name in enumerate(made.names)
        ]
        planner = ScriptedPlanner(run)
        planner.wait_for_ask(3, *nodes)
        made.connect(2, is_up=False)
        wait_for(lambda: len(headers(run)) == 2, "restart of two hosts", *nodes)
        planner.wait_for_ask(3, *nodes)
        made.connect(2, is_up=True)
        wait_for(lambda: list(Path("/dev/shm").glob("dynmo-heartbeats-*/join.json")), "join request", *nodes)
        planner.keep_until_end(nodes[0])
        ends = [node.communicate(timeout=600) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], ends
    assert "node 2 joins after the next save | processes: 2 -> 3" in ends[0][1]
    assert "joining again" in ends[2][1]
    assert [len(header["workers"]) for header in headers(run)] == [3, 2, 3]
    assert [event["processes"] for event in events(run, "join")] == [3]
    assert figures(run) == figures(folder / "static")
    assert tensors(run, 48) == tensors(folder / "static", 48)


def headers(run):
    profile = run / "profile.jsonl"
    return [record for record in lines(profile) if record["record"] == "header"] if profile.exists() else []
