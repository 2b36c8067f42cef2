"""Calls that not every system has, each with what stands in for it: Linux has all of them, macOS does not."""

from __future__ import annotations

import os
import resource
import sys

_KIB = 1024


def allocate(descriptor: int, begin: int, num_bytes: int) -> None:
    """Take the space of a part of a file at once, so that a full disk is reported before the work.

    Without ``posix_fallocate`` (macOS) the file is only made that long: a full disk is reported by the write.

    Args:
        descriptor: file that is open for writing.
        begin: first byte of the part.
        num_bytes: its length.

    Raises:
        OSError: the disk has no space for it.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, begin, num_bytes)
    elif os.fstat(descriptor).st_size < begin + num_bytes:
        os.ftruncate(descriptor, begin + num_bytes)


def drop_cached(descriptor: int, begin: int, num_bytes: int) -> None:
    """Start writing a part of a file to disk, and give up its pages; no effect without ``posix_fadvise`` (macOS).

    Args:
        descriptor: open file.
        begin: first byte of the part.
        num_bytes: its length; 0 means up to the end of the file.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, begin, num_bytes, os.POSIX_FADV_DONTNEED)


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Read a part of a file in one call of the system; the position of the file does not matter.

    Args:
        descriptor: file that is open for reading.
        view: where the bytes go; its length is the most that are read.
        offset: first byte to read.

    Returns:
        Number of bytes that were read, which may be fewer than asked for; 0 at the end of the file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    part = os.pread(descriptor, len(view), offset)
    view[: len(part)] = part
    return len(part)


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far; the system counts it in KiB, on macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB
