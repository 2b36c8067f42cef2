"""Byte streams, compressed by file extension: plain, .gz, .xz, .bz2 and .zst.

The written bytes are the same on every machine and at any time: headers have no names or dates. Concatenated
compressed streams are a valid stream, so parts are concatenated without recompression.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from pathlib import Path
from typing import IO, Any, cast

from .._common.document import check_regular
from .._common.errors import DynmoError, MissingExtraError, UsageError

ENDINGS = (".gz", ".xz", ".bz2", ".zst")
PARQUET = ".parquet"
_FOREIGN = (
    ".7z .arrow .avro .br .bz .bzip2 .db .docx .epub .feather .gzip .h5 .hdf5 .ipc .lance .lz4 .lzma .lzo .mds "
    ".msgpack .npy .npz .orc .pdf .pickle .pkl .pt .rar .safetensors .snappy .sqlite .sz .tar .tbz2 .tfrecord .tgz "
    ".txz .tzst .warc .xlsx .z .zip .zstd"
)
FOREIGN_ENDINGS = frozenset(_FOREIGN.split())
"""Extensions of formats that no step reads or writes."""
_REMEDIES = {
    ".warc": "extract its pages to JSON lines first, for example with datatrove's WarcReader and Trafilatura",
    **dict.fromkeys((".tar", ".tgz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar"), "unpack it"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "save it as .parquet"),
}
TSV = ".tsv"
FOREIGN_OUTPUT_ENDINGS = FOREIGN_ENDINGS | {PARQUET, ".csv", TSV, ".xml", ".html"}
PIECE_BYTES = 1 << 20
# Default levels of both tools. Recipes use zstd between steps: it reads and writes several times as fast as gzip.
ZSTD_LEVEL = 3
GZIP_LEVEL = 6
FRAME_BYTES = 16 << 20  # text of a zstandard frame: a task of the next step is several of them


class TruncatedError(DynmoError):
    """A compressed input ends within its stream."""


def is_compressed(path: Path) -> bool:
    """Whether the extension is that of a compression."""
    return path.suffix in ENDINGS


def check_ending(path: Path, *, is_output: bool, is_table: bool = False) -> None:
    """Refuse a file whose extension is that of an unsupported format.

    Args:
        path: the file.
        is_output: the file is written.
        is_table: the file has tab-separated columns and may be ``.tsv``.

    Raises:
        UsageError: the extension is that of another format, with or without a compression, or is not lower-case.
    """
    ending = path.suffix
    inner = path.with_suffix("").suffix if ending.lower() in ENDINGS else ""
    known = (*ENDINGS, PARQUET)
    if ending not in known and ending.lower() in known:
        raise UsageError(f"{path}: unknown extension {ending}; rename it to {ending.lower()}")
    foreign = FOREIGN_OUTPUT_ENDINGS if is_output else FOREIGN_ENDINGS
    for found in (ending, inner):
        if found.lower() not in foreign or (is_table and found.lower() == TSV):
            continue
        if is_output:
            raise UsageError(
                f"{path}: {found} files cannot be written; "
                f"use the extension .jsonl (or .json, .txt), alone or with {', '.join(ENDINGS)}"
            )
        remedy = _REMEDIES.get(found.lower(), f"convert it to plain text or JSON lines, also with {', '.join(ENDINGS)}")
        raise UsageError(f"{path}: {found} files cannot be read; {remedy}")


def zstandard_module() -> Any:
    """The module ``zstandard``.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("zstandard", "prep") from error
    return zstandard


