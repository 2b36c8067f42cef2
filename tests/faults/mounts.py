"""File systems of their own for faults of disks: a small tmpfs, and ext4 on a loop device whose power can fail."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2  # nothing more reaches the disk, the journal included


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


@cache
def reason_to_skip() -> str | None:
    """Why there are no mounts here; None if there are."""
    if os.geteuid() or shutil.which("mkfs.ext4") is None or shutil.which("mount") is None:
        return "needs root, mount and mkfs.ext4"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with power_disk(Path(folder)):
                return None
        except OSError as error:
            return str(error)


def unmount(folder: Path) -> None:
    """Unmount at once where it is not busy, else when it is no longer."""
    if _run("umount", str(folder)).returncode:
        _run("umount", "-l", str(folder))


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A tmpfs of ``num_bytes`` at ``folder/disk``."""
    disk = folder / "disk"
    disk.mkdir()
    done = _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "dynmo-test", str(disk))
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield disk
    finally:
        unmount(disk)


def remount(disk: Path, options: str) -> bool:
    """Mount again with other options, such as ``ro`` or ``size=N``; whether that was possible."""
    return not _run("mount", "-o", f"remount,{options}", str(disk)).returncode


class PowerDisk:
    """An ext4 on a loop device, on which only what was synced survives ``fail``."""

    def __init__(self, folder: Path) -> None:
        self.image, self.path = folder / "image", folder / "disk"

    def mount(self) -> None:
        """Mount it; the journal is replayed."""
        # Without auto_da_alloc, ext4 does not flush data for programs that rename without fsync.
        done = _run("mount", "-o", "loop,noauto_da_alloc", str(self.image), str(self.path))
        if done.returncode:
            raise OSError(done.stderr.strip())

    def fail(self) -> None:
        """Cut the power: from now on the file system refuses everything, and unsynced bytes are lost."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """Mount it again after ``fail``."""
        unmount(self.path)
        self.mount()


@contextlib.contextmanager
def power_disk(folder: Path) -> Iterator[PowerDisk]:
    """A ``PowerDisk`` of 64 MB in ``folder``."""
    disk = PowerDisk(folder)
    disk.path.mkdir()
    with open(disk.image, "wb") as image:
        image.truncate(64 << 20)
    done = _run("mkfs.ext4", "-q", str(disk.image))
    if done.returncode:
        raise OSError(done.stderr.strip())
    disk.mount()
    try:
        yield disk
    finally:
        unmount(disk.path)
        disk.image.unlink()


def sync(path: Path) -> None:
    """Write what the file system of ``path`` has in memory to its device."""
    _run("sync", "-f", str(path))
