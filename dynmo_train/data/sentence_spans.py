"""Which sentences make which sample: runs of a document's sentences, as Megatron's BERT and T5 data sets take them.

A document is walked from its beginning: a sample is as many sentences as reach its length, but the last sample of a
document takes what is left. Every epoch is drawn and shuffled by itself, so that a longer run begins with the samples
of a shorter one, and nothing depends on the number of processes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.errors import UsageError
from ..formats.indexed import IndexedDataset
from .gpt_dataset import PARTS, Part, split_bounds
from .index_cache import Arrays, cached_arrays, file_facts
from .sample_index import shuffled

VERSION = 1
# Megatron leaves out documents with a sentence longer than this: they are hardly ever text.
LONG_SENTENCE_TOKENS = 512
_SAMPLES = 1

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How runs of sentences are taken.

    Attributes:
        tokens: the length that a run is to reach.
        min_sentences: sentences of a run at least; 2 where two segments are made of it.
        short_probability: of a shorter length, drawn evenly from 2 to ``tokens``.
        seed: of the draws and of the shuffles.
        part: number of the part of the data set.
        min_left: sentences that may be left of a document behind a run; fewer go with it.
    """

    tokens: int
    min_sentences: int
    short_probability: float
    seed: int
    part: int
    min_left: int = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Samples in the order of a training run: sequences ``begins[i]`` up to ``ends[i]``, of ``targets[i]`` tokens."""

    begins: npt.NDArray[np.integer[Any]]
    ends: npt.NDArray[np.integer[Any]]
    targets: npt.NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.begins)

    def places(self, source: IndexedDataset, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """The sentences of several samples, as ``Dataset.places`` gives them."""
        places = []
        for index in np.asarray(indices, dtype=np.int64):
            begin, end = int(self.begins[index]), int(self.ends[index])
            after = int(source.starts[end - 1]) + int(source.lengths[end - 1])
            tokens = [int(source.starts[begin]), after]
            places.append([{"prefix": str(source.prefix), "sequences": [begin, end], "tokens": tokens}])
        return places


def hashed_uniform(keys: Int64Array, *salt: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each key, always the same one (splitmix64, Steele et al. 2014, figure 17)."""
    state = keys.astype(np.uint64)
    for each in (*salt, 0x5EED):
        state = state + np.uint64((each + 1) * 0x9E3779B97F4A7C15 % 2**64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


def runs_of_epoch(
    source: IndexedDataset,
    low: int,
    high: int,
    settings: RunSettings,
    epoch: int,
    taken: Int64Array | None = None,
) -> Arrays:
    """The runs of the documents ``[low, high)``, document after document.

    All documents are walked at once, each by one run a round, so that there are as many rounds as the longest
    document has runs.

    Args:
        taken: tokens of a run that something else takes (a title), for each document of the data set.
    """
    first, last = int(source.documents[low]), int(source.documents[high])
    lengths = np.asarray(source.lengths[first:last], dtype=np.int64)
    until = np.cumsum(lengths)
    begin_of = np.asarray(source.documents[low:high], dtype=np.int64) - first
    end_of = np.asarray(source.documents[low + 1 : high + 1], dtype=np.int64) - first
    longs = np.concatenate([[0], np.cumsum(lengths > LONG_SENTENCE_TOKENS)])
    count = end_of - begin_of
    usable = (count >= settings.min_sentences) & ((longs[end_of] == longs[begin_of]) | (count == 1))
    at, end = begin_of[usable], end_of[usable]
    less = np.zeros(len(at), dtype=np.int64) if taken is None else taken[low:high][usable]
    begins, ends, targets = [], [], []
    while len(at):
        target = _targets(at + first, settings, epoch) - less
        before = until[at] - lengths[at]
        reached = np.searchsorted(until, before + target, side="left") + 1
        stop = np.maximum(reached, at + settings.min_sentences)
        # A document of BERT never ends with a run of a single sentence.
        stop = np.where(stop > end - settings.min_left, end, stop)
        begins.append(at)
        ends.append(stop)
        targets.append(target)
        going_on = stop < end
        at, end, less = stop[going_on], end[going_on], less[going_on]
    if not begins:
        empty = np.zeros(0, dtype=np.int64)
        return {"begins": empty, "ends": empty, "targets": empty}
    joined = [np.concatenate(parts) for parts in (begins, ends, targets)]
    order = np.argsort(joined[0], kind="stable")
    return {
        "begins": joined[0][order] + first,
        "ends": joined[1][order] + first,
        "targets": joined[2][order],
    }


def _targets(starts: Int64Array, settings: RunSettings, epoch: int) -> Int64Array:
    """The length of the run that begins at each start: the whole one, or a shorter one by chance."""
    whole = np.full(len(starts), settings.tokens, dtype=np.int64)
    if settings.short_probability == 0 or settings.tokens <= 2:
        return whole
    short = hashed_uniform(starts, settings.seed, settings.part, epoch, 0) < settings.short_probability
    drawn = hashed_uniform(starts, settings.seed, settings.part, epoch, 1)
    return np.where(short, 2 + (drawn * (settings.tokens - 1)).astype(np.int64), whole)


def _small(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.astype(np.int32) if not len(array) or int(array.max()) < 2**31 else array


def build_runs(
    source: IndexedDataset,
    *,
    part: Part,
    shares: tuple[float, float, float],
    settings: RunSettings,
    num_samples: int,
    batch_size: int,
    cache: Path | None,
    titles: IndexedDataset | None = None,
) -> Runs:
    """The first ``num_samples`` runs of a part, over as many epochs as they take.

    Args:
        shares: fractions of the documents for training, validation and test.
        batch_size: runs that one epoch must hold at least.
        cache: folder of indices; None keeps them in memory.
        titles: a sequence for each document, whose tokens its runs leave room for.

    Raises:
        UsageError: an epoch has fewer runs than a batch.
    """
    number = PARTS.index(part)
    bounds = split_bounds(source.num_documents, shares)
    low, high = bounds[number], bounds[number + 1]
    taken = None if titles is None else np.asarray(titles.lengths, dtype=np.int64)

    def build() -> Arrays:
        epochs: list[Arrays] = []
        placed = 0
        while placed < max(1, num_samples):
            runs = runs_of_epoch(source, low, high, settings, len(epochs), taken)
            found = len(runs["begins"])
            if found < max(1, batch_size):
                raise _too_few(source, part, high - low, found, settings, max(1, batch_size))
            order = shuffled(found, settings.seed, number, len(epochs), _SAMPLES)
            epochs.append({name: array[order] for name, array in runs.items()})
            placed += found
        return {
            name: _small(np.concatenate([runs[name] for runs in epochs])[:num_samples])
            for name in ("begins", "ends", "targets")
        }

    facts = {
        "kind": "sentences",
        "version": VERSION,
        **file_facts(source.prefix),
        "sequences": len(source.lengths),
        "documents": [low, high],
        "samples": num_samples,
        **asdict(settings),
        **({} if titles is None else {f"titles_{name}": fact for name, fact in file_facts(titles.prefix).items()}),
    }
    return Runs(**cached_arrays(cache, facts, build))


def _too_few(
    source: IndexedDataset, part: Part, documents: int, found: int, settings: RunSettings, needed: int
) -> UsageError:
    sentences = len(source.lengths) / max(1, source.num_documents)
    hint = ""
    if settings.min_sentences > sentences:
        hint = (
            f"; its documents have {sentences:.1f} sequences on average, and a sample takes {settings.min_sentences}:"
            " make it with dynmo-prep binarize --split-sentences"
        )
    return UsageError(
        f"the {part} part of {source.prefix} is too small: {documents} documents make {found} samples of"
        f" {settings.tokens} tokens, and a batch needs {needed}; add text, lower the batch size or change --split"
        + ("" if part == "train" else ", or write --eval-iters 0")
        + hint
    )