class _ZstdReader(io.RawIOBase):
    """Reads concatenated zstandard frames; an incomplete last frame raises ``EOFError``."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._module = zstandard_module()
        self._decoder: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._advance():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _advance(self) -> bool:
        pending = self._decoder.unused_data if self._decoder is not None and self._decoder.eof else b""
        if self._decoder is None or self._decoder.eof:
            pending = pending or self._handle.read(PIECE_BYTES)
            if not pending:
                return False
            # The default limit refuses frames of ``zstd --long=31``, which need a window of 2 GiB.
            self._decoder = self._module.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        else:
            pending = self._handle.read(PIECE_BYTES)
            if not pending:
                raise EOFError("the last zstandard frame is incomplete")
        self._ready = self._decoder.decompress(pending)
        return True

    def close(self) -> None:
        self._handle.close()
        super().close()


class _LineFrameWriter:
    """Writes zstandard frames that begin with a line, so that a later step divides the file into tasks."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._module = zstandard_module()
        self._writer = self._module.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(handle, closefd=False)
        self._size = 0

    def write(self, data: bytes) -> int:
        self._writer.write(data)
        self._size += len(data)
        if self._size >= FRAME_BYTES and data[-1:] == b"\n":
            self._writer.flush(self._module.FLUSH_FRAME)
            self._size = 0
        return len(data)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _open_gzip(path: Path) -> IO[bytes]:
    # Optional: reads gzip faster than the standard library.
    try:
        from isal import igzip
    except ImportError:
        return cast("IO[bytes]", gzip.open(path, "rb"))
    opened: IO[bytes] = igzip.open(path, "rb")  # type: ignore[no-untyped-call,unused-ignore]
    return opened


def open_read(path: Path, frame: int = 0) -> IO[bytes]:
    """Open ``path`` for reading its decompressed bytes.

    Args:
        path: the file.
        frame: offset of the first frame of a zstandard file to read.

    Raises:
        UnreadableError: it is not a regular file.
    """
    check_regular(path)
    if path.suffix == ".gz":
        return _open_gzip(path)
    if path.suffix == ".xz":
        return cast("IO[bytes]", lzma.open(path, "rb"))
    if path.suffix == ".bz2":
        return cast("IO[bytes]", bz2.open(path, "rb"))
    if path.suffix == ".zst":
        handle = open(path, "rb")  # noqa: SIM115 - closed by the reader
        handle.seek(frame)
        return io.BufferedReader(_ZstdReader(handle), PIECE_BYTES)
    return open(path, "rb")


def trailing_bytes(path: Path) -> tuple[int, int] | None:
    """The offset and number of bytes after the last gzip member of a file that do not begin one; None without any.

    The whole file is decompressed once more: this is for the message of a file that could not be read.
    """
    size = os.path.getsize(path)
    begin, is_complete = 0, False
    decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
    with open(path, "rb") as handle:
        pending = handle.read(PIECE_BYTES)
        offset = len(pending)
        while pending:
            try:
                decoder.decompress(pending)
            except zlib.error:
                # Damage within a member is another fault.
                pending = b""
                starts = _begins_member(path, begin)
                return (begin, size - begin) if is_complete and not starts else None
            if decoder.eof:
                is_complete, pending = True, decoder.unused_data
                begin = offset - len(pending)
                decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
            else:
                pending = b""
            if not pending:
                pending = handle.read(PIECE_BYTES)
                offset += len(pending)
    # Fewer bytes than the header of a member.
    return (begin, size - begin) if is_complete and begin < size and not _begins_member(path, begin) else None


def _begins_member(path: Path, offset: int) -> bool:
    with open(path, "rb") as handle:
        handle.seek(offset)
        return handle.read(2) == b"\x1f\x8b"


def wrap_write(handle: IO[bytes], ending: str) -> IO[bytes]:
    """A writer that compresses to ``handle``; closing it ends the stream and leaves ``handle`` open."""
    # Without name and time in the header: equal documents have equal bytes, on every day.
    if ending == ".gz":
        return cast("IO[bytes]", gzip.GzipFile("", "wb", GZIP_LEVEL, handle, mtime=0))
    if ending == ".xz":
        return cast("IO[bytes]", lzma.LZMAFile(handle, "wb", preset=1))
    if ending == ".bz2":
        return cast("IO[bytes]", bz2.BZ2File(handle, "wb"))
    if ending == ".zst":
        return cast("IO[bytes]", _LineFrameWriter(handle))
    return handle
