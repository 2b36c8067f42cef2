"""How often every word of a corpus occurs, counted exactly and in bounded memory.

Words are counted in a table that is written out whenever it is full, in shares by their CRC-32. Then each share is
summed for itself. A block of words on disk is a header of two numbers, the lengths, the counts, and the words' bytes.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

HELD_WORDS = 1 << 18
HELD_BYTES = 64 << 20
BLOCK_WORDS = 1 << 14
BLOCK_BYTES = 4 << 20
CRC_BUCKETS = 1 << 16

_HEADER = np.dtype("<i8")
_LENGTH = np.dtype("<u4")
_COUNT = np.dtype("<i8")


@dataclass(frozen=True, kw_only=True)
class WordBlock:
    """Some words and how often they occur: ``lengths`` and ``counts`` are ``[words]``, ``text`` is ``[bytes]``."""

    lengths: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int64]
    text: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, words: Sequence[bytes], counts: Sequence[int]) -> WordBlock:
        """A block of these words."""
        return cls(
            lengths=np.fromiter(map(len, words), dtype=_LENGTH, count=len(words)),
            counts=np.array(counts, dtype=_COUNT),
            text=np.frombuffer(b"".join(words), dtype=np.uint8),
        )

    def words(self) -> list[bytes]:
        """The words one by one."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        text = self.text.tobytes()
        return [text[end - size : end] for end, size in zip(ends.tolist(), self.lengths.tolist(), strict=True)]

    def write(self, target: IO[bytes]) -> int:
        """Append it to a file; the bytes written."""
        header = np.array([len(self.lengths), len(self.text)], dtype=_HEADER)
        return sum(target.write(part.tobytes()) for part in (header, self.lengths, self.counts, self.text))

    def only(self, kept: npt.NDArray[np.bool_]) -> WordBlock:
        """The words of which ``kept [words]`` says so."""
        if kept.all():
            return self
        return WordBlock(
            lengths=self.lengths[kept], counts=self.counts[kept], text=self.text[np.repeat(kept, self.lengths)]
        )


def read_blocks(path: Path, begin: int = 0, end: int | None = None, *, texts: bool = True) -> Iterator[WordBlock]:
    """The blocks of a file from one offset to another; without ``texts``, the bytes of the words are skipped."""
    with open(path, "rb") as source:
        end = os.fstat(source.fileno()).st_size if end is None else end
        source.seek(begin)
        while source.tell() < end:
            words, size = np.frombuffer(source.read(2 * _HEADER.itemsize), dtype=_HEADER).tolist()
            lengths = np.frombuffer(source.read(words * _LENGTH.itemsize), dtype=_LENGTH)
            counts = np.frombuffer(source.read(words * _COUNT.itemsize), dtype=_COUNT)
            text = source.read(size) if texts else b""
            if not texts:
                source.seek(size, os.SEEK_CUR)
            yield WordBlock(lengths=lengths, counts=counts, text=np.frombuffer(text, dtype=np.uint8))


def _cut(counted: Iterable[tuple[bytes, int]]) -> Iterator[WordBlock]:
    words: list[bytes] = []
    counts: list[int] = []
    size = 0
    for word, count in counted:
        words.append(word)
        counts.append(count)
        size += len(word)
        if len(words) == BLOCK_WORDS or size >= BLOCK_BYTES:
            yield WordBlock.of(words, counts)
            words.clear()
            counts.clear()
            size = 0
    if words:
        yield WordBlock.of(words, counts)


