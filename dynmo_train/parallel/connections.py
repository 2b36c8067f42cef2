"""TCP connections of this process, by file descriptor: how a collective that waits for a dead rank is ended.

On gloo neither ``abort`` nor ``destroy_process_group`` ends a collective that has started; it waits for its timeout. A
connection that is shut down ends it at once, with the error of a lost peer (torch 2.13).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def connected_sockets() -> dict[int, int]:
    """Inode to port of the peer, of all TCP connections of this process; empty where there is no ``/proc``."""
    return {inode: connection.getpeername()[1] for inode, connection in _connections()}


def shut_down(inodes: Collection[int]) -> int:
    """Shut down the connections with these inodes, and return their number; descriptors stay open."""
    count = 0
    for inode, connection in _connections():
        if inode in inodes:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """Each TCP connection of this process: its inode, and a duplicate that is open until the next one."""
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else ():
        try:
            # Other threads may close it meanwhile.
            found = os.fstat(int(name))
            if not stat.S_ISSOCK(found.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.type & socket.SOCK_STREAM:
                    connection.getpeername()
                    yield found.st_ino, connection
        except OSError:
            continue
