"""Reads messages of protobuf without its library, such as the files of SentencePiece models."""

from __future__ import annotations

from collections.abc import Iterator

MAX_VARINT_SHIFT = 63


def protobuf_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: number, and integer or bytes.

    Raises:
        ValueError: the bytes are not such a message.
    """

    def varint(at: int) -> tuple[int, int]:
        """The integer at byte ``at``, 7 bits per byte and the lowest first, and the offset after it."""
        value = shift = 0
        while True:
            if shift > MAX_VARINT_SHIFT or at >= len(message):
                raise ValueError(f"a number does not end before byte {at:,}")
            value |= (message[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 0x80:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        # The lower three bits are the wire type: 0 integer, 1 and 5 fixed 8 and 4 bytes, 2 length and bytes.
        if key & 7 == 0:
            value, at = varint(at)
            yield key >> 3, value
            continue
        if key & 7 not in (1, 2, 5):
            raise ValueError(f"unexpected wire type {key & 7} before byte {at:,}")
        size, begin = varint(at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
        if begin + size > len(message):
            raise ValueError(f"the field at byte {begin:,} has more bytes than the message")
        at = begin + size
        yield key >> 3, message[begin:at]
