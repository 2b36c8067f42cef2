"""New directories that appear by one rename when they are complete, and the checks before one is started."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._common.console import human_bytes
from .._common.document import sync_directory
from .._common.errors import UsageError
from .errors import StorageError


def check_target(target: Path, source: Path, *, overwrite: bool, need_bytes: int) -> None:
    """Check a new directory before anything is written.

    Raises:
        UsageError: ``target`` exists without ``overwrite``, or replacing it would remove ``source``.
        StorageError: the file system has less free space than ``need_bytes``.
    """
    inside, outside = source.resolve(), target.resolve()
    if inside.is_relative_to(outside):
        raise UsageError(f"{target}: would replace the input {source}; choose another directory")
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: exists; choose another directory, or replace it with --overwrite")
    parent = next(path for path in outside.parents if path.exists())
    free = shutil.disk_usage(parent).free
    if need_bytes > free:
        raise StorageError(f"{parent}: has {human_bytes(free)} free; {human_bytes(need_bytes)} are needed")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A staging directory that is renamed to ``target`` when the block ends without an error.

    An existing ``target`` is replaced. On an error or a signal the staging directory is removed and ``target`` stays.
    What a killed process left next to ``target`` is removed first, its previous ``target`` restored.

    Raises:
        StorageError: the system refused.
    """
    token = secrets.token_hex(4)
    target = target.resolve()
    # Next to the target, and so on the same file system, where a rename is atomic.
    staging = target.with_name(f".{target.name}.tmp-{token}")
    previous = target.with_name(f".{target.name}.old-{token}")
    locks: list[int | None] = []
    try:
        remove_leftovers(target)
        staging.mkdir(parents=True)
        locks.append(_lock(staging))
        yield staging
        # The entries must be on disk before the rename that makes them visible; fsync of a file does not include them.
        for directory in [path for path in staging.rglob("*") if path.is_dir()] + [staging]:
            sync_directory(directory)
        if target.exists():
            # rename does not replace a directory with contents, so two renames are needed. Between them the target is
            # missing; after an error there, clean_up restores it.
            locks.append(_lock(target) if target.is_dir() else None)
            target.rename(previous)
        staging.rename(target)
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
                leftover.rename(target)
            else:
                shutil.rmtree(leftover)
        finally:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """Lock a directory until the descriptor is closed or the process ends; None where that is not possible."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def clean_up(target: Path, staging: Path, previous: Path) -> None:
    """Restore the previous target where no new one has replaced it, and remove the rest."""
    with defer_signals():
        if previous.exists() and not target.exists():
            previous.rename(target)
        for leftover in (staging, previous):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            elif leftover.exists():
                leftover.unlink()


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
