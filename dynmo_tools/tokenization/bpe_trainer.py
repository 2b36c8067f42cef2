"""Byte-pair encoding (Sennrich, Haddow and Birch 2016) over counted words, in bounded memory.

The merges are those of the trainer of the ``tokenizers`` library. The most frequent pair is merged; of equally frequent
ones, the pair with the smallest ids. The count of a merged pair is not updated. If a token is created a second time by
another pair, its new pairs are merged separately for the words of each creation.

The symbols of all words are concatenated in memory-mapped files. Each token has a list of the positions where it
begins, so a merge scans the shorter of two lists. Memory holds a table of candidate pairs. When it is full, the rarer
half is dropped; when the rest is used up, all pairs are counted again.

    words, counts ─> WordSymbols        symbols of all words, separated by -1, on disk
                       │
                     _count_pairs ─> table and heap of candidates ─> most frequent pair ─> _merge ─┐
                       ^                  ^                                                        │
                       │ table used up    └── changed counts of the pairs around each position ────┘

Tests compare tokens and merges with those of the library, for any size of the table.
"""

from __future__ import annotations

import contextlib
import heapq
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.portable import allocate

Ints = npt.NDArray[Any]

CHUNK = 1 << 18  # positions that are in memory at a time
MAX_PAIRS_IN_MEMORY = 1 << 18
MIN_SORTED = 64  # up to this number, sorting costs more than it saves

# A pair is one integer of both ids. A heap entry is one integer of the inverted count, the pair and the merge that
# created it: integers take a third of the memory of tuples.
_TOP = 1 << 48  # above any count
_ID_BITS, _PAIR_BITS, _TIME_BITS = 32, 64, 32
_ID_MASK, _PAIR_MASK, _TIME_MASK = (1 << _ID_BITS) - 1, (1 << _PAIR_BITS) - 1, (1 << _TIME_BITS) - 1
_NO_LIMIT = _TOP + 1 << _PAIR_BITS


class MappedArray:
    """A growable memory-mapped array of integers in a temporary file.

    Args:
        folder: folder of the file.
        size: number of elements; their disk space is allocated immediately.
        dtype: data type.
    """

    def __init__(self, folder: Path, size: int, dtype: npt.DTypeLike) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()
        self._dtype = np.dtype(dtype)
        self.reserve(size)

    def reserve(self, size: int) -> None:
        """Grow to at least ``size`` elements.

        Raises:
            OSError: the disk is full.
        """
        # Allocated, not only extended: on a full disk, a write through the mapping would end the process with SIGBUS.
        allocate(self._file.fileno(), 0, max(size, 1) * self._dtype.itemsize)
        mapped = np.memmap(self._file, dtype=self._dtype, mode="r+")
        self.data: Ints = mapped.view(np.ndarray)  # operations on np.memmap take twice as long

    def close(self) -> None:
        """Delete the file."""
        del self.data
        self._file.close()


