"""Chooses the tokens of a sample to mask: spans of whole words, drawn until a share of the tokens is reached.

Devlin et al. 2018 (arXiv:1810.04805, section 3.1); spans of words follow Joshi et al. 2019 (arXiv:1907.10529, section
3.1), as in Megatron's data sets. Shapes in names: T tokens, W words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def sample_random(seed: int, split_index: int, sample: int) -> np.random.RandomState:
    """The generator of one sample; ``RandomState`` is frozen by numpy's compatibility policy (NEP 19).

    Args:
        seed: seed of the run.
        split_index: number of the split.
        sample: number of the sample.
    """
    # Each word of the seed must fit in 32 bits, so a sample number is given as its low and its high word.
    return np.random.RandomState([seed % 2**32, split_index, sample % 2**32, sample >> 32])


def word_bounds(special_T: npt.NDArray[np.bool_], continues_T: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """First and end position of each word, int64 ``[W]`` each.

    Args:
        special_T: bool ``[T]``, special tokens, which belong to no word.
        continues_T: bool ``[T]``, tokens that continue the word before them; all false makes each token a word.
    """
    after_special = np.concatenate([[True], special_T[:-1]])
    starts = ~special_T & (~continues_T | after_special)
    begins = np.flatnonzero(starts)
    borders = np.flatnonzero(starts | special_T)
    position = np.searchsorted(borders, begins, side="right")
    ends = np.concatenate([borders, [len(special_T)]])[position]
    return begins, ends


def ngram_lengths(random: np.random.RandomState, count: int) -> Int64Array:
    """BERT: 1, 2 or 3 words, with odds 1, 1/2 and 1/3; int64 ``[count]``."""
    odds = 1.0 / np.arange(1, 4)
    return random.choice(3, size=count, p=odds / odds.sum()) + 1


def span_lengths(random: np.random.RandomState, count: int) -> Int64Array:
    """T5: a geometric number of words with p = 0.2, at most 10; int64 ``[count]``."""
    return np.minimum(random.geometric(0.2, size=count), 10)


def choose_spans(
    order: Sequence[int], lengths: Sequence[int], begins: Sequence[int], ends: Sequence[int], budget: int
) -> list[tuple[int, int]]:
    """Spans of words to mask, as ``(first word, end word)``, ascending.

    Words are tried in ``order`` as the first word of a span. A span that exceeds the remaining budget is shortened; one
    that overlaps a masked word is skipped.

    Args:
        order: word numbers.
        lengths: length of the span that begins at each word, in words.
        begins: first position of each word.
        ends: end position of each word.
        budget: maximum number of masked positions.
    """
    masked = [False] * len(begins)
    chosen: list[tuple[int, int]] = []
    remaining = budget
    for word in order:
        if remaining <= 0:
            break
        if masked[word]:
            continue
        until = min(word + lengths[word], len(begins))
        # Count word by word: special tokens between words are not masked.
        while until > word and sum(ends[at] - begins[at] for at in range(word, until)) > remaining:
            until -= 1
        if until == word or any(masked[word:until]):
            continue
        masked[word:until] = [True] * (until - word)
        for at in range(word, until):
            remaining -= ends[at] - begins[at]
        chosen.append((word, until))
    return sorted(chosen)


def masked_positions(
    random: np.random.RandomState,
    special_T: npt.NDArray[np.bool_],
    continues_T: npt.NDArray[np.bool_],
    mask_prob: float,
) -> Int64Array:
    """Positions of a BERT sample to mask, ascending int64: at least one, and a share ``mask_prob`` of all tokens.

    Args:
        random: generator of the sample.
        special_T: bool ``[T]``, special tokens, which are never masked.
        continues_T: bool ``[T]``, tokens that continue the word before them.
        mask_prob: share of the tokens to mask.
    """
    begins, ends = word_bounds(special_T, continues_T)
    # Of all tokens, special ones included, as in Megatron; at least one, since a sample without a label has no loss.
    budget = max(1, round(len(special_T) * mask_prob))
    order = random.permutation(len(begins)).tolist()
    lengths = ngram_lengths(random, len(begins)).tolist()
    first, end = begins.tolist(), ends.tolist()
    spans = choose_spans(order, lengths, first, end, budget)
    positions = [at for begin, until in spans for word in range(begin, until) for at in range(first[word], end[word])]
    return np.asarray(positions, dtype=np.int64)


def masked_spans(
    random: np.random.RandomState,
    continues_T: npt.NDArray[np.bool_],
    mask_prob: float,
    max_spans: int,
    max_tokens: int,
) -> list[tuple[int, int]]:
    """Spans of a T5 sample to mask, as ``(begin, end)`` of positions, ascending.

    Args:
        random: generator of the sample.
        continues_T: bool ``[T]``, tokens that continue the word before them.
        mask_prob: share of the tokens to mask.
        max_spans: number of sentinel tokens.
        max_tokens: limit of the masked tokens plus one sentinel per span.
    """
    begins, ends = word_bounds(np.zeros(len(continues_T), dtype=np.bool_), continues_T)
    budget = max(1, round(len(continues_T) * mask_prob))
    order = random.permutation(len(begins)).tolist()
    lengths = span_lengths(random, len(begins)).tolist()
    first, end = begins.tolist(), ends.tolist()
    spans: list[tuple[int, int]] = []
    remaining = max_tokens
    for word, until in choose_spans(order, lengths, first, end, budget):
        size = end[until - 1] - first[word] + 1
        if len(spans) < max_spans and size <= remaining:
            spans.append((first[word], end[until - 1]))
            remaining -= size
    return spans
