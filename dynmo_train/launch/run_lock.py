"""A lock by which other programs on this machine know whether a run has living processes.

Rank 0 and the launcher of node 0 have a shared lock on ``RUN/run.lock`` while they live: the kernel releases it however
they end, also after SIGKILL. A reader asks whether an exclusive lock would be refused, and takes none. The file has the
boot id of the machine: elsewhere nothing is known, since not all network file systems share locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

LOCK_NAME = "run.lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_S = 0.5
# ``struct flock``: type, whence, begin, length (0: to the end of the file), process id.
_FLOCK = struct.Struct("@hhqqi")


def _boot_id() -> bytes:
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


def hold(run_dir: Path) -> int | None:
    """Lock a run directory until the returned descriptor is closed; None where that is not possible."""
    boot_id = _boot_id()
    if not boot_id or not hasattr(fcntl, "F_OFD_SETLK"):
        return None
    try:
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None
    try:
        # Of the open file and not of the process: a copy that a library opens and closes releases nothing.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, boot_id + b"\n", 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def release(descriptor: int | None) -> None:
    """Release a lock.

    Args:
        descriptor: what :func:`hold` returned.
    """
    if descriptor is not None:
        os.close(descriptor)


def is_locked(run_dir: Path) -> bool | None:
    """Whether a process on this machine executes the run; None where that is not known."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return None
    try:
        with (run_dir / LOCK_NAME).open("rb") as file:
            boot_id = _boot_id()
            if not boot_id or file.read(100).strip() != boot_id:
                return None
            query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = _FLOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, query))
    except OSError:
        return None
    return bool(found[0] != fcntl.F_UNLCK)


@contextlib.contextmanager
def holding_when_known(launch_file: Path) -> Iterator[None]:
    """Lock the run directory once rank 0 has recorded it, in a thread.

    Args:
        launch_file: file in which rank 0 records the run directory.
    """
    ended = threading.Event()

    def wait() -> None:
        descriptor = None
        while descriptor is None and not ended.wait(_POLL_S):
            with contextlib.suppress(OSError):
                descriptor = hold(Path(launch_file.read_text(encoding="utf-8")))
        ended.wait()
        release(descriptor)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
