"""Byte-pair merges over counted words (Sennrich, Haddow and Birch 2016), in bounded memory.

The rules are those of the trainer of the ``tokenizers`` library, so that the same words give the same merges: the pair
that occurs most is merged, of several the one whose ids are least; the count of a merged pair stays as it was; and
where a token is made a second time, in another way, pairs with it are merged by the words that each time gave them.

The symbols of all words lie one behind the other in mapped files. Of every token there is a list of the places where it
begins, so a merge looks through the shorter of two lists. Memory holds a table of the pairs that can be merged next:
when it is full its rarer half is dropped, and when those that are left no longer suffice, all are counted again.
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

CHUNK = 1 << 18
HELD_PAIRS = 1 << 18
FEW = 64  # so many are not worth a sort

# A pair is one number of both ids. On the heap lies one number of its count, the greatest least, the pair and the merge
# that made it: numbers take a third of the memory of tuples.
_TOP = 1 << 48  # above any count
_ID_BITS, _PAIR_BITS, _TIME_BITS = 32, 64, 32
_ID_MASK, _PAIR_MASK, _TIME_MASK = (1 << _ID_BITS) - 1, (1 << _PAIR_BITS) - 1, (1 << _TIME_BITS) - 1
_NO_LIMIT = _TOP + 1 << _PAIR_BITS


class MappedArray:
    """Integers in a file without a name, mapped into memory, that may grow.

    Args:
        folder: where the file lies.
        size: elements, whose space on disk is taken at once.
        dtype: of the elements.
    """

    def __init__(self, folder: Path, size: int, dtype: npt.DTypeLike) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()
        self._dtype = np.dtype(dtype)
        self.reserve(size)

    def reserve(self, size: int) -> None:
        """Make it at least this long; ``OSError`` where the disk is full."""
        allocate(self._file.fileno(), 0, max(size, 1) * self._dtype.itemsize)
        mapped = np.memmap(self._file, dtype=self._dtype, mode="r+")
        self.data: Ints = mapped.view(np.ndarray)  # each operation on the subclass takes twice as long

    def close(self) -> None:
        """Give the disk back."""
        del self.data
        self._file.close()


class Words(contextlib.AbstractContextManager["Words"]):
    """The symbols of distinct words and how often each word occurs.

    Attributes:
        size: places that are in use: one for each symbol, and one without a token before, between and behind the words.
        first: the token that begins at a place, or -1 ``[size]``.
        last: the token that ends at a place; whatever was there before elsewhere ``[size]``.
        made: the number of the merge that made the token that begins at a place ``[size]``.
        places: room for lists of places.
        starts: where each word begins ``[words]``.
        counts: how often each word occurs ``[words]``.

    Args:
        folder: where files without names hold them, 20 bytes a symbol.
        words: how many there will be.
        symbols: of all words together, at most.
    """

    def __init__(self, folder: Path, words: int, symbols: int) -> None:
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
        first, last, made, self.places, starts, counts = self._arrays
        self.first, self.last, self.made = first.data, last.data, made.data
        self.starts, self.counts = starts.data[:words], counts.data[:words]
        self._words, self.size = 0, 1
        self.first[0] = self.last[0] = -1

    def add(self, symbols: Ints, lengths: Ints, counts: Ints) -> None:
        """Append words: their ``symbols [symbols]`` together, ``lengths [words]`` in symbols and ``counts [words]``."""
        many = len(lengths)
        if not many:
            return
        ends = np.cumsum(lengths, dtype=np.int64) + np.arange(many)
        laid = np.full(int(ends[-1]) + 1, -1, dtype=np.int32)
        inside = np.ones(len(laid), dtype=np.bool_)
        inside[ends] = False
        laid[inside] = symbols
        here = slice(self.size, self.size + len(laid))
        self.first[here] = laid
        self.last[here] = laid
        rows = slice(self._words, self._words + many)
        self.starts[rows] = self.size + ends - lengths
        self.counts[rows] = counts
        self.size += len(laid)
        self._words += many

    def word_of(self, places: Ints) -> Ints:
        """The number of the word at each place."""
        found: Ints = np.searchsorted(self.starts, places, side="right") - 1
        return found

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        del self.first, self.last, self.made, self.starts, self.counts
        for array in self._arrays:
            array.close()


class PairMerger:
    """Merges the symbols of words, pair by pair.

    Args:
        words: all of them; their symbols are ids of ``tokens``.
        tokens: the vocabulary so far, which grows.
        prefix: what stands before a token that continues a word, as WordPiece's ``##``.
        held: pairs in memory at most, beside those that were merged; about 250 bytes each.
    """

    def __init__(self, words: Words, tokens: list[str], *, prefix: str = "", held: int = HELD_PAIRS) -> None:
        self._words, self._tokens, self._prefix, self._held = words, tokens, prefix, held
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._spans = [1] * len(tokens)  # how many symbols of the beginning each token stands for
        self._begins: list[int] = []  # of each token, where its list of places begins
        self._sizes: list[int] = []
        self._placed = 0
        self._place_symbols()
        self._counts: dict[int, int] = {}  # of pairs
        self._several: set[int] = set()  # pairs that were made by several merges
        self._merged: dict[int, None] = {}  # in order
        self._heap: list[int] = []
        self._limit = _NO_LIMIT  # pairs beyond it, by count and ids, are not in the table
        self._now = 0  # the number of the merge

    def merges(self, vocab_size: int, least: int) -> list[tuple[int, int]]:
        """Merge until there are ``vocab_size`` tokens, or no pair occurs ``least`` times; the pairs, in order."""
        least = max(least, 1)
        self._count_pairs(least)
        while len(self._tokens) < vocab_size:
            if self._heap:
                item = heapq.heappop(self._heap)
                pair, time = item >> _TIME_BITS & _PAIR_MASK, item & _TIME_MASK
                count = self._counts[pair]
                key = _key(count, pair)
                if key != item >> _TIME_BITS:
                    heapq.heappush(self._heap, key << _TIME_BITS | time)
                elif count >= least and key <= self._limit:
                    self._merge(pair, time, least)
                    if len(self._counts) - len(self._merged) > self._held:
                        self._drop_rare(least)
                elif self._limit == _NO_LIMIT:
                    break
                else:
                    heapq.heappush(self._heap, item)
                    self._count_pairs(least)
            elif self._limit == _NO_LIMIT:
                break
            else:
                self._count_pairs(least)
        return [(pair >> _ID_BITS, pair & _ID_MASK) for pair in self._merged]

    def _place_symbols(self) -> None:
        """Make the list of places of each symbol."""
        words, many = self._words, len(self._tokens)
        used = words.first[: words.size]
        sizes = np.zeros(many + 1, dtype=np.int64)
        for begin in range(0, words.size, CHUNK):
            sizes += np.bincount(used[begin : begin + CHUNK] + 1, minlength=many + 1)
        filled = np.cumsum(sizes) - sizes - sizes[0]
        self._begins, self._sizes = filled[1:].tolist(), sizes[1:].tolist()
        self._placed = int(sizes[1:].sum())
        for begin in range(0, words.size, CHUNK):
            symbols = used[begin : begin + CHUNK]
            order = np.argsort(symbols, kind="stable")
            order = order[np.count_nonzero(symbols < 0) :]
            found, firsts, many_of = np.unique(symbols[order], return_index=True, return_counts=True)
            at = np.repeat(filled[found + 1] - firsts, many_of) + np.arange(len(order))
            words.places.data[at] = order + begin
            filled[found + 1] += many_of

    def _places_of(self, token: int) -> Iterator[Ints]:
        """Where a token begins, ascending; places that it has left are taken out of its list on the way."""
        words = self._words
        begin, size = self._begins[token], self._sizes[token]
        kept = begin
        for at in range(begin, begin + size, CHUNK):
            listed = words.places.data[at : min(at + CHUNK, begin + size)]
            live = listed[words.first[listed] == token]
            words.places.data[kept : kept + len(live)] = live
            kept += len(live)
            yield live
        self._sizes[token] = kept - begin

    def _places_of_pair(self, left: int, right: int) -> Iterator[Ints]:
        """Where a pair of tokens begins, ascending; of three equal tokens, the first two places."""
        words, span = self._words, self._spans[left]
        if self._sizes[left] <= self._sizes[right]:
            for places in self._places_of(left):
                yield places[words.first[places + span] == right]
        else:
            for places in self._places_of(right):
                yield places[words.last[places - 1] == left] - span

    def _weights(self, places: Ints) -> Ints:
        """How often the word at each place occurs."""
        weights: Ints = self._words.counts[self._words.word_of(places)]
        return weights

    def _times(self, places: Ints, left: int) -> Ints:
        """The merge that made the pair of ``left`` and what follows it at each place; 0 for the beginning."""
        times: Ints = np.maximum(self._words.made[places], self._words.made[places + self._spans[left]])
        return times

    def _count_pairs(self, least: int) -> None:
        """Count the pairs that are not in the table, and take in those that there is room for."""
        words = self._words
        self._limit = _NO_LIMIT
        for left in range(len(self._tokens)):
            counts: dict[int, int] = {}
            times: dict[int, set[int]] = {}
            for places in self._places_of(left):
                rights = words.first[places + self._spans[left]]
                places, rights = places[rights >= 0], rights[rights >= 0]
                for right, weight in _sums(rights, self._weights(places), len(self._tokens)):
                    counts[right] = counts.get(right, 0) + weight
                rows = np.unique(rights.astype(np.int64) << _TIME_BITS | self._times(places, left))
                for row in rows.tolist():
                    times.setdefault(row >> _TIME_BITS, set()).add(row & _TIME_MASK)
            for right, count in counts.items():
                if (pair := left << _ID_BITS | right) not in self._counts:
                    self._take_in(pair, count, times[right], least)
            if len(self._counts) - len(self._merged) > self._held:
                self._drop_rare(least)

    def _take_in(self, pair: int, count: int, times: Iterable[int], least: int) -> None:
        """Put a pair into the table and on the heap, if it is frequent enough to be there."""
        key = _key(count, pair)
        if count < least or key > self._limit:
            return
        self._counts[pair] = count
        for number, time in enumerate(times):
            heapq.heappush(self._heap, key << _TIME_BITS | time)
            if number:
                self._several.add(pair)

    def _drop_rare(self, least: int) -> None:
        """Keep the more frequent half of the pairs, and those that were merged, whose counts stay as they are."""
        keys = sorted(
            _key(count, pair) for pair, count in self._counts.items() if count >= least and pair not in self._merged
        )
        if len(keys) > self._held // 2:
            self._limit = min(self._limit, keys[self._held // 2])
        del keys
        self._counts = {
            pair: count
            for pair, count in self._counts.items()
            if pair in self._merged or (count >= least and _key(count, pair) <= self._limit)
        }
        self._several.intersection_update(self._counts)
        self._heap = [item for item in self._heap if item >> _TIME_BITS & _PAIR_MASK in self._counts]
        heapq.heapify(self._heap)

    def _merge(self, pair: int, time: int, least: int) -> None:
        """Put one token for a pair, wherever it stands; if several merges made it, in the words of this one only."""
        words = self._words
        left, right = pair >> _ID_BITS, pair & _ID_MASK
        token = self._tokens[left] + self._tokens[right].removeprefix(self._prefix)
        made = self._ids.setdefault(token, len(self._tokens))
        if is_new := made == len(self._tokens):
            self._tokens.append(token)
            self._spans.append(self._spans[left] + self._spans[right])
            self._begins.append(self._placed)
            self._sizes.append(0)
        self._merged.pop(pair, None)
        self._merged[pair] = None
        self._now += 1
        here = self._words_of(left, right, time) if pair in self._several else None
        fewer: dict[int, int] = {}
        more: dict[int, int] = {}
        again: list[Ints] = []
        for places in self._places_of_pair(left, right):
            if here is not None:
                places = places[np.isin(words.word_of(places), here)]
            if left == right:
                places = _every_other(places, self._spans[left])
            if not len(places):
                continue
            self._replace(places, left, right, made, fewer, more)
            if is_new:
                words.places.data[self._placed : self._placed + len(places)] = places
                self._placed += len(places)
                self._sizes[made] += len(places)
            else:
                again.append(places)
        if again:
            self._list_again(made, again)
        self._change(fewer, more, least, is_new=is_new)

    def _words_of(self, left: int, right: int, time: int) -> Ints:
        """The words in which a merge made a pair."""
        found = [
            self._words.word_of(places[self._times(places, left) == time])
            for places in self._places_of_pair(left, right)
        ]
        return np.unique(np.concatenate(found))

    def _replace(
        self, places: Ints, left: int, right: int, made: int, fewer: dict[int, int], more: dict[int, int]
    ) -> None:
        """Put a token for the pairs that begin at places; tell how often pairs occur less, and more."""
        words, span = self._words, self._spans[left]
        ends = places + (span + self._spans[right])
        weights = self._weights(places)
        before, behind = words.last[places - 1], words.first[ends]
        words.first[places + span] = -1
        words.first[places] = made
        words.last[ends - 1] = made
        words.made[places] = self._now
        # A neighbour that became this token as well is told once, by the one on the left.
        alone = (before >= 0) & (words.last[places - 1] == before)
        inner = behind >= 0
        many = len(self._tokens)
        for neighbour, weight in _sums(before[alone], weights[alone], many):
            neighbour <<= _ID_BITS
            fewer[neighbour | left] = fewer.get(neighbour | left, 0) + weight
            more[neighbour | made] = more.get(neighbour | made, 0) + weight
        behind, now_behind, weights = behind[inner], words.first[ends[inner]], weights[inner]
        for neighbour, weight in _sums(behind, weights, many):
            pair = right << _ID_BITS | neighbour
            fewer[pair] = fewer.get(pair, 0) + weight
        for neighbour, weight in _sums(now_behind, weights, many):
            pair = made << _ID_BITS | neighbour
            more[pair] = more.get(pair, 0) + weight

    def _list_again(self, token: int, found: list[Ints]) -> None:
        """Add places to the list of a token that was there before, behind all lists."""
        places = np.sort(np.concatenate([*self._places_of(token), *found]))
        end = self._placed + len(places)
        if end > len(self._words.places.data):
            self._words.places.reserve(end + end // 4)
        self._words.places.data[self._placed : end] = places
        self._begins[token], self._sizes[token], self._placed = self._placed, len(places), end

    def _change(self, fewer: dict[int, int], more: dict[int, int], least: int, *, is_new: bool) -> None:
        """Take over how often pairs occur less and more."""
        for pair, count in fewer.items():
            if pair in self._counts:
                self._counts[pair] -= count
        for pair, count in more.items():
            known = self._counts.get(pair)
            if known is not None:
                self._counts[pair] = count = known + count
                if count > 0:
                    heapq.heappush(self._heap, _key(count, pair) << _TIME_BITS | self._now)
                    self._several.add(pair)
            elif is_new:
                self._take_in(pair, count - fewer.get(pair, 0), (self._now,), least)
            else:
                self._take_in(pair, *self._count_pair(pair >> _ID_BITS, pair & _ID_MASK), least)

    def _count_pair(self, left: int, right: int) -> tuple[int, list[int]]:
        """How often a pair occurs, and the merges that made it."""
        count, times = 0, set()
        for places in self._places_of_pair(left, right):
            count += int(self._weights(places).sum())
            times.update(self._times(places, left).tolist())
        return count, sorted(times)


def _key(count: int, pair: int) -> int:
    """A number that is less for pairs that are merged earlier."""
    return _TOP - count << _PAIR_BITS | pair


def _every_other(places: Ints, span: int) -> Ints:
    """Of places that follow each other at a distance of ``span``, the first, third, and so on."""
    if len(places) < 2:
        return places
    begins = np.flatnonzero(np.concatenate(([True], places[1:] - places[:-1] != span)))
    nth = np.arange(len(places)) - np.repeat(begins, np.diff(begins, append=len(places)))
    odd: Ints = places[nth % 2 == 0]
    return odd


def _sums(ids: Ints, weights: Ints, many: int) -> Iterator[tuple[int, int]]:
    """Ids, which are below ``many``, and the sums of their weights; of few ids, some may come several times."""
    if len(ids) > many // 4:
        sums = np.bincount(ids, weights=weights)  # floats are exact below 2 ** 53
        ids = np.flatnonzero(sums)
        weights = sums[ids].astype(np.int64)
    elif len(ids) > FEW:
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        begins = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
        ids, weights = ids[begins], np.add.reduceat(weights[order], begins)
    return zip(ids.tolist(), weights.tolist(), strict=True)
