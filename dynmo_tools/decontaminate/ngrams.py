"""Word n-grams of texts, and a fast search for the n-grams of a dictionary.

The dictionary numbers its words. For each n-gram length, a 64-bit polynomial of the word numbers of a text is looked up
in a bit map of the dictionary's values. The bit map selects candidates, the words themselves decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..tokenization.scripts import has_spaces, units_per_word, word_spans, words_of

# 2^64 / golden ratio, odd: multiplication is a bijection of 64-bit numbers.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# The map has 64 to 128 entries per n-gram, so less than 2 % of other windows are candidates.
MIN_BITS, SPARE_BITS = 12, 6


@dataclass(frozen=True, kw_only=True)
class NgramSizes:
    """Lengths of n-grams in words.

    Attributes:
        min_words: shorter texts of tasks have no n-grams.
        max_words: length of the n-grams of longer texts.
    """

    min_words: int = 8
    max_words: int = 13


def split_words(text: str) -> list[str]:
    """The lower-cased words of ``text``, by the rules of their scripts."""
    return words_of(text.lower())


def word_starts(text: str) -> list[int]:
    """The character offset of each word of ``split_words`` in ``text``."""
    return [begin for begin, _ in split_spans(text)]


def split_spans(text: str) -> list[tuple[int, int]]:
    """The begin and end of each word of ``split_words`` in ``text``, in characters.

    Some characters become two when lower-cased; the offsets are converted back to the text.
    """
    # Words are found in the lower-cased text, as in Megatron's tool, which takes their offsets for those of the text.
    lower = text.lower()
    spans = word_spans(lower)
    if len(lower) == len(text):
        return spans
    origin = [at for at, character in enumerate(text) for _ in character.lower()]
    return [(origin[begin], origin[end - 1] + 1) for begin, end in spans]


def ngrams_of(text: str, sizes: NgramSizes) -> Iterator[str]:
    """The n-grams of a task's text: all of the maximum size, or the complete text if it is shorter than that."""
    words = split_words(text)
    scale = units_per_word(words)
    min_units, max_units = sizes.min_words * scale, sizes.max_words * scale
    if len(words) < min_units:
        return
    if len(words) < max_units:
        yield " ".join(words)
    for at in range(len(words) - max_units + 1):
        yield " ".join(words[at : at + max_units])


class NgramMatch(NamedTuple):
    """An n-gram of the dictionary in a text.

    Attributes:
        word: number of its first word, from 0.
        ngram: its words joined by spaces.
    """

    word: int
    ngram: str

    def length(self, spans: Sequence[tuple[int, int]]) -> int:
        """The number of characters of the n-gram in a text with these spans of words."""
        words = self.ngram.split(" ")
        # As Megatron's tool: its words joined by single spaces, whatever is between them in the text.
        if has_spaces(words):
            return len(self.ngram)
        return spans[self.word + len(words) - 1][1] - spans[self.word][0]


