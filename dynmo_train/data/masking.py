"""Which tokens of a sample are hidden: whole words, or runs of a few words, drawn until the share is reached.

Devlin et al. 2018 (arXiv:1810.04805, section 3.1); runs of words after Joshi et al. 2019 (arXiv:1907.10529, section
3.1), as Megatron's data sets draw them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def sample_random(seed: int, part: int, sample: int) -> np.random.RandomState:
    """The generator of one sample; numpy keeps this generator's stream for ever."""
    return np.random.RandomState([seed % 2**32, part, sample % 2**32, sample >> 32])


def words_of(special: npt.NDArray[np.bool_], continues: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """Begin and end of each word: positions that are not special, joined with those behind them that go on.

    Args:
        special: positions that are never hidden.
        continues: positions whose token goes on with the word before it; all false to take each token by itself.
    """
    after_special = np.concatenate([[True], special[:-1]])
    starts = ~special & (~continues | after_special)
    begins = np.flatnonzero(starts)
    borders = np.flatnonzero(starts | special)
    place = np.searchsorted(borders, begins, side="right")
    ends = np.concatenate([borders, [len(special)]])[place]
    return begins, ends


def bert_run_lengths(random: np.random.RandomState, count: int) -> Int64Array:
    """Runs of 1, 2 or 3 words with odds of 1, 1/2 and 1/3."""
    odds = 1.0 / np.arange(1, 4)
    return random.choice(3, size=count, p=odds / odds.sum()) + 1


def span_lengths(random: np.random.RandomState, count: int) -> Int64Array:
    """Runs of words with a geometric length, 0.2 to end after each, at most 10."""
    return np.minimum(random.geometric(0.2, size=count), 10)


def choose_runs(
    order: Sequence[int], lengths: Sequence[int], begins: Sequence[int], ends: Sequence[int], budget: int
) -> list[tuple[int, int]]:
    """The words to hide, as (begin, end) of positions, in order of position.

    Words are tried in ``order`` as the first of a run of ``lengths`` words. A run that is too long for what is left of
    the budget is shortened, one that meets a hidden word is left out.

    Args:
        budget: positions to hide at most.
    """
    hidden = [False] * len(begins)
    chosen: list[tuple[int, int]] = []
    left = budget
    for word in order:
        if left <= 0:
            break
        if hidden[word]:
            continue
        until = min(word + lengths[word], len(begins))
        # Positions between words (a separator) are no part of a run: count word by word.
        while until > word and sum(ends[at] - begins[at] for at in range(word, until)) > left:
            until -= 1
        if until == word or any(hidden[word:until]):
            continue
        hidden[word:until] = [True] * (until - word)
        for at in range(word, until):
            left -= ends[at] - begins[at]
        chosen.append((word, until))
    return sorted(chosen)


def positions_to_hide(
    random: np.random.RandomState,
    special: npt.NDArray[np.bool_],
    continues: npt.NDArray[np.bool_],
    share: float,
) -> Int64Array:
    """The positions of a BERT sample that are hidden, ascending: at least one, ``share`` of all tokens."""
    begins, ends = words_of(special, continues)
    budget = max(1, round(len(special) * share))
    order = random.permutation(len(begins)).tolist()
    lengths = bert_run_lengths(random, len(begins)).tolist()
    first, beyond = begins.tolist(), ends.tolist()
    runs = choose_runs(order, lengths, first, beyond, budget)
    positions = [at for begin, end in runs for word in range(begin, end) for at in range(first[word], beyond[word])]
    return np.asarray(positions, dtype=np.int64)


def spans_to_hide(
    random: np.random.RandomState, continues: npt.NDArray[np.bool_], share: float, most_spans: int, most_tokens: int
) -> list[tuple[int, int]]:
    """The spans of a T5 sample that are hidden, as (begin, end) of positions, ascending.

    Args:
        most_spans: there are that many sentinels.
        most_tokens: that hidden tokens and one sentinel for each span may take together.
    """
    begins, ends = words_of(np.zeros(len(continues), dtype=np.bool_), continues)
    budget = max(1, round(len(continues) * share))
    order = random.permutation(len(begins)).tolist()
    lengths = span_lengths(random, len(begins)).tolist()
    first, beyond = begins.tolist(), ends.tolist()
    spans: list[tuple[int, int]] = []
    left = most_tokens
    for begin, end in choose_runs(order, lengths, first, beyond, budget):
        size = beyond[end - 1] - first[begin] + 1
        if len(spans) < most_spans and size <= left:
            spans.append((first[begin], beyond[end - 1]))
            left -= size
    return spans
