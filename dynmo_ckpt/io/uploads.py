"""New directories in object stores: multipart uploads in bounded memory, and nothing that looks complete before it is.

An object store has no rename, so the steps differ from those of :mod:`.directory`::

    mark        OUT/.dynmo-upload: readers of this project refuse OUT while it exists
    clear       what a cut upload left
    upload      parts of PART_BYTES; an object appears when its last part is committed
    read back   by ranges, compared with the checksum of what was sent
    markers     config.json, *.index.json, .metadata, manifest.json: other programs find a model by these
    unmark

An error or a signal aborts the open uploads and removes what was written, and the mark last. What a killed process
leaves has the mark, and none of the files by which a model is found. A cut connection leaves the same.

A checkpoint that is replaced stays as it is until the new one is complete::

    upload, read back, markers   to OUT/.dynmo-staging, which readers do not list
    mark                         from here on, OUT is refused
    remove                       the markers of the old checkpoint
    copy                         the new objects, within the store, and the markers after everything else
    remove                       old objects of other names, before the new markers; the staged objects
    unmark

Whatever ends the process before the mark leaves the old checkpoint. Between mark and unmark signals are deferred; a
kill leaves the mark, and no file by which a mixture could be found.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .._common.document import parse_any_json
from .._common.errors import UsageError
from .directory import CheckReplaced, check_target, defer_signals
from .errors import CorruptError, StorageError
from .hub import open_commit
from .remote import HUB, STAGING, UPLOAD_MARK, RemoteFile, RemotePath, remote_errors

PART_BYTES = 8 << 20
# S3 allows 10,000 parts of one object.
MAX_PARTS = 9_000
# While a part is sent, the buffer, its copy and that of the client exist.
COPIES_PER_PART = 3
MARK_TEXT = b"This upload is running or was cut.\n"
MAX_MARK_BYTES = 16 << 20
MARKERS = (".metadata", "LATEST", "config.json", "latest", "latest_checkpointed_iteration.txt", "manifest.json")


def part_bytes(num_bytes: int) -> int:
    """Size of the parts in which an object of ``num_bytes`` is sent: ``PART_BYTES``, or more for a very large one."""
    mebibyte = 1 << 20
    return max(PART_BYTES, math.ceil(num_bytes / MAX_PARTS / mebibyte) * mebibyte)


def _mark_text(target: RemotePath, replaced: Iterable[RemotePath]) -> bytes:
    names = [path.relative_to(target).as_posix() for path in replaced if path != target]
    return MARK_TEXT + json.dumps(names).encode()


def replaced_names(target: RemotePath) -> list[str]:
    """What an upload that was cut replaced, relative to the address: objects that it had checked, and would remove."""
    try:
        names = parse_any_json((target / UPLOAD_MARK).read_bytes().removeprefix(MARK_TEXT), MAX_MARK_BYTES)
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def is_marker(name: str) -> bool:
    """Whether programs find a model by a file of this name; such files are written last."""
    last = name.rpartition("/")[2]
    return last in MARKERS or last.endswith(".index.json")


class Upload:
    """One object in the course of its upload."""

    def __init__(self, path: RemotePath, num_bytes: int) -> None:
        """Begin an upload.

        Raises:
            StorageError: there is no such bucket, or the store denies access.
        """
        self.path, self.part_bytes = path, part_bytes(num_bytes)
        self.filled = 0
        with upload_errors(path):
            # With autocommit, fsspec would complete the object on close, also after an error.
            self.file: Any = path.file_system().open(str(path), "wb", block_size=self.part_bytes, autocommit=False)

    def write(self, payload: bytes | memoryview) -> None:
        """Append bytes; every part but the last has exactly ``part_bytes``, as some stores require."""
        view = memoryview(payload)
        with upload_errors(self.path):
            while view:
                part = view[: self.part_bytes - self.filled]
                self.filled = (self.filled + len(part)) % self.part_bytes
                self.file.write(part)
                view = view[len(part) :]

    def commit(self) -> None:
        """Send the last part; the object appears."""
        with upload_errors(self.path):
            self.file.close()
            self.file.commit()

    def discard(self) -> None:
        """Abort the upload; the store drops the parts that were sent."""
        try:
            with upload_errors(self.path):
                self.file.discard()
        finally:
            self.file.closed = True  # otherwise its destructor would send the rest


@contextmanager
def upload_errors(path: RemotePath) -> Iterator[None]:
    """As ``remote_errors``, for writing: there, a missing bucket is an error of the store.

    Raises:
        StorageError: no such bucket, no credentials, access denied, or no connection.
    """
    try:
        with remote_errors(path):
            yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(f"{path}: cannot be written; there is no bucket {path.parts[1]}") from error


class RemoteDirectory:
    """A new directory in an object store; ``stop`` ends the threads that write to it."""

    def __init__(self, target: RemotePath) -> None:
        self.target, self.stop = target, threading.Event()
        self.written: list[RemotePath] = []

    @contextmanager
    def upload(self, name: str, num_bytes: int) -> Iterator[Upload]:
        """An object of the directory, which appears when the block ends without an error.

        Args:
            name: its path in the directory.
            num_bytes: its size, from which that of the parts follows.
        """
        path = self.target / name
        upload = Upload(path, num_bytes)
        try:
            yield upload
            self.written.append(path)  # before the commit: the answer to it may be lost
            upload.commit()
        except BaseException:
            with suppress(StorageError):
                upload.discard()
            raise

    def write(self, name: str, payload: bytes) -> None:
        """Write a small object."""
        with self.upload(name, len(payload)) as upload:
            upload.write(payload)

    def remove(self, paths: Iterable[RemotePath]) -> None:
        """Remove objects, those that exist."""
        files = self.target.file_system()
        for path in paths:
            with upload_errors(path), suppress(FileNotFoundError):
                files.rm_file(str(path))

    def refresh(self) -> None:
        """Forget cached listings of the directory."""
        self.target.file_system().invalidate_cache()


def check_output(target: Path, inputs: Sequence[Path], *, check: CheckReplaced | None) -> None:
    """As ``check_target`` for a local directory, as ``check_remote_target`` or ``open_commit`` for an address.

    Args:
        target: the new directory.
        inputs: files and directories that are read.
        check: whether an existing ``target`` may be replaced; None: it must not exist.
    """
    if isinstance(target, RemotePath) and target.scheme == HUB:
        open_commit(target, inputs, overwrite=check is not None)
    elif isinstance(target, RemotePath):
        check_remote_target(target, inputs, check=check)
    else:
        check_target(target, inputs, check=check, need_bytes=0)


def check_remote_target(target: RemotePath, inputs: Sequence[Path], *, check: CheckReplaced | None) -> None:
    """Check a new directory in an object store before anything is written.

    Args:
        target: the new directory.
        inputs: files and directories that are read.
        check: whether an existing ``target`` may be replaced; None: it must not exist.

    Raises:
        UsageError: ``target`` is a bucket, must not be replaced, or overlaps an input.
        StorageError: the store cannot be reached or denies access.
    """
    if len(target.parts) < 3:
        raise UsageError(f"{target}: is a bucket; add a path below it")
    for source in inputs:
        if isinstance(source, RemotePath) and (source.is_relative_to(target) or target.is_relative_to(source)):
            raise UsageError(f"{target}: overlaps the input {source}; choose another address")
    mark = target / UPLOAD_MARK
    if check is not None:
        check(target)
        return
    if mark.info(refresh=True) is not None:
        raise UsageError(f"{target}: an upload to this address is running or was cut; replace it with --overwrite")
    if target.exists():
        raise UsageError(f"{target}: exists; choose another address, or replace it with --overwrite")


@contextmanager
def new_remote_directory(target: RemotePath) -> Iterator[RemoteDirectory]:
    """A directory in an object store that becomes ``target`` when the block ends without an error.

    Where ``target`` has objects and no mark, they stay until then, and the new ones are staged below it. After an error
    or a signal in the block, nothing of the new directory stays.

    Raises:
        StorageError: the store cannot be reached, denies access, or has no such bucket.
    """
    mark = target / UPLOAD_MARK
    is_cut = mark.info(refresh=True) is not None
    # A cut upload has no markers, so there is nothing in it to preserve.
    previous = [] if is_cut else objects_of(target)
    directory = RemoteDirectory(target / STAGING if previous else target)
    try:
        if not previous:
            remains = objects_of(target)
            directory.write(UPLOAD_MARK, _mark_text(target, remains))
            directory.refresh()
            # Markers first: from then on no other program takes what remains for a model.
            directory.remove(sorted(remains, key=lambda path: not is_marker(path.name)))
        directory.remove(objects_of(target / STAGING))
        directory.refresh()
        yield directory
        if not previous:
            directory.remove([mark])
    except BaseException:
        directory.stop.set()
        with suppress(StorageError, CorruptError):
            others = [path for path in directory.written if path != mark]
            directory.remove(sorted(others, key=lambda path: not is_marker(path.name)))
            directory.remove([mark])
        directory.refresh()
        raise
    if previous:
        with defer_signals():
            _replace(target, directory, previous)
    directory.refresh()


def objects_of(directory: RemotePath) -> list[RemotePath]:
    """The objects below a prefix, and the one that has its name; those of a replacement are left out."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    if (whole := directory.info()) is not None and whole["type"] == "file":
        found.append(directory)
    return found


