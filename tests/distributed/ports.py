"""Ports of loopback for the servers of tests."""

from __future__ import annotations

import random
import socket

# Below the ports that the system gives to outgoing connections: none of them can take a chosen port before its server.
FIRST, LAST = 20_000, 32_000
_GIVEN: set[int] = set()


def free_port() -> int:
    """A port that nothing listens on and that this process has not given before; drawn, as other processes draw too."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(FIRST, LAST)
        if port in _GIVEN:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _GIVEN.add(port)
        return port
