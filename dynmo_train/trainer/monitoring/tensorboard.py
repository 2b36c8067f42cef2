"""Writes scalars to TensorBoard event files without the tensorboard package.

A file is a sequence of TFRecord records, little-endian: length as u64, its masked CRC-32C, the payload, its masked
CRC-32C. The payload is an ``Event`` protocol buffer with the fields 1 wall time (double), 2 step (varint), 3 file
version (string), 5 summary and 7 session log, whose field 1 is 1 for a start: readers drop what earlier files have from
its step on. A summary has in field 1 a value with the fields 1 tag (string) and 2 number (float).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ..._common.console import print_message
from ..._common.errors import UsageError
from ...formats.os_errors import reason

# ``kMaskDelta`` of the format: a checksum is stored masked, so that a CRC over data with checksums does not degenerate.
_MASK = 0xA282EAD8


@cache
def _table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli) of single bytes, bit-reversed polynomial 0x82F63B78."""
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


def crc32c(payload: bytes) -> int:
    """CRC-32C of ``payload``; that of ``b"123456789"`` is 0xE3069283."""
    table, value = _table(), 0xFFFFFFFF
    for byte in payload:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(payload: bytes) -> bytes:
    value = crc32c(payload)
    return struct.pack("<I", ((value >> 15 | value << 17) + _MASK) & 0xFFFFFFFF)


def record(payload: bytes) -> bytes:
    """The TFRecord of ``payload``."""
    length = struct.pack("<Q", len(payload))
    return length + _masked(length) + payload + _masked(payload)


def _varint(value: int) -> bytes:
    encoded = b""
    while value >= 0x80:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def _inner(key: int, payload: bytes) -> bytes:
    return bytes([key << 3 | 2]) + _varint(len(payload)) + payload


def event(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """An encoded ``Event``.

    Args:
        wall_time: seconds since the epoch.
        step: number of the step.
        scalars: tag -> value.
    """
    values = b"".join(
        _inner(1, _inner(1, tag.encode()) + b"\x15" + struct.pack("<f", number))  # 0x15: field 2 as float
        for tag, number in scalars.items()
    )
    # A key byte is field number << 3 | wire type: 0x09 is field 1 as double, 0x10 field 2 as varint.
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + _inner(5, values)


def start_event(wall_time: float, step: int) -> bytes:
    """An encoded ``Event`` of a start at ``step``: a resumed run logs it and later ones again.

    Args:
        wall_time: seconds since the epoch.
        step: first step that the file has.
    """
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + _inner(7, b"\x08\x01")


class EventWriter:
    """Appends scalars to a new event file in ``folder``.

    After a kill the files of earlier starts have steps beyond the checkpoint that the run resumes from.

    On a full disk an event is dropped and never truncated, since readers stop at an incomplete record.

    Raises:
        UsageError: the folder or the file cannot be created.

    Args:
        folder: folder of event files; created if it does not exist.
        step: number of steps that the run resumes from; 0 for a run from its first step.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(folder / name, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
            self._end, self._is_full = 0, False
            self._append(record(b"\x09" + struct.pack("<d", now) + _inner(3, b"brain.Event:2")))
            if step:
                self._append(record(start_event(now, step + 1)))
        except OSError as error:
            raise UsageError(f"cannot write to --tensorboard-dir {folder}: {reason(error)}") from error

    def _append(self, payload: bytes) -> None:
        """Write a complete record, or nothing."""
        try:
            rest = memoryview(payload)
            # An unbuffered write may be short, and then only the next one fails.
            while rest:
                rest = rest[self.file.write(rest) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self.file.truncate(self._end)
            raise
        self._end += len(payload)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one event with the scalars of ``step``; on failure, warn once and drop it."""
        try:
            self._append(record(event(time.time(), step, scalars)))
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                print_message(
                    f"warning: {self.file.name}: cannot be written ({reason(error)}); its scalars are dropped"
                )
            self._is_full = True

    def close(self, exit_code: int | None = None) -> None:
        """Close the file; it has no place for the ``exit_code`` of the training."""
        del exit_code
        self.file.close()