def _replace(target: RemotePath, staged: RemoteDirectory, previous: Iterable[RemotePath]) -> None:
    """Copy the staged objects over those of ``target``; see the head of this module for the order.

    Raises:
        StorageError: the store refused. The mark stays, and the staged objects, which are complete.
    """
    files, directory, mark = target.file_system(), RemoteDirectory(target), target / UPLOAD_MARK
    # As they were written: the manifest is the last marker.
    names = [path.relative_to(staged.target).as_posix() for path in staged.written]
    stale = [path for path in previous if path == target or path.relative_to(target).as_posix() not in names]
    try:
        sizes = {name: (staged.target / name).stat().st_size for name in names}
        directory.write(UPLOAD_MARK, _mark_text(target, previous))
        directory.remove(path for path in previous if is_marker(path.name))
        for name in sorted(names, key=is_marker):
            if is_marker(name) and stale:
                directory.remove(stale)
                stale = []
            with upload_errors(target / name):
                files.cp_file(str(staged.target / name), str(target / name))
        directory.remove(stale)
        directory.refresh()
        unlike = [name for name, size in sizes.items() if (target / name).stat().st_size != size]
        if unlike:
            raise StorageError(f"{target / unlike[0]}: has another size than its source within the store")
    except (StorageError, OSError) as error:
        raise StorageError(
            f"{error}; the new checkpoint is complete in {staged.target} and did not replace the old one; "
            "write it again with --overwrite"
        ) from error
    directory.remove(staged.written)
    directory.remove([mark])


def stored_crc32(path: RemotePath, step_bytes: int = PART_BYTES) -> tuple[int, int]:
    """Number of bytes of an object, and their CRC-32, read by ranges of ``step_bytes``."""
    file = RemoteFile(path, threading.local())
    checksum = 0
    for begin in range(0, file.num_bytes, step_bytes):
        checksum = zlib.crc32(file.fetch(begin, begin + step_bytes), checksum)
    return file.num_bytes, checksum
