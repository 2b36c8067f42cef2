"""Fast concatenation of files.

A copy through the page cache allocates twice its size in memory. Where pages are expensive (a virtual machine whose
host reclaimed them), that costs more than the disk. Large copies therefore bypass the cache (``O_DIRECT``) with a few
threads and buffers, and leave nothing to flush. If the file system does not support this, the kernel copies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from .._common.errors import DynmoError
from .._common.portable import allocate, read_into

# Smaller copies are short in either way.
DIRECT_FROM_BYTES = 64 << 20
# Measured on 1.07 GB: 0.41 to 0.50 s past the cache in blocks of 1 MiB, 0.67 to 2.95 s by copy_file_range
# (tests/benchmarks/prep_results.md).
CHUNK_BYTES = 1 << 20
THREADS = 4
# Of memory, offsets and sizes: a page, which is a multiple of the blocks of disks.
ALIGNMENT = 4096
COPY_BYTES = 1 << 25
BUFFER_BYTES = 1 << 20


def append_files(target: IO[bytes], parts: Sequence[Path]) -> None:
    """Append the bytes of ``parts`` to ``target``, which is open for writing at its end.

    Raises:
        DynmoError: a part changed while it was copied.
    """
    target.flush()
    begin = target.seek(0, os.SEEK_CUR)
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(open(part, "rb", buffering=0)) for part in parts]
        ends = list(itertools.accumulate((os.fstat(source.fileno()).st_size for source in sources), initial=begin))
        # What was written before must end at a block; otherwise the first chunk would begin within one.
        if ends[-1] - begin < DIRECT_FROM_BYTES or begin % ALIGNMENT or not _copy_direct(target, sources, ends):
            _copy_by_kernel(target, sources)
    target.seek(0, os.SEEK_END)
    if target.seek(0, os.SEEK_CUR) != ends[-1]:
        raise DynmoError(f"{target.name}: a part changed while it was copied; run the same command again")


def _copy_by_kernel(target: IO[bytes], sources: Sequence[IO[bytes]]) -> None:
    for source in sources:
        try:
            while os.copy_file_range(source.fileno(), target.fileno(), COPY_BYTES):
                pass
        except (OSError, AttributeError):  # not on this system, or not between these file systems
            # The kernel has moved both file positions, so this continues where it stopped.
            shutil.copyfileobj(source, target, BUFFER_BYTES)
            target.flush()


def _copy_direct(target: IO[bytes], sources: Sequence[IO[bytes]], ends: Sequence[int]) -> bool:
    """Copy past the page cache; False, with ``target`` unchanged, if its file system does not support it."""
    direct: int = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    descriptor, begin, end = target.fileno(), ends[0], ends[-1]
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
        _reserve(descriptor, begin, end - begin)
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(_copy_chunks, descriptor, sources, ends, first) for first in range(THREADS)]:
                done.result()
    # A file system without O_DIRECT refuses it with one of these two errors.
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(descriptor, begin)
        return False
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    os.ftruncate(descriptor, end)  # the last block was padded
    return True


def _reserve(descriptor: int, begin: int, size: int) -> None:
    """Allocate the space before the copy: a full disk is reported early, and the file has few extents."""
    try:
        allocate(descriptor, begin, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def _copy_chunks(descriptor: int, sources: Sequence[IO[bytes]], ends: Sequence[int], first: int) -> None:
    """Copy every ``THREADS``-th chunk of the output, starting with chunk ``first``."""
    # O_DIRECT requires aligned memory, offsets and sizes; an anonymous mapping begins at a page.
    with mmap.mmap(-1, CHUNK_BYTES) as memory, memoryview(memory) as view:
        for begin in range(ends[0] + first * CHUNK_BYTES, ends[-1], THREADS * CHUNK_BYTES):
            size = min(CHUNK_BYTES, ends[-1] - begin)
            filled = 0
            for source, offset, count in _pieces(ends, begin, size):
                filled += read_into(sources[source].fileno(), view[filled : filled + count], offset)
            if filled < size:
                raise DynmoError(f"{sources[0].name}: was truncated while it was copied; run the same command again")
            write_aligned(descriptor, view, begin, -(-size // ALIGNMENT) * ALIGNMENT)


def _pieces(ends: Sequence[int], begin: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The sources of the ``size`` bytes at ``begin``: (source, offset in it, bytes) in order."""
    for source, (low, high) in enumerate(itertools.pairwise(ends)):
        at = max(begin, low)
        count = min(begin + size, high) - at
        if count > 0:
            yield source, at - low, count


def write_aligned(descriptor: int, view: memoryview, offset: int, size: int) -> None:
    """Write ``view[:size]`` to ``descriptor`` at ``offset``; size and offset are multiples of ``ALIGNMENT`` bytes."""
    written = 0
    while written < size:
        written += os.pwrite(descriptor, view[written:size], offset + written)
