"""Membership as a state machine: single cases, and random sequences of joins, drains, deaths, cuts and returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from dynmo_train.launch.elastic.membership import (
    Limits,
    Membership,
    NodeState,
    Record,
    RecordKind,
    apply_beats,
    apply_record,
    end_reason,
    is_complete,
    joining,
    next_members,
    open_round,
    resize,
    without_members,
)

LIMITS = Limits(min_nodes=2, max_nodes=3, node_timeout_s=10.0, first_wait_s=30.0, rejoin_s=20.0)


def joined(name, rank):
    return Record(kind=RecordKind.JOINED, name=name, rank=rank, processes=1)


def ended(name, number):
    return Record(kind=RecordKind.ENDED, name=name, round=number, failures=((0, 1),))


def left(name, state=NodeState.DRAINED):
    return Record(kind=RecordKind.LEFT, name=name, state=state)


def after(records, membership=None, clock_s=0.0):
    membership = membership or Membership.start(LIMITS)
    for record in records:
        membership = apply_record(membership, record, clock_s)
    return membership


@pytest.fixture
def running():
    """A round of three nodes."""
    membership = after([joined("a", 0), joined("b", 1), joined("c", 2)])
    return open_round(membership, ("a", "b", "c"))


def test_first_round_waits_for_all_nodes_then_for_the_minimum():
    membership = after([joined("a", 0), joined("b", 1)])
    assert next_members(membership, 0.0, 29.0) is None
    assert next_members(membership, 0.0, 30.0) == ("a", "b")
    assert next_members(after([joined("c", 2)], membership), 0.0, 0.0) == ("a", "b", "c")


def test_round_below_the_minimum_or_without_node_0_does_not_begin():
    assert next_members(after([joined("a", 0)]), 0.0, 1e6) is None
    assert next_members(after([joined("b", 1), joined("c", 2)]), 0.0, 1e6) is None


def test_drained_node_that_returns_in_time_is_in_the_next_round(running):
    membership = after([ended("a", 1), ended("b", 1), left("c")], running, 100.0)
    assert end_reason(membership) == "node 2 was drained"
    assert next_members(membership, 100.0, 119.0) is None
    assert next_members(membership, 100.0, 120.0) == ("a", "b")
    returned = after([joined("d", 2)], membership, 110.0)
    assert next_members(returned, 100.0, 110.0) == ("a", "b", "d")


def test_node_killed_while_it_saves_was_drained(running):
    membership = after([Record(kind=RecordKind.DRAINING, name="c")], running)
    assert end_reason(membership) is None
    silent = apply_beats(membership, {}, 11.0)
    assert silent.incarnations["c"].state is NodeState.DRAINED
    assert silent.incarnations["b"].state is NodeState.LOST
    assert after([joined("d", 2)], membership).incarnations["c"].state is NodeState.DRAINED


def test_restarted_node_replaces_its_former_incarnation(running):
    membership = after([joined("d", 2)], running)
    assert membership.incarnations["c"].state is NodeState.REPLACED
    assert end_reason(membership) == "node 2 was restarted"
    # Nothing that the former incarnation reports afterwards counts.
    assert after([ended("c", 1), left("c"), joined("c", 2)], membership) == membership


def test_silent_node_is_lost_and_its_late_records_change_nothing(running):
    beats = {"a": 1, "b": 1}
    membership = apply_beats(apply_beats(running, beats, 8.0), {"a": 2, "b": 2}, 11.0)
    assert end_reason(membership) == "node 2 sent no heartbeat for 10 s"
    assert apply_beats(membership, {"a": 3, "b": 3, "c": 9}, 12.0).incarnations["c"].state is NodeState.LOST
    assert after([ended("c", 1)], membership) == membership


def test_round_that_continues_without_a_lost_node_does_not_end(running):
    lost = apply_beats(apply_beats(running, {"a": 1, "b": 1}, 8.0), {"a": 2, "b": 2}, 11.0)
    # Until it is known whether the others continue.
    assert end_reason(lost, has_survivors=True) is None
    membership = without_members(lost, ["c"])
    assert membership.members == ("a", "b")
    assert end_reason(membership) is None
    returned = after([joined("d", 2)], membership, 12.0)
    assert [node.name for node in joining(returned, 12.0)] == ["d"]
    assert end_reason(after([ended("b", 1)], membership), has_survivors=True) == "processes of node 1 failed"


@pytest.mark.parametrize("names", [["a"], ["b", "c"], ["a", "b", "c"]])
def test_round_does_not_continue_without_node_0_or_below_the_minimum(running, names):
    assert without_members(running, names) is None


def test_report_of_an_earlier_round_does_not_end_the_next_one(running):
    membership = after([ended("a", 1), ended("b", 1), ended("c", 1)], running)
    second = open_round(membership, ("a", "b", "c"))
    assert after([ended("b", 1)], second) == second
    assert end_reason(after([ended("b", 2)], second)) == "processes of node 1 failed"
    assert after([ended("b", 3)], second) == second  # of a round that does not exist


def test_node_that_was_late_for_a_round_reports_it_and_can_join(running):
    membership = after([ended("a", 1), ended("b", 1)], running, 5.0)
    beats = dict.fromkeys("abc", 1)
    later = apply_beats(membership, beats, 40.0)
    assert next_members(later, 5.0, 34.0) is None
    assert next_members(later, 5.0, 35.0) == ("a", "b")  # its processes cannot be killed
    second = open_round(later, ("a", "b"))
    assert second.waiting() == []
    assert [node.name for node in after([ended("c", 2)], second).waiting()] == ["c"]


def test_released_nodes_are_not_expected_again(running):
    membership = after([left("c", NodeState.FINISHED), left("b", NodeState.FINISHED)], running)
    assert end_reason(membership) is None
    assert membership.min_nodes == 1
    failed = after([ended("a", 1)], membership)
    assert is_complete(failed)
    assert next_members(failed, 0.0, 0.0) == ("a",)
    assert joining(after([joined("d", 1)], membership), 1e6) == []


def test_nodes_that_return_one_after_another_join_together(running):
    membership = open_round(after([ended("a", 1), left("b"), left("c")], running), ("a",))
    first = after([joined("d", 1)], membership, 100.0)
    assert joining(first, 104.0) == []
    assert [node.name for node in joining(first, 105.0)] == ["d"]
    both = after([joined("e", 2)], first, 103.0)
    assert [node.name for node in joining(both, 103.0)] == ["d", "e"]


def test_requested_number_of_nodes_limits_the_round(running):
    membership = resize(after([ended("a", 1), ended("b", 1), ended("c", 1)], running), 2)
    assert next_members(membership, 0.0, 0.0) == ("a", "b")
    assert joining(open_round(membership, ("a", "b")), 1e6) == []


@dataclass
class Host:
    """A host of the model: its launcher, which sends records, and whether the network reaches node 0."""

    rank: int
    name: str | None = None
    beat: int = 0
    is_cut: bool = False
    unsent: list[Record] = field(default_factory=list)
    heard: int = 0
    runs: int = 0


class MembershipMachine(RuleBasedStateMachine):
    """Hosts and the records that they send, against the membership that node 0 folds from them.

    The model knows what runs where: ``runs`` is the round whose processes a launcher runs, until it hears of the end.
    """

    def __init__(self):
        super().__init__()
        self.clock_s, self.serial = 0.0, 0
        self.limits = replace(LIMITS, max_nodes=5)
        self.hosts = [Host(rank=rank, name="starts") for rank in range(self.limits.max_nodes)]
        self.restart_store()

    # Node 0 and the store end together; the launchers of the other nodes join the next store.
    @rule()
    def restart_store(self):
        self.membership = Membership.start(self.limits)
        self.published: dict[int, tuple[str, ...]] = {}
        self.is_running, self.opened_s = False, self.clock_s
        for host in self.hosts:
            host.unsent = []
            if host.name is not None:
                self._join(host)

    def _join(self, host):
        self.serial += 1
        host.name, host.beat, host.runs, host.heard = f"n{self.serial}", 0, 0, self.membership.round
        self._send(host, joined(host.name, host.rank))

    def _send(self, host, record):
        if host.is_cut:
            host.unsent.append(record)
        else:
            self.membership = apply_record(self.membership, record, self.clock_s)

    @rule(rank=st.integers(1, 4))
    def start(self, rank):
        if not self.hosts[rank].is_cut:
            self._join(self.hosts[rank])  # also while another launcher of the node is there

    @rule(rank=st.integers(1, 4))
    def kill(self, rank):
        self.hosts[rank].name, self.hosts[rank].runs = None, 0

    @rule(rank=st.integers(1, 4))
    def drain(self, rank):
        host = self.hosts[rank]
        if host.name is not None:
            self._send(host, Record(kind=RecordKind.DRAINING, name=host.name))
            self._send(host, left(host.name))
            host.name, host.runs = None, 0

    @rule(rank=st.integers(1, 4), seconds=st.sampled_from([1.0, 15.0, 60.0]), drains=st.booleans())
    def leave_and_return(self, rank, seconds, drains):
        """A launcher that returns before its loss is noticed, during the next rendezvous, or while a round runs."""
        if drains:
            self.drain(rank)
        self.kill(rank)
        self.wait(seconds)
        self.start(rank)

    @rule(rank=st.integers(1, 4))
    def cut(self, rank):
        self.hosts[rank].is_cut = True

    @rule(rank=st.integers(1, 4))
    def heal(self, rank):
        host = self.hosts[rank]
        host.is_cut = False
        for record in host.unsent:  # in flight until then
            self._send(host, record)
        host.unsent = []

    @rule(rank=st.integers(0, 4))
    def fail(self, rank):
        host = self.hosts[rank]
        if host.runs:
            number, host.runs = host.runs, 0
            self._send(host, ended(host.name, number))

    @rule(serial=st.integers(1, 30), number=st.integers(0, 9), kind=st.sampled_from(["ended", "left", "joined"]))
    def repeat_stale_record(self, serial, number, kind):
        """A record of an incarnation that is not a member of the current round arrives late."""
        name = f"n{serial}"
        node = self.membership.incarnations.get(name)
        if node is None or node.is_alive:
            return
        record = {"ended": ended(name, number), "left": left(name), "joined": joined(name, node.rank)}[kind]
        assert apply_record(self.membership, record, self.clock_s) == self.membership

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0, 15.0]))
    def wait(self, seconds):
        for _ in range(round(seconds * 2)):
            self._tick(0.5)

    def _tick(self, seconds):
        self.clock_s += seconds
        beats = {}
        for host in self.hosts:
            if host.name is not None and not host.is_cut:
                host.beat += 1
                beats[host.name] = host.beat
        known = {name: beat for name, beat in beats.items() if name in self.membership.incarnations}
        self.membership = apply_beats(self.membership, known, self.clock_s)
        self._coordinate()
        for host in self.hosts:
            self._follow(host)

    def _coordinate(self):
        """The steps of the coordinator and of the launcher on node 0."""
        reason = end_reason(self.membership)
        node0 = self.hosts[0]
        if self.is_running and (reason or joining(self.membership, self.clock_s)):
            self.is_running, self.opened_s = False, self.clock_s
            if node0.runs:
                number, node0.runs = node0.runs, 0
                self._send(node0, ended(node0.name, number))
        if not self.is_running:
            members = next_members(self.membership, self.opened_s, self.clock_s)
            if members is not None:
                self.membership = open_round(self.membership, members)
                assert self.membership.round not in self.published
                self.published[self.membership.round] = members
                self.is_running = True

    def _follow(self, host):
        """A launcher reads the end of its round, its exclusion, and the next round."""
        if host.name is None or host.is_cut:
            return
        node = self.membership.incarnations.get(host.name)
        if node is not None and not node.is_alive:
            host.name, host.runs = None, 0
            if node.state is NodeState.LOST:
                self._join(host)
            return
        current = self.membership.round
        is_over = not self.is_running or end_reason(self.membership) is not None or host.runs != current
        if host.runs and is_over:
            number, host.runs = host.runs, 0
            self._send(host, ended(host.name, number))
        if self.is_running and host.heard < current and not host.runs:
            host.heard = current
            if host.name in self.published[current]:
                host.runs = current
            else:
                self._send(host, Record(kind=RecordKind.ENDED, name=host.name, round=current))

    @invariant()
    def one_incarnation_of_a_node_is_in_a_round(self):
        for members in self.published.values():
            ranks = Counter(self.membership.incarnations[name].rank for name in members)
            assert set(ranks.values()) == {1}

    @invariant()
    def one_incarnation_of_a_node_is_alive(self):
        alive = Counter(node.rank for node in self.membership.incarnations.values() if node.is_alive)
        assert not alive or max(alive.values()) == 1

    @invariant()
    def rounds_have_at_least_the_minimum(self):
        assert all(self.limits.min_nodes <= len(members) <= 5 for members in self.published.values())
        if self.is_running and end_reason(self.membership) is None:
            assert len(self.membership.members_in(NodeState.ALIVE)) >= self.limits.min_nodes

    @invariant()
    def all_members_know_the_published_list(self):
        assert self.membership.members == self.published.get(self.membership.round, ())
        for host in self.hosts:
            if host.runs and not host.is_cut:
                assert host.name in self.published[host.runs]

    @invariant()
    def drained_nodes_are_not_called_lost(self):
        for node in self.membership.incarnations.values():
            assert not (node.is_draining and node.state in (NodeState.LOST, NodeState.REPLACED))

    @rule()
    def heal_all_and_wait(self):
        self.check_liveness()

    def teardown(self):
        self.check_liveness()

    def check_liveness(self):
        """After all faults, every node with a launcher is a member within 60 s and the time of a restart."""
        for rank in range(1, 5):
            self.heal(rank)
        for _ in range(240):
            self._tick(0.5)
        living = sorted(host.rank for host in self.hosts if host.name is not None)
        if len(living) >= self.limits.min_nodes:
            assert self.is_running
            assert end_reason(self.membership) is None
            members = [self.membership.incarnations[name].rank for name in self.membership.members]
            assert members == living
            assert [host.rank for host in self.hosts if host.runs == self.membership.round] == living
        else:
            assert not self.is_running


def test_random_sequences_end_with_the_right_members():
    run_state_machine_as_test(
        MembershipMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
