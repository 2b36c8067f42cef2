"""Directories that appear whole or not at all, and the questions asked before one is begun."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._common.console import human_bytes
from .._common.errors import UsageError
from ..errors import StorageError


def check_target(target: Path, source: Path, *, overwrite: bool, need_bytes: int) -> None:
    """Refuse before anything is written.

    Raises:
        UsageError: ``target`` exists and may not be replaced, or replacing it would remove ``source``.
        StorageError: the file system has less room than ``need_bytes``.
    """
    inside, outside = source.resolve(), target.resolve()
    if inside.is_relative_to(outside):
        raise UsageError(f"{target}: the output would replace the input {source}; give another directory")
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: exists; give --overwrite to replace it, or another directory")
    parent = next(path for path in outside.parents if path.exists())
    free = shutil.disk_usage(parent).free
    if need_bytes > free:
        raise StorageError(f"{parent}: {human_bytes(need_bytes)} are needed, {human_bytes(free)} are free")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A staging directory that becomes ``target`` by one rename when the block ends without an error.

    An older ``target`` is replaced. On an error or interruption the staging directory goes and an older target stays.
    """
    token = secrets.token_hex(4)
    target = target.resolve()
    staging = target.with_name(f".{target.name}.tmp-{token}")
    aside = target.with_name(f".{target.name}.old-{token}")
    try:
        staging.mkdir(parents=True)
        yield staging
        for directory in [path for path in staging.rglob("*") if path.is_dir()] + [staging]:
            sync_directory(directory)
        if target.exists():
            target.rename(aside)
        staging.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise StorageError(f"{target}: {error.strerror or error}; nothing was put in place") from error
    finally:
        try:
            _clean_up(target, staging, aside)
        finally:
            # Again, for the signal that came just before signals had to wait; there is nothing left to do otherwise.
            _clean_up(target, staging, aside)


def _clean_up(target: Path, staging: Path, aside: Path) -> None:
    """Put an older target back where no new one is in its place, and remove the rest."""
    with _defer_signals():
        if aside.exists() and not target.exists():
            aside.rename(target)
        for leftover in (staging, aside):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            elif leftover.exists():
                leftover.unlink()


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Signals that end this process wait until the block is over: tidying up half-way would leave a folder behind.

    Python runs its handlers in the main thread whichever thread the system gave a signal to, so blocking signals in
    this thread would not do: the handlers are replaced.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, payload: bytes) -> None:
    """Write a small file inside a staging directory, flushed to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as handle:
        handle.write(payload)
        handle.flush()
        os.fsync(handle.fileno())
