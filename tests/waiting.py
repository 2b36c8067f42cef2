"""Waiting for conditions of other processes, with a deadline that only a broken test reaches.

Prefer what ends by itself: ``Popen.wait``, a pipe, ``wait_for_exit``. Files that another process writes have no event
that works on every file system; ``wait_for`` looks for them.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 600.0


def wait_for(
    condition: Callable[[], Any],
    what: str,
    *processes: subprocess.Popen[Any],
    seconds: float = DEADLINE_S,
    every_s: float = 0.02,
) -> Any:
    """Return what ``condition`` returns once it is true.

    Args:
        condition: called repeatedly.
        what: what is waited for, in messages.
        processes: must run until then.
        seconds: deadline, in seconds from now.
        every_s: seconds between two calls.

    Raises:
        AssertionError: a process ended before, or the deadline passed.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        for process in processes:
            assert process.poll() is None, f"the process ended before {what}: {process.communicate()}"
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(every_s)
    return found


def wait_for_exit(pid: int, seconds: float = DEADLINE_S) -> None:
    """Wait for the end of a process, also one that is not a child of this process.

    Args:
        pid: number of the process.
        seconds: deadline, in seconds from now.

    Raises:
        AssertionError: the process still runs at the deadline.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # Readable as soon as the process has ended, also as a zombie.
        ended, _, _ = select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)
    assert ended, f"process {pid} still runs after {seconds} s"
