"""The folder of a launcher in memory: heartbeats of its ranks, and files whose existence is a message to them.

Memory, because a message must arrive also when the disk of the logs is full. The launcher has a lock on the folder
while it lives. One that was killed leaves its folder behind without a lock, and the next launcher of the user on this
machine removes it. A lock shows that the owner lives where its process id does not: in another container with the same
``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .._common.console import DISK_ERRORS, print_message
from .._common.errors import UsageError
from ..formats.os_errors import reason

_PREFIX, _LOCK = "dynmo-heartbeats-", "lock"
_MEMORY = Path("/dev/shm")
_PROBE_BYTES = 4096


def _make_folder(prefix: str) -> Path:
    """A new folder on a memory file system, where there is one: pages there never reach a disk.

    Raises:
        UsageError: no folder can be created.
    """
    if os.access(_MEMORY, os.W_OK):
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY))
    return temporary_folder(prefix)


def temporary_folder(prefix: str) -> Path:
    """A new temporary folder.

    Raises:
        UsageError: it cannot be created.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise UsageError(
            f"cannot create a temporary folder: {reason(error)}; set TMPDIR to a folder with free space"
        ) from error


def _lock(path: Path) -> int | None:
    """The descriptor of a file that this process has locked; None where another one has, or where it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_stale_folders(parent: Path) -> None:
    """Remove the folders of launchers that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if (descriptor := _lock(folder / _LOCK)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """A new folder of this launcher, which is removed at the end; those that killed launchers left are removed, too.

    Raises:
        UsageError: it cannot be created.
    """
    folder = _make_folder(_PREFIX)
    # Renamed once it is locked: another launcher must not find it before.
    new = folder / f".{_LOCK}"
    new.touch()
    descriptor = _lock(new)
    new.rename(folder / _LOCK)
    remove_stale_folders(folder.parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _check_writable(folder: Path) -> None:
    """Write a page to a new folder in ``folder``, and remove it.

    Raises:
        OSError: that is not possible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = Path(tempfile.mkdtemp(prefix=".probe-", dir=folder))
    try:
        (probe / "page").write_bytes(bytes(_PROBE_BYTES))
    finally:
        shutil.rmtree(probe, ignore_errors=True)


class LogFolders:
    """Where the rounds of a launch write the output of their ranks.

    Attributes:
        memory: the folder for rounds whose own cannot be written to; None before the first one.
    """

    def __init__(self) -> None:
        self.memory: Path | None = None

    def of_round(self, folder: Path, *, is_first: bool) -> Path:
        """The folder for the logs of a round: ``folder``, or one in memory where its disk is full.

        Args:
            folder: the log folder.
            is_first: whether no round has written to it: then its permissions are an error of the user.

        Raises:
            OSError: it cannot be written to at the first round.
        """
        try:
            _check_writable(folder)
            return folder
        except OSError as error:
            if is_first and error.errno not in DISK_ERRORS:
                raise
            problem = reason(error)
        self.memory = self.memory or _make_folder("dynmo-launch-")
        print_message(f"dynmo-train: warning: {folder}: {problem}; the logs of this round are in memory: {self.memory}")
        return self.memory

    def remove_memory(self) -> None:
        """Remove the logs in memory."""
        if self.memory is not None:
            shutil.rmtree(self.memory, ignore_errors=True)
