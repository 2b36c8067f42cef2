"""Texts by 128 bits of their digests: which ones came before, found on disk, and sets of them in little memory."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BUCKETS = 256
DIGEST_BYTES = 16
FLAGS_A_TEXT = 8


def digest_of(payload: bytes) -> bytes:
    """128 bits of BLAKE2b: texts are the same where these agree."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


class DigestBuckets(contextlib.AbstractContextManager["DigestBuckets"]):
    """Numbered texts, to find those that came before: 24 bytes of disk a text.

    The digests lie in ``BUCKETS`` files by their first byte, and one of these at a time is sorted.

    Args:
        folder: where files without names hold the digests.
    """

    def __init__(self, folder: Path) -> None:
        self._open = contextlib.ExitStack()
        self._buckets = [
            self._open.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - closed by __exit__
            for _ in range(BUCKETS)
        ]

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        self._open.close()

    def add(self, payload: bytes, number: int) -> None:
        """Note a text under a number."""
        digest = digest_of(payload)
        self._buckets[digest[0] % BUCKETS].write(digest + number.to_bytes(8, "little"))

    def duplicates(self) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
        """Bucket by bucket, the numbers of texts that were there before, and for each the least number of its text."""
        import numpy as np

        layout = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u8")])
        for bucket in self._buckets:
            bucket.seek(0)
            rows = np.frombuffer(bucket.read(), dtype=layout)
            rows = rows[np.lexsort((rows["number"], rows["low"], rows["high"]))]
            again = np.zeros(len(rows), dtype=np.bool_)
            again[1:] = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
            numbers = rows["number"]
            firsts = numbers[~again][np.cumsum(~again) - 1]
            yield numbers[again], firsts[again]


class DigestSet:
    """A set of texts: 16 bytes of memory each, and up to 16 more of flags that answer nearly all that are not in it.

    Args:
        texts: may repeat.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        import numpy as np

        digests, hashes = bytearray(), array("q")
        for text in texts:
            digests += digest_of(_payload(text))
            hashes.append(hash(text))
        halves = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        self._count = len(order) - int((halves[order][1:] == halves[order][:-1]).all(axis=1).sum())
        self._high = halves[order, 0].data
        self._low = halves[order, 1].data
        self._mask = (1 << (len(hashes) * FLAGS_A_TEXT).bit_length()) - 1
        flags = np.zeros(self._mask + 1, dtype=np.uint8)
        flags[np.frombuffer(hashes, dtype=np.int64) & self._mask] = 1
        self._flags = flags.data

    def __len__(self) -> int:
        """The number of texts that differ."""
        return self._count

    def __contains__(self, text: object) -> bool:
        """Whether a text is in the set."""
        return isinstance(text, str) and self.find(text) is not None

    def find(self, text: str) -> int | None:
        """The number of a text of the set, from 0; those of repeated texts are counted too. None where it is not in."""
        if not self._flags[hash(text) & self._mask]:
            return None
        digest = digest_of(_payload(text))
        high, low = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8))
        at = bisect.bisect_left(self._high, high)
        while at < len(self._high) and self._high[at] == high:
            if self._low[at] == low:
                return at
            at += 1
        return None


def _payload(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
