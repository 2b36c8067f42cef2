"""Continuing a round on several nodes: node 0 decides on the deaths of all nodes, the others report and follow."""

from __future__ import annotations

import signal

import pytest
from torch.distributed import HashStore, PrefixStore

from dynmo_train._common.document import DocumentError
from dynmo_train.launch.elastic import node_continuation
from dynmo_train.launch.elastic.continuation import PREFIX, Continuation
from dynmo_train.launch.elastic.coordinator import Round
from dynmo_train.launch.elastic.node_continuation import FollowingNode, LeadingNode, decode_deaths
from dynmo_train.launch.elastic.node_growth import LeadingGrowth
from dynmo_train.launch.elastic.run_layout import RunLayout
from tests.tables import table

KILLED = -signal.SIGKILL
ROUND = Round(number=1, members=(0, 1, 2), names=("a", "b", "c"), processes=(1, 2, 2), port=0, extra_flags=())


class Nodes:
    """The membership: which nodes were lost, and whether a round continues without them."""

    def __init__(self, least):
        self.least, self.may_continue, self.members, self.lost = least, False, ["a", "b", "c"], []

    def departed(self):
        return [node for node in self.lost if node.name in self.members]

    def continue_without(self, names):
        remaining = [name for name in self.members if name not in names]
        if len(remaining) < self.least:
            return False
        self.members = remaining
        return True


class Lost:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Node 0, the other nodes, their membership, and the keys of the store."""
    monkeypatch.setattr(node_continuation, "SAME_LOSS_S", 0.0)

    def make(least=1):
        store, nodes = HashStore(), Nodes(least)
        keys = PrefixStore(PREFIX, store)
        keys.set("ready/0", "1")
        generations, layout = Continuation(store, ROUND.processes), RunLayout(tmp_path / "run", tmp_path / "join")
        leader = LeadingNode(generations, nodes, LeadingGrowth(generations, nodes, ROUND, layout))
        return leader, [FollowingNode(lambda: keys) for _ in range(2)], nodes, keys

    return make


def test_rank_that_dies_on_another_node_is_outlived_by_all(cluster):
    leader, (second, third), nodes, _ = cluster()
    assert (leader.poll({}), second.poll({1: KILLED}), third.poll({})) == (True, True, True)
    notice = leader.poll({})
    assert (notice.ranks, notice.lost, notice.sizes) == ((0, 2, 3, 4), (1,), (1, 1, 2, 2))
    assert second.poll({1: KILLED}) == notice
    # Known: neither node decides on it again.
    assert (leader.poll({}), second.poll({1: KILLED}), second.poll({})) == (True, True, True)
    assert nodes.members == ["a", "b", "c"]
    assert nodes.may_continue


def test_lost_node_is_outlived_with_all_its_ranks(cluster):
    leader, _, nodes, _ = cluster()
    nodes.lost = [Lost("c")]
    notice = leader.poll({})
    assert (notice.ranks, notice.lost, notice.cause) == ((0, 1, 2), (3, 4), "lost with node 2")
    assert nodes.members == ["a", "b"]
    assert leader.poll({}) is True


def test_below_the_minimum_the_round_ends_as_before(cluster):
    leader, (second, _), nodes, keys = cluster(least=3)
    nodes.lost = [Lost("c")]
    assert leader.poll({}) is False
    assert not nodes.may_continue
    assert not keys.check(["next/1"])
    assert second.poll({2: KILLED}) is False


def test_node_whose_processes_are_all_killed_counts_as_one_node_less(cluster):
    leader, (second, _), nodes, _ = cluster(least=3)
    second.poll({1: KILLED, 2: KILLED})
    assert leader.poll({}) is False
    assert second.poll({}) is False
    leader, (second, _), nodes, _ = cluster(least=2)
    second.poll({1: KILLED, 2: KILLED})
    assert leader.poll({}).ranks == (0, 3, 4)
    assert nodes.members == ["a", "c"]


@pytest.mark.parametrize("ended", [{1: 1}, {1: KILLED, 2: 1}, {1: KILLED, 2: 0}])
def test_processes_that_exit_by_themselves_end_the_round(cluster, ended):
    leader, (second, _), _, keys = cluster()
    assert second.poll(ended) is (1 not in ended.values())  # it does not wait for an answer on an error
    assert leader.poll({}) is False
    assert keys.check(["refused"])
    assert not keys.check(["next/1"])


def test_second_loss_before_the_others_train_ends_the_round(cluster):
    leader, (second, third), _, _ = cluster()
    second.poll({1: KILLED})
    assert leader.poll({}).generation == 1
    third.poll({4: KILLED})
    assert leader.poll({}) is False
    assert third.poll({}) is False
    assert leader.pending == {1: KILLED}


def test_deaths_within_half_a_second_are_one_loss(cluster, monkeypatch):
    leader, (second, third), _, _ = cluster()
    monkeypatch.setattr(node_continuation, "SAME_LOSS_S", 300.0)
    second.poll({1: KILLED})
    assert leader.poll({}) is True
    third.poll({3: KILLED})
    monkeypatch.setattr(node_continuation, "SAME_LOSS_S", 0.0)
    assert leader.poll({}).lost == (1, 3)


def test_node_zero_that_has_ended_refuses(cluster):
    leader, (second, _), nodes, _ = cluster()
    leader.close()
    assert second.poll({1: KILLED}) is False
    assert not nodes.may_continue


HOSTILE = [b"[]", b"7", b"{", b'{"x": 1}', b'{"1": "9"}', b'{"1": null}', b'{"-1": 1}', b'{"1": 1e300}', b"\xff"]


@table("value", HOSTILE)
def test_report_of_another_version_is_refused(value):
    with pytest.raises(DocumentError, match="does it run another version"):
        decode_deaths(value)


def test_invalid_reports_are_ignored_with_one_message(cluster, capsys):
    leader, (second, _), _, keys = cluster()
    for value in HOSTILE:
        keys.set(f"deaths/{keys.add('deaths', 1)}", value)
    assert leader.poll({}) is True
    assert capsys.readouterr().err.count("ignored: a report of ended processes of another node") == 1
    second.poll({1: KILLED})
    assert leader.poll({}).lost == (1,)
