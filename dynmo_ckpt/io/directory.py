"""New directories that appear by one rename when they are complete, and the checks before one is started.

What is at ``target`` may change while the directory is written, so the rename decides. Without permission to replace,
it fails where anything exists; with it, the two directories are exchanged, between two checks of the old one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .._common.console import human_bytes
from .._common.document import sync_directory
from .._common.errors import UsageError
from .errors import StorageError
from .remote import RemotePath

# Raises UsageError where a directory must not be replaced.
CheckReplaced = Callable[[Path], None]
# Flags of renameat2(2), since Linux 3.15.
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
# The system call or the file system does not have the flag.
_NO_FLAG = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def check_target(target: Path, inputs: Sequence[Path], *, check: CheckReplaced | None, need_bytes: int) -> None:
    """Check a new directory before anything is written.

    Args:
        target: the new directory.
        inputs: files and directories that are read; the first one is the checkpoint.
        check: whether an existing ``target`` may be replaced; None: it must not exist.
        need_bytes: free space that is needed, in bytes.

    Raises:
        UsageError: ``target`` exists and must not be replaced, or replacing it would remove an input.
        StorageError: the file system has less free space than ``need_bytes``.
    """
    outside = target.resolve()
    if target.exists():
        refuse_inputs(target, inputs)
        if check is None:
            raise UsageError(f"{target}: exists; choose another directory, or replace it with --overwrite")
        check(target)
    parent = next(path for path in outside.parents if path.exists())
    free = shutil.disk_usage(parent).free
    if need_bytes > free:
        raise StorageError(f"{parent}: has {human_bytes(free)} free; {human_bytes(need_bytes)} are needed")


def refuse_inputs(target: Path, inputs: Sequence[Path]) -> None:
    """Refuse a new file or directory that is or contains an input, or a file that an input links to.

    Raises:
        UsageError: it does.
    """
    outside = target.resolve()
    for path in inputs:
        # Snapshots of the hub's cache are links to files elsewhere.
        has_links = path.is_dir() and not isinstance(path, RemotePath)
        links = [child for child in path.rglob("*") if child.is_symlink()] if has_links else []
        if any(each.resolve().is_relative_to(outside) for each in (path, *links)):
            raise UsageError(f"{target}: would replace the input {path}; choose another directory")


@contextmanager
def new_directory(target: Path, check: CheckReplaced | None = None) -> Iterator[Path]:
    """A staging directory that is renamed to ``target`` when the block ends without an error.

    On an error or a signal the staging directory is removed and ``target`` stays. What a killed process left next to
    ``target`` is removed first, its previous ``target`` restored.

    Args:
        target: the new directory.
        check: as in ``check_target``; it also decides about a ``target`` that appeared meanwhile.

    Raises:
        UsageError: ``target`` exists at the end, and must not be replaced.
        StorageError: the system refused.
    """
    target = target.resolve()
    staging = previous = target
    locks: list[int | None] = []
    try:
        remove_leftovers(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        while True:
            token = secrets.token_hex(4)
            # Next to the target, and so on the same file system, where a rename is atomic.
            staging = target.with_name(f".{target.name}.tmp-{token}")
            previous = target.with_name(f".{target.name}.old-{token}")
            staging.mkdir()
            locks.append(_lock(staging))
            # Until it is locked, another process takes it for a leftover.
            if _is_locked(locks[-1], staging):
                break
        yield staging
        # The entries must be on disk before the rename that makes them visible; fsync of a file does not include them.
        for directory in [path for path in staging.rglob("*") if path.is_dir()] + [staging]:
            sync_directory(directory)
        _publish(staging, target, previous, check, locks)
        sync_directory(target.parent)
    except OSError as error:
        raise StorageError(f"{target}: {error.strerror or error}; no output was kept") from error
    finally:
        try:
            clean_up(target, staging, previous)
        finally:
            # Again: a signal just before defer_signals interrupts the first call. A second call is idempotent.
            clean_up(target, staging, previous)
            for lock in locks:
                if lock is not None:
                    os.close(lock)


def _publish(staging: Path, target: Path, previous: Path, check: CheckReplaced | None, locks: list[int | None]) -> None:
    """Rename ``staging`` to ``target``, where nothing is or ``check`` permits to replace what is there.

    Raises:
        UsageError: it must not be replaced.
    """
    try:
        return rename_new(staging, target)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
    if check is None:
        raise UsageError(
            f"{target}: was created by another program meanwhile; choose another directory, or replace it with "
            "--overwrite"
        )
    check(target)
    # What is removed must not look like the leftover of a killed process until it has been checked again.
    locks.append(_lock(target))
    if _rename(staging, target, _RENAME_EXCHANGE):
        try:
            check(staging)
        except UsageError:
            _rename(staging, target, _RENAME_EXCHANGE)
            raise
        return None
    # Two renames. Between them the target is missing; after an error there, clean_up restores it.
    target.rename(previous)
    check(previous)
    return rename_new(staging, target)


def rename_new(source: Path, target: Path) -> None:
    """Rename a directory, atomically, to a name under which nothing exists.

    Raises:
        OSError: something does, or the system refused.
    """
    if _rename(source, target, _RENAME_NOREPLACE):
        return
    # Without the flag, the system replaces an empty directory only.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def _rename(source: Path, target: Path, flag: int) -> bool:
    """Call renameat2; returns whether the system has ``flag``.

    Raises:
        OSError: the system refused.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:  # macOS, or a C library before glibc 2.28
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_FLAG:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))


def remove_leftovers(target: Path) -> None:
    """Remove staging directories of killed processes, and restore a ``target`` that one was about to replace.

    Processes that live hold a lock on theirs. Where the file system has no locks, nothing is removed.
    """
    for leftover in sorted(target.parent.glob(f".{glob.escape(target.name)}.*-*")):
        kind = re.fullmatch(r"(tmp|old)-[0-9a-f]{8}", leftover.name.rpartition(".")[2])
        if kind is None or not leftover.is_dir() or (lock := _lock(leftover)) is None:
            continue
        try:
            if kind[1] == "old" and not target.exists():
                # Another process may create or restore it at the same time.
                with suppress(OSError):
                    rename_new(leftover, target)
            _remove(leftover)
        finally:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """Lock a directory until the descriptor is closed or the process ends; None where that is not possible."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_locked(lock: int | None, directory: Path) -> bool:
    """Whether ``directory`` exists and no other process locked it first; without locks nobody removes it."""
    if not directory.is_dir():
        return False
    if lock is not None:
        return True
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False  # the other process is done with it


def _remove(directory: Path) -> None:
    """Remove a directory that other processes may remove at the same time."""
    while directory.is_dir():
        with suppress(FileNotFoundError):
            shutil.rmtree(directory)


def clean_up(target: Path, staging: Path, previous: Path) -> None:
    """Restore the previous target where no new one has replaced it, and remove the rest."""
    with defer_signals():
        if previous.exists() and not target.exists():
            previous.rename(target)
        for leftover in {staging, previous} - {target}:
            _remove(leftover)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGTERM and SIGINT until the block ends: an interrupted cleanup would leave a directory.

    Python runs signal handlers in the main thread, whichever thread the system delivered the signal to. So it is not
    enough to block signals in this thread; the handlers are replaced.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if received:
            signal.raise_signal(received[0])


def write_synced(path: Path, payload: bytes) -> None:
    """Write a small file inside a staging directory, flushed to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as handle:
        handle.write(payload)
        handle.flush()
        os.fsync(handle.fileno())
