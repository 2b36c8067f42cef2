"""Exact word counts of a corpus in bounded memory.

Words are counted in a table. A full table is written to disk, split into shards by the CRC-32 of each word. The counts
of each shard are then summed independently of the other shards. On disk, a block of words is a header of two numbers,
the word lengths, the counts, and the bytes of the words.
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

from .._common.errors import UsageError

# The table is written when it reaches either limit: many short words, or few very long ones.
MAX_WORDS_IN_MEMORY = 1 << 18
MAX_BYTES_IN_MEMORY = 64 << 20
BLOCK_WORDS = 1 << 14
BLOCK_BYTES = 4 << 20
CRC_BUCKETS = 1 << 16

_HEADER = np.dtype("<i8")
_LENGTH = np.dtype("<u4")
_COUNT = np.dtype("<i8")


@dataclass(frozen=True, kw_only=True)
class WordBlock:
    """Some words and their counts.

    Attributes:
        lengths: bytes per word ``[words]``, uint32.
        counts: occurrences of each word ``[words]``, int64.
        text: concatenated words ``[bytes]``, uint8.
    """

    lengths: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int64]
    text: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, words: Sequence[bytes], counts: Sequence[int]) -> WordBlock:
        """A block of some words."""
        return cls(
            lengths=np.fromiter(map(len, words), dtype=_LENGTH, count=len(words)),
            counts=np.array(counts, dtype=_COUNT),
            text=np.frombuffer(b"".join(words), dtype=np.uint8),
        )

    def words(self) -> list[bytes]:
        """The words as a list."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        text = self.text.tobytes()
        return [text[end - size : end] for end, size in zip(ends.tolist(), self.lengths.tolist(), strict=True)]

    def write(self, target: IO[bytes]) -> int:
        """Append the block to a file; returns the bytes written."""
        header = np.array([len(self.lengths), len(self.text)], dtype=_HEADER)
        return sum(target.write(part.tobytes()) for part in (header, self.lengths, self.counts, self.text))

    def only(self, selected: npt.NDArray[np.bool_]) -> WordBlock:
        """The words with a true value in ``selected [words]``."""
        if selected.all():
            return self
        return WordBlock(
            lengths=self.lengths[selected],
            counts=self.counts[selected],
            text=self.text[np.repeat(selected, self.lengths)],
        )


def read_blocks(path: Path, begin: int = 0, end: int | None = None, *, texts: bool = True) -> Iterator[WordBlock]:
    """The blocks of a file between two offsets.

    Args:
        path: the file.
        begin: byte offset of the first block.
        end: byte offset after the last block; None is the end of the file.
        texts: read the bytes of the words; without them, only lengths and counts are read.

    Raises:
        UsageError: a block exceeds the file.
    """
    with open(path, "rb") as source:
        end = os.fstat(source.fileno()).st_size if end is None else end
        offset = source.seek(begin)
        while offset < end:
            header = source.read(2 * _HEADER.itemsize)
            words, size = (
                np.frombuffer(header, dtype=_HEADER).tolist() if len(header) == 2 * _HEADER.itemsize else (-1, 0)
            )
            offset += len(header) + words * (_LENGTH.itemsize + _COUNT.itemsize) + size
            if words < 0 or size < 0 or offset > end:
                raise UsageError(
                    f"{path}: damaged: a block exceeds the file; remove the work folder and run the step again"
                )
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


class WordCountWriter:
    """Counts the words of pieces of text, and writes them to a file in blocks per shard.

    Args:
        target: the file.
        num_shards: number of shards.
        extract_words: returns the words of a piece; called once for all equal pieces of a table.
        max_words: maximum number of pieces in memory. The table is also written after ``MAX_BYTES_IN_MEMORY`` of text.

    Attributes:
        bounds: for each time the table was written, the offsets of the shards and the end offset.
    """

    def __init__(
        self,
        target: IO[bytes],
        num_shards: int,
        extract_words: Callable[[Any], Iterable[bytes]],
        *,
        max_words: int = MAX_WORDS_IN_MEMORY,
    ) -> None:
        self._target, self._num_shards, self._words_of, self._max_words = target, num_shards, extract_words, max_words
        self._counted: Counter[Hashable] = Counter()
        self._bytes = self._at = 0
        self.bounds: list[list[int]] = []

    def add(self, pieces: Iterable[Hashable], size: int) -> None:
        """Count the pieces of a text of ``size`` bytes."""
        self._counted.update(pieces)
        self._bytes += size
        if len(self._counted) >= self._max_words or self._bytes >= MAX_BYTES_IN_MEMORY:
            self.flush()

    def flush(self) -> None:
        """Write the table."""
        shards: list[dict[bytes, int]] = [{} for _ in range(self._num_shards)]
        while self._counted:
            # popitem frees the entries of the table while the shards grow.
            piece, count = self._counted.popitem()
            for word in self._words_of(piece):
                # CRC-32 is the same in every process; Python's hash of bytes is not.
                shard = shards[zlib.crc32(word) % self._num_shards]
                shard[word] = shard.get(word, 0) + count
        self._bytes = 0
        bounds = [self._at]
        for counted in shards:
            self._at += sum(block.write(self._target) for block in _cut(counted.items()))
            counted.clear()
            bounds.append(self._at)
        self.bounds.append(bounds)