def _as_numbers(
    ngrams: Iterable[str], numbers: dict[str, int]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Number the words of n-grams, from 1.

    Consecutive n-grams of one text overlap in all words but one; then only the last word is new.

    Args:
        ngrams: words joined by single spaces.
        numbers: receives the number of each word.

    Returns:
        Word numbers of all n-grams, uint64; the offset of each n-gram in them, and its length in words, int64.
    """
    stream: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    rest: str | None = None  # prefix of the next n-gram if it starts one word later
    for ngram in ngrams:
        if rest is not None and ngram.startswith(rest) and ngram.find(" ", len(rest)) < 0:
            words = [ngram[len(rest) :]]
            starts.append(starts[-1] + 1)
            lengths.append(lengths[-1])
        else:
            words = ngram.split(" ")
            starts.append(len(stream))
            lengths.append(len(words))
        stream += [numbers.setdefault(word, len(numbers) + 1) for word in words]
        first = ngram.find(" ")
        rest = ngram[first + 1 :] + " " if first >= 0 else None
    return np.asarray(stream, dtype=np.uint64), np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)


class ScriptFinder:
    """Searches texts for the n-grams of a dictionary, those of scripts with several units per word separately.

    Args:
        ngrams: the dictionary.
        max_words: maximum words per n-gram.
    """

    def __init__(self, ngrams: Iterable[str], max_words: int) -> None:
        groups: dict[int, list[str]] = {1: []}
        for ngram in ngrams:
            groups.setdefault(units_per_word(ngram.split(" ")), []).append(ngram)
        self._finders = [NgramFinder(group, max_words * scale) for scale, group in groups.items()]

    def first(self, words: Sequence[str]) -> NgramMatch | None:
        """The first n-gram in ``words``; None if there is none."""
        found = [match for finder in self._finders if (match := finder.first(words)) is not None]
        return min(found, key=lambda match: match.word, default=None)


class NgramFinder:
    """Searches texts for the n-grams of a dictionary.

    Args:
        ngrams: the dictionary.
        max_words: maximum words per n-gram.
    """

    def __init__(self, ngrams: Iterable[str], max_words: int) -> None:
        listed = list(ngrams)
        self._known = frozenset(listed)
        self._most = max_words
        self._numbers: dict[str, int] = {}
        stream, starts, lengths = _as_numbers(listed, self._numbers)
        self._shift = np.uint64(64 - max(MIN_BITS, len(listed).bit_length() + SPARE_BITS))
        self._lengths: list[int] = np.unique(lengths).tolist()
        self._maps: dict[int, npt.NDArray[np.bool_]] = {}
        for length in self._lengths:
            columns = stream[starts[lengths == length] + np.arange(length)[:, None]]
            self._maps[length] = np.zeros(1 << (64 - int(self._shift)), dtype=np.bool_)
            self._maps[length][self._values(columns)] = True

    def _values(self, columns: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The position in the bit map of each n-gram, given word numbers ``[length, ngrams]``."""
        mixed = np.zeros(columns.shape[1], dtype=np.uint64)
        for column in columns:
            mixed = (mixed + column) * MULTIPLIER
            mixed ^= mixed >> np.uint64(32)
        return (mixed >> self._shift).astype(np.int64)

    def _candidates(self, words: Sequence[str]) -> dict[int, npt.NDArray[np.bool_]]:
        """For each length of the dictionary, the words at which an n-gram may start, ``[words - length + 1]``."""
        # Words that are not in the dictionary have the number 0, which no n-gram of it contains.
        found_numbers = map(self._numbers.get, words, itertools.repeat(0))
        numbers = np.fromiter(found_numbers, dtype=np.uint64, count=len(words))
        found = {}
        longest = min(self._lengths[-1], len(words)) if self._lengths else 0
        mixed = np.zeros(len(words), dtype=np.uint64)
        for length in range(1, longest + 1):
            # The polynomial of ``_values``, extended by one word: one pass serves all lengths. Products wrap around in
            # 64 bits.
            mixed = (mixed[: len(words) - length + 1] + numbers[length - 1 :]) * MULTIPLIER
            mixed ^= mixed >> np.uint64(32)
            if length in self._maps:
                found[length] = self._maps[length][(mixed >> self._shift).astype(np.int64)]
        return found

    def first(self, words: Sequence[str]) -> NgramMatch | None:
        """The first n-gram in ``words``, in the search order of Megatron's tool; None if there is none.

        At each word where a window of the maximum size fits: the maximum size first, then shorter sizes ascending. In
        the last window, shorter sizes ascending, each from left to right. Texts shorter than the maximum size are not
        searched.
        """
        windows = len(words) - self._most + 1
        if windows < 1 or not self._lengths:
            return None
        candidates = self._candidates(words)
        order = sorted(candidates, key=lambda length: (length != self._most, length))
        either = np.zeros(windows, dtype=np.bool_)
        for length in order:
            either |= candidates[length][:windows]
        for at in map(int, np.flatnonzero(either)):
            for length in order:
                # The map selects only candidates; the words decide, so a collision cannot remove text.
                if candidates[length][at] and (ngram := " ".join(words[at : at + length])) in self._known:
                    return NgramMatch(at, ngram)
        if windows > 1:
            return self._in_last_window(words, candidates, windows - 1)
        return None

    def _in_last_window(
        self, words: Sequence[str], candidates: dict[int, npt.NDArray[np.bool_]], begin: int
    ) -> NgramMatch | None:
        for length in sorted(set(candidates) - {self._most}):
            for at in map(int, np.flatnonzero(candidates[length][begin:])):
                ngram = " ".join(words[begin + at : begin + at + length])
                if ngram in self._known:
                    return NgramMatch(begin + at, ngram)
        return None