class ShareWriter:
    """Counts the words of pieces of text into a file, in blocks by share.

    Args:
        target: the file.
        shares: how many there are.
        words_of: the words of a piece; it is asked once for all equal pieces of a table.
        held: pieces in memory at most; the table is written out when it is full, or has seen ``HELD_BYTES`` of text.

    Attributes:
        bounds: of each time that the table was written out, the offsets at which its shares begin, and its end.
    """

    def __init__(
        self, target: IO[bytes], shares: int, words_of: Callable[[Any], Iterable[bytes]], *, held: int = HELD_WORDS
    ) -> None:
        self._target, self._shares, self._words_of, self._held = target, shares, words_of, held
        self._counted: Counter[Hashable] = Counter()
        self._bytes = self._at = 0
        self.bounds: list[list[int]] = []

    def add(self, pieces: Iterable[Hashable], size: int) -> None:
        """Count the pieces of a text of ``size`` bytes."""
        self._counted.update(pieces)
        self._bytes += size
        if len(self._counted) >= self._held or self._bytes >= HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write out what is counted."""
        shares: list[dict[bytes, int]] = [{} for _ in range(self._shares)]
        while self._counted:
            piece, count = self._counted.popitem()
            for word in self._words_of(piece):
                share = shares[zlib.crc32(word) % self._shares]
                share[word] = share.get(word, 0) + count
        self._bytes = 0
        bounds = [self._at]
        for counted in shares:
            self._at += sum(block.write(self._target) for block in _cut(counted.items()))
            counted.clear()
            bounds.append(self._at)
        self.bounds.append(bounds)


def sum_blocks(blocks: Iterable[WordBlock], folder: Path, *, held: int = HELD_WORDS) -> Iterator[WordBlock]:
    """Every word of the blocks once, with the sum of its counts.

    Args:
        blocks: words that may repeat.
        folder: where sorted words lie, in temporary files, when they do not fit.
        held: words in memory at most, beside those of a block.
    """
    total: dict[bytes, int] = {}
    with contextlib.ExitStack() as files:
        runs: list[IO[bytes]] = []
        for block in blocks:
            for word, count in zip(block.words(), block.counts.tolist(), strict=True):
                total[word] = total.get(word, 0) + count
            if len(total) >= held:
                run = files.enter_context(tempfile.NamedTemporaryFile(dir=folder))
                for part in _cut(sorted(total.items())):
                    part.write(run)
                run.flush()
                runs.append(run)
                total.clear()
        if not runs:
            yield from _cut(total.items())
            return
        sources = [_pairs(Path(run.name)) for run in runs]
        yield from _cut(_summed(heapq.merge(*sources, sorted(total.items()))))


def _pairs(path: Path) -> Iterator[tuple[bytes, int]]:
    for block in read_blocks(path):
        yield from zip(block.words(), block.counts.tolist(), strict=True)


def _summed(ordered: Iterable[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    before: bytes | None = None
    total = 0
    for word, count in ordered:
        if word != before:
            if before is not None:
                yield before, total
            before, total = word, 0
        total += count
    if before is not None:
        yield before, total


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which words stay: those above a count, and of that count those whose CRC-32 is in the first buckets.

    Attributes:
        count: words that occur more often stay; 0 keeps every word.
        buckets: of ``CRC_BUCKETS``, how many keep their words of just that count.
        words: how many words stay.
        size: their bytes.
        occurrences: how often all words occur, chosen or not.
        words_left_out: how many words do not stay.
        occurrences_left_out: how often those occur.
    """

    count: int
    buckets: int
    words: int
    size: int
    occurrences: int
    words_left_out: int
    occurrences_left_out: int

    def kept(self, block: WordBlock) -> npt.NDArray[np.bool_]:
        """Of each word of a block, whether it stays ``[words]``."""
        kept = block.counts > self.count
        if self.buckets:
            here, buckets = _buckets(block, self.count)
            kept[here[buckets < self.buckets]] = True
        return kept


def _buckets(block: WordBlock, count: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """The places of the words that occur just so often, and their CRC buckets."""
    here = np.flatnonzero(block.counts == count)
    words = block.only(block.counts == count).words() if len(here) else []
    crcs = np.fromiter(map(zlib.crc32, words), dtype=np.int64, count=len(here))
    return here, crcs * CRC_BUCKETS >> 32


def choose(paths: Sequence[Path], max_bytes: int) -> Choice:
    """The most frequent of the words that files hold, as many as have ``max_bytes`` bytes together.

    Of the words of the count at which there is no room for all, a pseudo-random part stays: the choice does not favour
    the beginning of a corpus or of the alphabet, and is the same in every run.
    """
    words: Counter[int] = Counter()  # both by count
    sizes: Counter[int] = Counter()
    for path in paths:
        for block in read_blocks(path, texts=False):
            counts, places = np.unique(block.counts, return_inverse=True)
            words.update(dict(zip(counts.tolist(), np.bincount(places).tolist(), strict=True)))
            of_count = np.bincount(places, weights=block.lengths).astype(np.int64)
            sizes.update(dict(zip(counts.tolist(), of_count.tolist(), strict=True)))
    last, room = 0, max_bytes
    for count in sorted(sizes, reverse=True):
        if sizes[count] > room:
            last = count
            break
        room -= sizes[count]
    buckets, some, size = _buckets_within(paths, last, room) if last else (0, 0, 0)
    kept = some + sum(number for count, number in words.items() if count > last)
    all_occurrences = sum(count * number for count, number in words.items())
    return Choice(
        count=last,
        buckets=buckets,
        words=kept,
        size=max_bytes - room + size,
        occurrences=all_occurrences,
        words_left_out=words.total() - kept,
        occurrences_left_out=sum(count * number for count, number in words.items() if count <= last) - last * some,
    )


def _buckets_within(paths: Sequence[Path], count: int, room: int) -> tuple[int, int, int]:
    """How many buckets of the words of a count have room; the words and bytes in them."""
    words, sizes = np.zeros(CRC_BUCKETS, dtype=np.int64), np.zeros(CRC_BUCKETS, dtype=np.int64)
    for path in paths:
        for block in read_blocks(path):
            here, buckets = _buckets(block, count)
            np.add.at(words, buckets, 1)
            np.add.at(sizes, buckets, block.lengths[here])
    fit = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
    return fit, int(words[:fit].sum()), int(sizes[:fit].sum())
