"""Ranks without a connection to rank 0 end with one message that names the address."""

from __future__ import annotations

import socket

import pytest

from dynmo_train._common.errors import DynmoError
from dynmo_train.parallel.process_groups import init_world


def connect(monkeypatch, *, rank, host, port):
    values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in (values | {"MASTER_ADDR": host, "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, str(value))
    init_world("cpu", timeout_s=1.0)


def test_address_that_cannot_be_resolved_is_named(monkeypatch):
    with pytest.raises(DynmoError, match=r"rank 1: MASTER_ADDR=no-such-host.invalid .* has no address"):
        connect(monkeypatch, rank=1, host="no-such-host.invalid", port=29511)


def test_port_that_another_program_has_is_named(monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DynmoError, match=f"rank 0 cannot open the store at .*MASTER_PORT={port}: .*; give a free"):
            connect(monkeypatch, rank=0, host="127.0.0.1", port=port)


def test_rank_0_that_does_not_listen_is_named(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # without listen: connections are refused
        port = unused.getsockname()[1]
        with pytest.raises(DynmoError, match=f"rank 1 cannot reach rank 0 at .*MASTER_PORT={port} within 1 s"):
            connect(monkeypatch, rank=1, host="127.0.0.1", port=port)
