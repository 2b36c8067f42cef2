"""Local copies of files under an address, for libraries that read directories of the disk only."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .._common.console import human_bytes
from ..io.errors import StorageError
from ..io.remote import WINDOW_BYTES, RemotePath


@contextmanager
def local_copy(directory: Path, files: Iterable[Path]) -> Iterator[Path]:
    """A temporary directory with ``files``, or ``directory`` itself where it is local.

    Args:
        directory: a local directory, or an address.
        files: the files below it that are needed; prefixes among them are skipped.

    Raises:
        StorageError: the disk has no space for them, or the store cannot be reached.
    """
    if not isinstance(directory, RemotePath):
        yield directory
        return
    found = [path for path in files if path.is_file()]
    with scratch_directory(sum(path.stat().st_size for path in found)) as scratch:
        for path in found:
            place = scratch / path.relative_to(directory).as_posix()
            place.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, open(place, "wb") as copy:
                shutil.copyfileobj(source, copy, WINDOW_BYTES)
        yield scratch


@contextmanager
def scratch_directory(num_bytes: int) -> Iterator[Path]:
    """A temporary directory, which is removed at the end of the block.

    Args:
        num_bytes: number of bytes that it will have.

    Raises:
        StorageError: the disk has no space for them, or the system refuses to write.
    """
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StorageError(
            f"{folder}: has {human_bytes(free)} free; {human_bytes(num_bytes)} are needed for a temporary copy; set "
            "TMPDIR to a folder of a larger disk"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="dynmo-ckpt-") as scratch:
            yield Path(scratch)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror or error}") from error
