"""Connections of a process: those of a group are shut down, others stay."""

from __future__ import annotations

import socket
import threading

import pytest

from dynmo_train.parallel.connections import connected_sockets, shut_down


@pytest.fixture
def connect():
    opened = []
    server = socket.create_server(("127.0.0.1", 0))

    def connect():
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        opened.extend((client, accepted))
        return client, accepted

    yield connect
    for each in (*opened, server):
        each.close()


def test_blocked_receive_ends_and_other_connections_stay(connect):
    other, peer = connect()
    before = set(connected_sockets())
    client, _accepted = connect()
    new = {inode: port for inode, port in connected_sockets().items() if inode not in before}
    assert sorted(new.values()) == sorted([client.getpeername()[1], client.getsockname()[1]])
    received = []
    thread = threading.Thread(target=lambda: received.append(client.recv(1)))
    thread.start()
    assert shut_down(set(new)) == 2
    thread.join(60)
    assert received == [b""]
    peer.sendall(b"x")
    assert other.recv(1) == b"x"


def test_listening_and_closed_sockets_are_ignored():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port not in connected_sockets().values()
    assert shut_down({1, 2, 3}) == 0
