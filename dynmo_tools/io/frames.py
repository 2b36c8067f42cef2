"""Frames of a zstandard file, at which it is divided into tasks: each is decompressed without those before it.

The headers of the blocks give the bytes of each frame without decompression. Where the text of a frame begins, and
whether a line begins there, needs the text of the frames before it: files of several frames are decompressed once, at a
small part of the time of any step. Files of one frame, as the program ``zstd`` writes them, are not divided.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .codecs import PIECE_BYTES, zstandard_module

MAGIC, SKIPPABLE, SKIPPABLE_MASK = 0xFD2FB528, 0x184D2A50, 0xFFFFFFF0
HEADER_BYTES = 18
RLE_BLOCK = 1
NEWLINE = b"\n"


class LineFrame(NamedTuple):
    """A frame that begins with a line.

    Attributes:
        stored: its offset in the file.
        text: the offset of its text in the decompressed file.
    """

    stored: int
    text: int


def line_frames(path: Path) -> tuple[list[LineFrame], int]:
    """The frames of a file that begin with a line, and the bytes of its text.

    Returns:
        No frames for a file of one frame, or one that is damaged: its reader reports the error.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as handle:
        try:
            bounds = list(_frame_bounds(handle.fileno(), size))
        except (struct.error, ValueError):
            return [], 0
        if len(bounds) < 2:
            return [], 0
        zstandard = zstandard_module()
        frames: list[LineFrame] = []
        text, last = 0, NEWLINE
        try:
            for begin, end in bounds:
                if last == NEWLINE:
                    frames.append(LineFrame(begin, text))
                decoder = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                for at in range(begin, end, PIECE_BYTES):
                    made = decoder.decompress(os.pread(handle.fileno(), min(PIECE_BYTES, end - at), at))
                    text += len(made)
                    last = made[-1:] or last
        except zstandard.ZstdError:
            return [], 0
    return frames, text


def bytes_after_frames(path: Path) -> tuple[int, int] | None:
    """The offset and number of bytes after complete frames that do not begin another one; None without any."""
    size = os.path.getsize(path)
    end = 0
    with open(path, "rb") as handle:
        try:
            for bounds in _frame_bounds(handle.fileno(), size):
                end = bounds[1]
        except (struct.error, ValueError):
            magic = int.from_bytes(os.pread(handle.fileno(), 4, end), "little")
            if end and magic != MAGIC and magic & SKIPPABLE_MASK != SKIPPABLE:
                return end, size - end
    return None


def _frame_bounds(file: int, size: int) -> Iterator[tuple[int, int]]:
    """The begin and end of each frame with data.

    Raises:
        ValueError: the file is not of frames.
        struct.error: it is truncated.
    """
    at = 0
    while at < size:
        begin = at
        header = os.pread(file, HEADER_BYTES, at)
        (magic,) = struct.unpack_from("<I", header)
        if magic & SKIPPABLE_MASK == SKIPPABLE:
            at += 8 + int(struct.unpack_from("<I", header, 4)[0])
            continue
        if magic != MAGIC:
            raise ValueError("not a zstandard frame")
        # RFC 8878, 3.1.1.1: fields whose sizes the descriptor states.
        (descriptor,) = struct.unpack_from("<B", header, 4)
        is_single = descriptor >> 5 & 1
        content_bytes = (is_single, 2, 4, 8)[descriptor >> 6]
        at += 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3] + content_bytes
        is_last = False
        while not is_last:
            block = int.from_bytes(os.pread(file, 3, at), "little")
            is_last = bool(block & 1)
            at += 3 + (1 if block >> 1 & 3 == RLE_BLOCK else block >> 3)
            # Also where the header of a block is beyond the end: it is read as 0.
            if at > size:
                raise ValueError("truncated frame")
        at += 4 * (descriptor >> 2 & 1)
        yield begin, min(at, size)
