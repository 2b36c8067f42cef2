"""The coordinator on node 0, over a store that counts requests."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.launch.elastic.coordinator import Coordinator, append_record, decode_record, encode_record
from dynmo_train.launch.elastic.membership import Limits, NodeState, Record, RecordKind
from dynmo_train.launch.elastic.rendezvous import wait_for_name
from dynmo_train.launch.options import SINGLE_NODE
from tests.benchmarks.train_rendezvous import CountingStore, simulate

LIMITS = Limits(min_nodes=1, max_nodes=3, node_timeout_s=1e9, rejoin_s=0.0)


@pytest.fixture
def store():
    return CountingStore()


def join(store, name, rank):
    store.set(f"beat/{name}", "0")
    append_record(store, Record(kind=RecordKind.JOINED, name=name, rank=rank, processes=2))


def coordinator_of(store, on_joining=lambda _: None):
    return Coordinator(store, LIMITS, "a", on_joining)


def test_requests_per_node_do_not_grow_with_the_number_of_nodes():
    small, large = simulate(16), simulate(256)
    assert [phase.records for phase in large] == [256, 0, 256]
    for few, many in zip(small, large, strict=True):
        assert many.requests / 256 <= few.requests / 16 + 1


@pytest.mark.parametrize(("failures", "is_found"), [(0, True), (2, True), (10**6, False)])
def test_name_of_node_0_is_waited_for_and_an_unknown_one_is_an_error(failures, is_found, capsys):
    """torch's store would try for minutes, print warnings, and ignore signals."""
    attempts = []

    def resolve(host, port):
        attempts.append((host, port))
        if len(attempts) <= failures:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    nodes = replace(SINGLE_NODE, master_addr="node0.invalid", master_port=7)
    if is_found:
        wait_for_name(nodes, 60.0, resolve, every_s=0.0)
        assert attempts == [("node0.invalid", 7)] * (failures + 1)
    else:
        with pytest.raises(UsageError, match=r"--master-addr node0\.invalid: cannot be resolved .*Name or service"):
            wait_for_name(nodes, 0.01, resolve, every_s=0.001)
    assert capsys.readouterr().err.count("waiting up to") == bool(failures)


def test_record_is_the_same_after_encoding():
    record = Record(kind=RecordKind.ENDED, name="a", round=3, failures=((1, -9), (2, 75)))
    assert decode_record(encode_record(record).encode()) == record


def test_record_whose_writer_died_before_writing_it_blocks_no_others(store):
    coordinator = coordinator_of(store)
    join(store, "a", 0)
    store.add("log", 1)  # a number without a record
    join(store, "b", 1)
    assert set(coordinator.poll().incarnations) == {"a", "b"}
    late = encode_record(Record(kind=RecordKind.JOINED, name="c", rank=2, processes=2))
    store.set("beat/c", "0")
    store.set("log/2", late)
    assert set(coordinator.poll().incarnations) == {"a", "b", "c"}
    assert set(coordinator.poll().incarnations) == {"a", "b", "c"}


def test_replaced_incarnation_is_published_and_ends_the_round(store):
    coordinator = coordinator_of(store)
    for rank, name in enumerate("abc"):
        join(store, name, rank)
    members = coordinator.wait_for_members(0.0)
    assert [node.name for node in members] == ["a", "b", "c"]
    current = coordinator.open_round(members, 7, ("--x",))
    assert (current.members, current.processes) == ((0, 1, 2), (2, 2, 2))
    changes = store.values["changes"]
    join(store, "d", 1)
    coordinator.poll()
    assert store.values["gone/b"] == b"replaced"
    assert store.values["stop/1"] == b"node 1 was restarted"
    assert store.values["changes"] == changes + 2
    coordinator.poll()
    assert store.values["changes"] == changes + 2


def test_waiting_node_is_announced_while_a_round_runs(store):
    announced = []
    coordinator = coordinator_of(store, announced.append)
    join(store, "a", 0)
    join(store, "b", 1)
    coordinator.poll()
    members = tuple(coordinator.membership.incarnations.values())
    coordinator.open_round(members, 7, ())
    join(store, "c", 2)
    coordinator.poll()
    assert [[node.rank for node in nodes] for nodes in announced] == [[2]]
    append_record(store, Record(kind=RecordKind.ENDED, name="a", round=1))
    append_record(store, Record(kind=RecordKind.ENDED, name="b", round=1))
    coordinator.end_round(0.0)
    assert [node.name for node in coordinator.wait_for_members(0.0)] == ["a", "b", "c"]


def test_end_of_the_launch_waits_until_the_others_left(store):
    coordinator = coordinator_of(store)
    join(store, "a", 0)
    join(store, "b", 1)
    append_record(store, Record(kind=RecordKind.LEFT, name="b", state=NodeState.FINISHED))
    coordinator.publish_end(3, "why", 600.0)
    assert store.values["end"] == b'{"code": 3, "message": "why"}'