def sum_blocks(
    blocks: Iterable[WordBlock], folder: Path, *, max_words: int = MAX_WORDS_IN_MEMORY
) -> Iterator[WordBlock]:
    """Sum the counts of equal words.

    Args:
        blocks: words; may be repeated.
        folder: folder of temporary files, for sorted words that do not fit into memory.
        max_words: maximum number of words in memory, in addition to one block.
    """
    total: dict[bytes, int] = {}
    with contextlib.ExitStack() as files:
        runs: list[IO[bytes]] = []
        for block in blocks:
            for word, count in zip(block.words(), block.counts.tolist(), strict=True):
                total[word] = total.get(word, 0) + count
            if len(total) >= max_words:
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
class WordSelection:
    """The words above a count, and those of exactly this count whose CRC-32 is in the first buckets.

    Attributes:
        count: words with more occurrences are selected; 0 selects all words.
        buckets: number of the ``CRC_BUCKETS`` whose words of exactly this count are selected.
        words: number of selected words.
        size: their bytes.
        occurrences: occurrences of all words.
        num_excluded_words: number of words that are not selected.
        excluded_occurrences: their occurrences.
    """

    count: int
    buckets: int
    words: int
    size: int
    occurrences: int
    num_excluded_words: int
    excluded_occurrences: int

    def selected(self, block: WordBlock) -> npt.NDArray[np.bool_]:
        """Whether each word of a block is selected ``[words]``, bool."""
        selected = block.counts > self.count
        if self.buckets:
            here, buckets = _buckets(block, self.count)
            selected[here[buckets < self.buckets]] = True
        return selected


def _buckets(block: WordBlock, count: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """The indices of the words with exactly ``count`` occurrences, and their CRC buckets."""
    here = np.flatnonzero(block.counts == count)
    words = block.only(block.counts == count).words() if len(here) else []
    crcs = np.fromiter(map(zlib.crc32, words), dtype=np.int64, count=len(here))
    # The upper 16 bits of the CRC-32; the product fits into int64.
    return here, crcs * CRC_BUCKETS >> 32


def select_words(paths: Sequence[Path], max_bytes: int) -> WordSelection:
    """Select the most frequent words of some files, up to ``max_bytes`` bytes.

    If not all words of one count fit, a pseudo-random part of them is selected. The selection prefers neither the start
    of the corpus nor of the alphabet, and is the same in every run.
    """
    words: Counter[int] = Counter()  # both by count
    sizes: Counter[int] = Counter()
    for path in paths:
        for block in read_blocks(path, texts=False):
            counts, places = np.unique(block.counts, return_inverse=True)
            # By count, not by word: the table has one entry per distinct count, however large the corpus is.
            words.update(dict(zip(counts.tolist(), np.bincount(places).tolist(), strict=True)))
            of_count = np.bincount(places, weights=block.lengths).astype(np.int64)
            sizes.update(dict(zip(counts.tolist(), of_count.tolist(), strict=True)))
    # The first count whose words do not all fit is the one that is divided; rarer words are excluded.
    last, budget = 0, max_bytes
    for count in sorted(sizes, reverse=True):
        if sizes[count] > budget:
            last = count
            break
        budget -= sizes[count]
    buckets, some, size = _buckets_within(paths, last, budget) if last else (0, 0, 0)
    selected = some + sum(number for count, number in words.items() if count > last)
    all_occurrences = sum(count * number for count, number in words.items())
    return WordSelection(
        count=last,
        buckets=buckets,
        words=selected,
        size=max_bytes - budget + size,
        occurrences=all_occurrences,
        num_excluded_words=words.total() - selected,
        excluded_occurrences=sum(count * number for count, number in words.items() if count <= last) - last * some,
    )


def _buckets_within(paths: Sequence[Path], count: int, budget: int) -> tuple[int, int, int]:
    """The number of buckets of the words of one count that fit, and their words and bytes."""
    words, sizes = np.zeros(CRC_BUCKETS, dtype=np.int64), np.zeros(CRC_BUCKETS, dtype=np.int64)
    for path in paths:
        for block in read_blocks(path):
            here, buckets = _buckets(block, count)
            np.add.at(words, buckets, 1)
            np.add.at(sizes, buckets, block.lengths[here])
    fit = int(np.searchsorted(np.cumsum(sizes), budget, side="right"))
    return fit, int(words[:fit].sum()), int(sizes[:fit].sum())
