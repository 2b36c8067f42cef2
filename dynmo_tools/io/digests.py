"""Sets of texts by 128-bit digests: duplicates found on disk, and membership in little memory."""

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
# Among 2^32 texts, the probability of any collision is 2^-65.
DIGEST_BYTES = 16
# With 8 to 16 flags per text, one of 8 to 16 absent texts is looked up in vain.
FLAGS_A_TEXT = 8


def digest_of(payload: bytes) -> bytes:
    """The 128-bit BLAKE2b digest of a text; texts with equal digests count as equal."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


class DigestBuckets(contextlib.AbstractContextManager["DigestBuckets"]):
    """Finds duplicates among numbered texts; 24 bytes of disk per text.

    Digests are distributed to ``BUCKETS`` files by their first byte, and one file at a time is sorted.

    Args:
        folder: folder of the temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self._open = contextlib.ExitStack()
        self._buckets = [
            self._open.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - closed by __exit__
            for _ in range(BUCKETS)
        ]

    def __exit__(self, *_: object) -> None:
        """Delete the temporary files."""
        self._open.close()

    def add(self, payload: bytes, number: int) -> None:
        """Add a text with its number."""
        digest = digest_of(payload)
        self._buckets[digest[0] % BUCKETS].write(digest + number.to_bytes(8, "little"))

    def duplicates(self) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
        """The duplicates of each bucket.

        Yields:
            Numbers of texts that occurred before, and the smallest number of each such text; both uint64.
        """
        import numpy as np

        layout = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u8")])
        for bucket in self._buckets:
            bucket.seek(0)
            rows = np.frombuffer(bucket.read(), dtype=layout)
            # By number within equal digests: the first occurrence in input order is the one that stays.
            rows = rows[np.lexsort((rows["number"], rows["low"], rows["high"]))]
            again = np.zeros(len(rows), dtype=np.bool_)
            again[1:] = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
            numbers = rows["number"]
            firsts = numbers[~again][np.cumsum(~again) - 1]
            yield numbers[again], firsts[again]


class DigestSet:
    """A set of texts; 16 bytes of memory per text, and up to 16 more of flags that reject most other texts quickly.

    Args:
        texts: the texts; may be repeated.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        import numpy as np

        digests, hashes = bytearray(), array("q")
        for text in texts:
            digests += digest_of(_payload(text))
            # Python salts hash() per process. The flags are used in this process only.
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
        """The number of distinct texts."""
        return self._count

    def __contains__(self, text: object) -> bool:
        """Whether a text is in the set."""
        return isinstance(text, str) and self.find(text) is not None

    def find(self, text: str) -> int | None:
        """The number of a text of the set, from 0, counting repeated ones; None if it is not in the set."""
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
