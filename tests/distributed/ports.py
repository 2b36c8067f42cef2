"""Ports of loopback for the servers of tests."""

from __future__ import annotations

import os
import random
import socket
import tempfile
import time
from pathlib import Path

# Below the ports that the system gives to outgoing connections: none of them can take a chosen port before its server.
FIRST, LAST = 20_000, 32_000
# How long a port stays reserved: a server opens it within this time.
RESERVED_S = 600
_RESERVED = Path(tempfile.gettempdir()) / f"dynmo-test-ports-{os.getuid()}"


def free_port() -> int:
    """A port that no address of this machine uses and that no test of this user was given in the last ten minutes."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(FIRST, LAST)
        if _is_free(port) and _reserve(port):
            return port


def _is_free(port: int) -> bool:
    # Every address and no SO_REUSEADDR: torch's store listens on all of them, and any connection on one may refuse it.
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _reserve(port: int) -> bool:
    """Whether the port is this process's: test processes draw at the same time, before their servers listen."""
    _RESERVED.mkdir(exist_ok=True)
    mark = _RESERVED / str(port)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        if time.time() - mark.stat().st_mtime < RESERVED_S:
            return False
        mark.touch()
    return True