class WordSymbols(contextlib.AbstractContextManager["WordSymbols"]):
    """Symbols of distinct words, and how often each word occurs.

    Attributes:
        size: number of used positions: one per symbol, and one separator before, between and after the words.
        first: token that begins at a position, or -1 ``[size]``, int32.
        last: token that ends at a position; undefined elsewhere ``[size]``, int32.
        merge_index: number of the merge that created the token at a position ``[size]``, int32.
        positions: space for lists of positions, int32.
        starts: first position of each word ``[words]``, int32.
        counts: occurrences of each word ``[words]``, int64.

    Args:
        folder: folder of temporary files, 20 bytes per symbol.
        words: number of words.
        symbols: maximum number of symbols of all words.
    """

    def __init__(self, folder: Path, words: int, symbols: int) -> None:
        # A separator before, between and after the words: neighbors of a position are read without bounds checks.
        room = symbols + words + 1
        self._arrays = [
            MappedArray(folder, size, dtype)
            for size, dtype in (
                (room, np.int32),
                (room, np.int32),
                (room, np.int32),
                (2 * room, np.int32),
                (words, np.int32),
                (words, np.int64),
            )
        ]
        first, last, merge_index, self.positions, starts, counts = self._arrays
        self.first, self.last, self.merge_index = first.data, last.data, merge_index.data
        self.starts, self.counts = starts.data[:words], counts.data[:words]
        self._words, self.size = 0, 1
        self.first[0] = self.last[0] = -1

    def add(self, symbols: Ints, lengths: Ints, counts: Ints) -> None:
        """Append words.

        Args:
            symbols: concatenated symbols of the words ``[symbols]``.
            lengths: symbols per word ``[words]``.
            counts: occurrences of each word ``[words]``.
        """
        num_words = len(lengths)
        if not num_words:
            return
        ends = np.cumsum(lengths, dtype=np.int64) + np.arange(num_words)
        row = np.full(int(ends[-1]) + 1, -1, dtype=np.int32)
        inside = np.ones(len(row), dtype=np.bool_)
        inside[ends] = False
        row[inside] = symbols
        in_words = slice(self.size, self.size + len(row))
        self.first[in_words] = row
        self.last[in_words] = row
        rows = slice(self._words, self._words + num_words)
        self.starts[rows] = self.size + ends - lengths
        self.counts[rows] = counts
        self.size += len(row)
        self._words += num_words

    def word_of(self, positions: Ints) -> Ints:
        """The number of the word at each position."""
        found: Ints = np.searchsorted(self.starts, positions, side="right") - 1
        return found

    def __exit__(self, *_: object) -> None:
        """Delete the temporary files."""
        del self.first, self.last, self.merge_index, self.starts, self.counts
        for array in self._arrays:
            array.close()


class PairMerger:
    """Merges pairs of symbols.

    Args:
        words: all words; their symbols are ids of ``tokens``.
        tokens: initial vocabulary; new tokens are appended.
        prefix: prefix of tokens that continue a word, ``##`` for WordPiece.
        max_pairs: maximum number of candidate pairs in memory, about 250 bytes each.
    """

    def __init__(
        self, words: WordSymbols, tokens: list[str], *, prefix: str = "", max_pairs: int = MAX_PAIRS_IN_MEMORY
    ) -> None:
        self._words, self._tokens, self._prefix, self._max_pairs = words, tokens, prefix, max_pairs
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._spans = [1] * len(tokens)  # initial symbols per token
        self._begins: list[int] = []  # of each token, where its list of places begins
        self._sizes: list[int] = []
        self._num_positions = 0
        self._index_symbols()
        self._counts: dict[int, int] = {}  # of pairs
        self._remade_pairs: set[int] = set()  # pairs that were made by several merges
        self._merged: dict[int, None] = {}  # in order
        self._heap: list[int] = []
        self._limit = _NO_LIMIT  # pairs beyond it, by count and ids, are not in the table
        self._merge_number = 0  # of the last merge; 0 is the initial state

    @property
    def num_candidates(self) -> int:
        """Number of counted pairs in the table that are not merged, at most ``max_pairs`` after each merge."""
        return len(self._counts) - len(self._merged)

    def merges(self, vocab_size: int, min_frequency: int) -> list[tuple[int, int]]:
        """Merge pairs until ``vocab_size`` tokens exist or no pair occurs ``min_frequency`` times.

        Args:
            vocab_size: number of tokens, including the initial ones.
            min_frequency: minimum occurrences of a merged pair; below 1 counts as 1.

        Returns:
            The merged pairs as token ids, in merge order.
        """
        min_frequency = max(min_frequency, 1)
        self._count_pairs(min_frequency)
        while len(self._tokens) < vocab_size:
            if self._heap:
                item = heapq.heappop(self._heap)
                pair, time = item >> _TIME_BITS & _PAIR_MASK, item & _TIME_MASK
                count = self._counts[pair]
                key = _key(count, pair)
                # Counts in the heap are not updated when pairs are merged. An outdated entry returns to the heap with
                # its current count.
                if key != item >> _TIME_BITS:
                    heapq.heappush(self._heap, key << _TIME_BITS | time)
                elif count >= min_frequency and key <= self._limit:
                    self._merge(pair, time, min_frequency)
                    if self.num_candidates > self._max_pairs:
                        self._prune_rare_pairs(min_frequency)
                # Without a limit, the table has all pairs, and none is frequent enough.
                elif self._limit == _NO_LIMIT:
                    break
                # A pair outside the table may be more frequent than this one: count again before it is merged.
                else:
                    heapq.heappush(self._heap, item)
                    self._count_pairs(min_frequency)
            elif self._limit == _NO_LIMIT:
                break
            else:
                self._count_pairs(min_frequency)
        return [(pair >> _ID_BITS, pair & _ID_MASK) for pair in self._merged]

    def _index_symbols(self) -> None:
        """Build the position list of each symbol."""
        words, num_tokens = self._words, len(self._tokens)
        used = words.first[: words.size]
        # Two passes over the symbols, as in a counting sort: sizes first, so that all lists fit into one array.
        sizes = np.zeros(num_tokens + 1, dtype=np.int64)
        for begin in range(0, words.size, CHUNK):
            # Index 0 counts the separators, which are -1.
            sizes += np.bincount(used[begin : begin + CHUNK] + 1, minlength=num_tokens + 1)
        filled = np.cumsum(sizes) - sizes - sizes[0]
        self._begins, self._sizes = filled[1:].tolist(), sizes[1:].tolist()
        self._num_positions = int(sizes[1:].sum())
        for begin in range(0, words.size, CHUNK):
            symbols = used[begin : begin + CHUNK]
            # Stable: each list is ascending, which _every_other and word_of rely on.
            order = np.argsort(symbols, kind="stable")
            order = order[np.count_nonzero(symbols < 0) :]
            found, firsts, many_of = np.unique(symbols[order], return_index=True, return_counts=True)
            at = np.repeat(filled[found + 1] - firsts, many_of) + np.arange(len(order))
            words.positions.data[at] = order + begin
            filled[found + 1] += many_of

    def _positions_of(self, token: int) -> Iterator[Ints]:
        """Positions where a token begins, ascending; outdated positions are removed from its list."""
        words = self._words
        begin, size = self._begins[token], self._sizes[token]
        end = begin
        for at in range(begin, begin + size, CHUNK):
            listed = words.positions.data[at : min(at + CHUNK, begin + size)]
            live = listed[words.first[listed] == token]
            # Compacted in place: ``end`` never exceeds ``at``, so no position is overwritten before it is read.
            words.positions.data[end : end + len(live)] = live
            end += len(live)
            yield live
        self._sizes[token] = end - begin

    def _positions_of_pair(self, left: int, right: int) -> Iterator[Ints]:
        """Positions where a pair begins, ascending; of three equal tokens, the first two positions."""
        words, span = self._words, self._spans[left]
        # The shorter list is scanned: a rare neighbor makes the merge of a frequent token cheap.
        if self._sizes[left] <= self._sizes[right]:
            for positions in self._positions_of(left):
                yield positions[words.first[positions + span] == right]
        else:
            for positions in self._positions_of(right):
                yield positions[words.last[positions - 1] == left] - span

    def _weights(self, positions: Ints) -> Ints:
        """Occurrences of the word at each position."""
        weights: Ints = self._words.counts[self._words.word_of(positions)]
        return weights

    def _times(self, positions: Ints, left: int) -> Ints:
        """The merge that created the pair of ``left`` and its successor at each position; 0 for initial pairs."""
        times: Ints = np.maximum(
            self._words.merge_index[positions], self._words.merge_index[positions + self._spans[left]]
        )
        return times

    def _count_pairs(self, min_frequency: int) -> None:
        """Count the pairs that are not in the table, and add the most frequent ones."""
        words = self._words
        self._limit = _NO_LIMIT
        for left in range(len(self._tokens)):
            counts: dict[int, int] = {}
            times: dict[int, set[int]] = {}
            for positions in self._positions_of(left):
                rights = words.first[positions + self._spans[left]]
                positions, rights = positions[rights >= 0], rights[rights >= 0]
                for right, weight in _sums(rights, self._weights(positions), len(self._tokens)):
                    counts[right] = counts.get(right, 0) + weight
                rows = np.unique(rights.astype(np.int64) << _TIME_BITS | self._times(positions, left))
                for row in rows.tolist():
                    times.setdefault(row >> _TIME_BITS, set()).add(row & _TIME_MASK)
            for right, count in counts.items():
                if (pair := left << _ID_BITS | right) not in self._counts:
                    self._add_pair(pair, count, times[right], min_frequency)
            if self.num_candidates > self._max_pairs:
                self._prune_rare_pairs(min_frequency)

    def _add_pair(self, pair: int, count: int, times: Iterable[int], min_frequency: int) -> None:
        """Add a pair to the table and the heap if it is frequent enough."""
        key = _key(count, pair)
        if count < min_frequency or key > self._limit:
            return
        self._counts[pair] = count
        for number, time in enumerate(times):
            heapq.heappush(self._heap, key << _TIME_BITS | time)
            if number:
                self._remade_pairs.add(pair)

    def _prune_rare_pairs(self, min_frequency: int) -> None:
        """Keep the more frequent half of the pairs, and merged pairs with their counts."""
        keys = sorted(
            _key(count, pair)
            for pair, count in self._counts.items()
            if count >= min_frequency and pair not in self._merged
        )
        if len(keys) > self._max_pairs // 2:
            self._limit = min(self._limit, keys[self._max_pairs // 2])
        del keys
        # The library never resets the count of a merged pair: a new occurrence adds to it.
        self._counts = {
            pair: count
            for pair, count in self._counts.items()
            if pair in self._merged or (count >= min_frequency and _key(count, pair) <= self._limit)
        }
        self._remade_pairs.intersection_update(self._counts)
        self._heap = [item for item in self._heap if item >> _TIME_BITS & _PAIR_MASK in self._counts]
        heapq.heapify(self._heap)

    def _merge(self, pair: int, time: int, min_frequency: int) -> None:
        """Replace a pair by one token; if several merges created the pair, only in the words of this one."""
        words = self._words
        left, right = pair >> _ID_BITS, pair & _ID_MASK
        text = self._tokens[left] + self._tokens[right].removeprefix(self._prefix)
        # Two pairs may spell the same text, such as "ab" "c" and "a" "bc"; they share the token.
        token = self._ids.setdefault(text, len(self._tokens))
        if is_new := token == len(self._tokens):
            self._tokens.append(text)
            self._spans.append(self._spans[left] + self._spans[right])
            self._begins.append(self._num_positions)
            self._sizes.append(0)
        # A repeated merge moves to the end, as in the library.
        self._merged.pop(pair, None)
        self._merged[pair] = None
        self._merge_number += 1
        # Collected before the first replacement, which changes the merge numbers at the positions.
        in_words = self._affected_words(left, right, time) if pair in self._remade_pairs else None
        decreases: dict[int, int] = {}
        increases: dict[int, int] = {}
        found_again: list[Ints] = []
        for positions in self._positions_of_pair(left, right):
            if in_words is not None:
                positions = positions[np.isin(words.word_of(positions), in_words)]
            if left == right:
                positions = _every_other(positions, self._spans[left])
            if not len(positions):
                continue
            self._replace(positions, left, right, token, decreases, increases)
            if is_new:
                words.positions.data[self._num_positions : self._num_positions + len(positions)] = positions
                self._num_positions += len(positions)
                self._sizes[token] += len(positions)
            else:
                found_again.append(positions)
        if found_again:
            self._extend_positions(token, found_again)
        self._apply_changes(decreases, increases, min_frequency, is_new=is_new)

    def _affected_words(self, left: int, right: int, time: int) -> Ints:
        """The words in which a merge created a pair."""
        found = [
            self._words.word_of(positions[self._times(positions, left) == time])
            for positions in self._positions_of_pair(left, right)
        ]
        return np.unique(np.concatenate(found))

    def _replace(
        self,
        positions: Ints,
        left: int,
        right: int,
        token: int,
        decreases: dict[int, int],
        increases: dict[int, int],
    ) -> None:
        """Replace the pairs at some positions by one token, and record the changes of pair counts."""
        words, span = self._words, self._spans[left]
        ends = positions + (span + self._spans[right])
        weights = self._weights(positions)
        before, after = words.last[positions - 1], words.first[ends]
        # The right token no longer begins at its position. The lists still have it and drop it when they are scanned.
        words.first[positions + span] = -1
        words.first[positions] = token
        words.last[ends - 1] = token
        words.merge_index[positions] = self._merge_number
        # A neighbor that became this token as well is counted once, by the token to its left.
        alone = (before >= 0) & (words.last[positions - 1] == before)
        inner = after >= 0
        num_tokens = len(self._tokens)
        for neighbor, weight in _sums(before[alone], weights[alone], num_tokens):
            neighbor <<= _ID_BITS
            decreases[neighbor | left] = decreases.get(neighbor | left, 0) + weight
            increases[neighbor | token] = increases.get(neighbor | token, 0) + weight
        after, new_after, weights = after[inner], words.first[ends[inner]], weights[inner]
        for neighbor, weight in _sums(after, weights, num_tokens):
            pair = right << _ID_BITS | neighbor
            decreases[pair] = decreases.get(pair, 0) + weight
        for neighbor, weight in _sums(new_after, weights, num_tokens):
            pair = token << _ID_BITS | neighbor
            increases[pair] = increases.get(pair, 0) + weight

    def _extend_positions(self, token: int, found: list[Ints]) -> None:
        """Add positions to the list of an existing token; the new list is appended after all others."""
        positions = np.sort(np.concatenate([*self._positions_of(token), *found]))
        end = self._num_positions + len(positions)
        if end > len(self._words.positions.data):
            self._words.positions.reserve(end + end // 4)
        self._words.positions.data[self._num_positions : end] = positions
        self._begins[token], self._sizes[token], self._num_positions = self._num_positions, len(positions), end

    def _apply_changes(
        self, decreases: dict[int, int], increases: dict[int, int], min_frequency: int, *, is_new: bool
    ) -> None:
        """Apply changes of pair counts."""
        for pair, count in decreases.items():
            if pair in self._counts:
                self._counts[pair] -= count
        for pair, count in increases.items():
            known = self._counts.get(pair)
            if known is not None:
                self._counts[pair] = count = known + count
                if count > 0:
                    heapq.heappush(self._heap, _key(count, pair) << _TIME_BITS | self._merge_number)
                    self._remade_pairs.add(pair)
            elif is_new:
                self._add_pair(pair, count - decreases.get(pair, 0), (self._merge_number,), min_frequency)
            else:
                self._add_pair(pair, *self._count_pair(pair >> _ID_BITS, pair & _ID_MASK), min_frequency)

    def _count_pair(self, left: int, right: int) -> tuple[int, list[int]]:
        """Count a pair; returns the count and the merges that created it."""
        count, times = 0, set()
        for positions in self._positions_of_pair(left, right):
            count += int(self._weights(positions).sum())
            times.update(self._times(positions, left).tolist())
        return count, sorted(times)


def _key(count: int, pair: int) -> int:
    """A number that is smaller for pairs that are merged earlier."""
    return _TOP - count << _PAIR_BITS | pair


def _every_other(positions: Ints, span: int) -> Ints:
    """The first, third, ... of positions at a distance of ``span``."""
    if len(positions) < 2:
        return positions
    begins = np.flatnonzero(np.concatenate(([True], positions[1:] - positions[:-1] != span)))
    nth = np.arange(len(positions)) - np.repeat(begins, np.diff(begins, append=len(positions)))
    odd: Ints = positions[nth % 2 == 0]
    return odd


def _sums(ids: Ints, weights: Ints, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Ids below ``num_tokens`` with the sums of their weights; if there are few ids, an id may be repeated."""
    # bincount makes an array of all ids, which is fast for many ids only.
    if len(ids) > num_tokens // 4:
        sums = np.bincount(ids, weights=weights)  # floats are exact below 2 ** 53
        ids = np.flatnonzero(sums)
        weights = sums[ids].astype(np.int64)
    elif len(ids) > MIN_SORTED:
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        begins = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
        ids, weights = ids[begins], np.add.reduceat(weights[order], begins)
    return zip(ids.tolist(), weights.tolist(), strict=True)
