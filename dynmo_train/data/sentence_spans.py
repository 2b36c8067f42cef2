"""Spans of consecutive sentences of a document, which become samples, as in Megatron's BERT and T5 data sets.

A document is split from its beginning: sentences are added to a sample until it reaches its target length, and the last
sample of a document has the rest. Every epoch is drawn and shuffled separately, so that a longer run begins with the
samples of a shorter one. Nothing depends on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.errors import UsageError
from ..formats.indexed import IndexedDataset
from .index_cache import Arrays, cached_arrays, index_identity
from .sample_format import Int64Array, SplitRequest
from .sample_index import permutation
from .vocabulary import Vocabulary

VERSION = 1
# As in Megatron, documents with a longer sentence are skipped: they are rarely prose.
MAX_SENTENCE_TOKENS = 512
_SAMPLES = 1


@dataclass(frozen=True, kw_only=True)
class SpanSettings:
    """How documents are split into spans; all fields are part of the cache key.

    Attributes:
        tokens: target length of a span, in tokens.
        min_sentences: minimum sentences of a span; 2 where it becomes two segments.
        short_probability: probability of a shorter target, uniform from 2 to ``tokens``.
        seed: seed of the targets and of the shuffles.
        split_index: number of the split.
        min_remaining: minimum sentences that may remain of a document after a span; fewer join the span.
    """

    tokens: int
    min_sentences: int
    short_probability: float
    seed: int
    split_index: int
    min_remaining: int = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class SentenceSpans:
    """Samples in the order of a run; the three arrays are int32 or int64, ``[samples]``.

    Attributes:
        begins: first sequence of each sample.
        ends: sequence after the last one of each sample.
        targets: maximum number of tokens of each sample.
    """

    begins: npt.NDArray[np.integer[Any]]
    ends: npt.NDArray[np.integer[Any]]
    targets: npt.NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.begins)

    def token_ranges(self, source: IndexedDataset, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """The sentences of several samples, as ``Dataset.token_ranges`` returns them.

        Args:
            source: the data set.
            indices: sample numbers, ``[n]``.
        """
        ranges = []
        for index in np.asarray(indices, dtype=np.int64):
            begin, end = int(self.begins[index]), int(self.ends[index])
            after = int(source.starts[end - 1]) + int(source.lengths[end - 1])
            tokens = [int(source.starts[begin]), after]
            ranges.append([{"prefix": str(source.prefix), "sequences": [begin, end], "tokens": tokens}])
        return ranges


def sentence_tokens(source: IndexedDataset, begin: int, end: int, vocab_size: int) -> list[Int64Array]:
    """Token ids of the sequences ``[begin, end)``, int64 ``[length]`` each.

    Args:
        source: the data set.
        begin: first sequence.
        end: sequence after the last.
        vocab_size: upper bound of the token ids.

    Raises:
        UsageError: an id is not below ``vocab_size``.
    """
    first = int(source.starts[begin])
    lengths = np.asarray(source.lengths[begin:end], dtype=np.int64)
    tokens: Int64Array = np.asarray(source.tokens[first : first + int(lengths.sum())], dtype=np.int64)
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        bad = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise UsageError(
            f"{source.prefix}.bin contains the token id {bad}; the tokenizer has the ids 0 to {vocab_size - 1}:"
            " give the tokenizer that the data was made with"
        )
    return np.split(tokens, np.cumsum(lengths)[:-1])


def hashed_uniform(keys: Int64Array, *salt: int) -> npt.NDArray[np.float64]:
    """A uniform number in [0, 1) for each key, a function of key and salt.

    The hash is splitmix64 (Steele et al. 2014, figure 17), so all spans of an epoch are drawn without a generator.

    Args:
        keys: non-negative, int64 ``[n]``.
        salt: further keys.

    Returns:
        float64 ``[n]``.
    """
    # uint64 products wrap around without a warning in arrays; the constants are reduced as Python integers first.
    state = keys.astype(np.uint64)
    for each in (*salt, 0x5EED):
        state = state + np.uint64((each + 1) * 0x9E3779B97F4A7C15 % 2**64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    # The 53 highest bits: float64 represents each of these numbers exactly, and none is rounded up to 1.
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


def epoch_spans(
    source: IndexedDataset,
    documents: tuple[int, int],
    settings: SpanSettings,
    epoch: int,
    title_tokens: Int64Array | None = None,
) -> Arrays:
    """The spans of one epoch, document by document: int64 arrays ``begins``, ``ends`` and ``targets``.

    All documents are split in parallel, one span of each per iteration, so that the number of iterations is that of the
    spans of the longest document.

    Args:
        source: the data set.
        documents: the documents ``[begin, end)`` of the split.
        settings: how documents are split.
        epoch: number of the epoch.
        title_tokens: tokens of each document's title, which shorten its spans; int64 ``[documents of the data set]``.
    """
    low, high = documents
    first, last = int(source.documents[low]), int(source.documents[high])
    lengths = np.asarray(source.lengths[first:last], dtype=np.int64)
    until = np.cumsum(lengths)
    begin_of = np.asarray(source.documents[low:high], dtype=np.int64) - first
    end_of = np.asarray(source.documents[low + 1 : high + 1], dtype=np.int64) - first
    longs = np.concatenate([[0], np.cumsum(lengths > MAX_SENTENCE_TOKENS)])
    count = end_of - begin_of
    usable = (count >= settings.min_sentences) & ((longs[end_of] == longs[begin_of]) | (count == 1))
    at, end = begin_of[usable], end_of[usable]
    reserved = np.zeros(len(at), dtype=np.int64) if title_tokens is None else title_tokens[low:high][usable]
    begins, ends, targets = [], [], []
    while len(at):
        target = span_targets(at + first, settings, epoch) - reserved
        before = until[at] - lengths[at]
        reached = np.searchsorted(until, before + target, side="left") + 1
        stop = np.maximum(reached, at + settings.min_sentences)
        # A document never ends with a span of too few sentences.
        stop = np.where(stop > end - settings.min_remaining, end, stop)
        begins.append(at)
        ends.append(stop)
        targets.append(target)
        unfinished = stop < end
        at, end, reserved = stop[unfinished], end[unfinished], reserved[unfinished]
    if not begins:
        empty = np.zeros(0, dtype=np.int64)
        return {"begins": empty, "ends": empty, "targets": empty}
    joined = [np.concatenate(parts) for parts in (begins, ends, targets)]
    # Back to the order of the documents: the loop above lists the first span of each document, then the second ones.
    order = np.argsort(joined[0], kind="stable")
    return {
        "begins": joined[0][order] + first,
        "ends": joined[1][order] + first,
        "targets": joined[2][order],
    }


def span_targets(starts: Int64Array, settings: SpanSettings, epoch: int) -> Int64Array:
    """Target length of the span that begins at each start, in tokens, int64 ``[n]``.

    Args:
        starts: first sequence of each span, int64 ``[n]``.
        settings: how documents are split.
        epoch: number of the epoch.
    """
    full = np.full(len(starts), settings.tokens, dtype=np.int64)
    if settings.short_probability == 0 or settings.tokens <= 2:
        return full
    key = (settings.seed, settings.split_index, epoch)
    is_short = hashed_uniform(starts, *key, 0) < settings.short_probability
    drawn = hashed_uniform(starts, *key, 1)
    return np.where(is_short, 2 + (drawn * (settings.tokens - 1)).astype(np.int64), full)


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.astype(np.int32) if not len(array) or int(array.max()) < 2**31 else array


def build_sentence_spans(
    request: SplitRequest, settings: SpanSettings, titles: IndexedDataset | None = None
) -> SentenceSpans:
    """Build the spans of a split, over the epochs that they need.

    Args:
        request: which samples.
        settings: how documents are split.
        titles: a sequence for each document; its tokens shorten the document's spans.

    Raises:
        UsageError: an epoch has fewer spans than a batch.
    """
    source, documents = request.source, request.documents
    title_tokens = None if titles is None else np.asarray(titles.lengths, dtype=np.int64)

    def build() -> Arrays:
        """The arrays of a ``SentenceSpans``, over whole epochs, cut to the number of samples.

        Raises:
            UsageError: an epoch has fewer spans than a batch.
        """
        epochs: list[Arrays] = []
        samples = 0
        while samples < max(1, request.num_samples):
            spans = epoch_spans(source, documents, settings, len(epochs), title_tokens)
            count = len(spans["begins"])
            if count < max(1, request.batch_size):
                raise _too_few_samples(request, settings, count)
            order = permutation(count, settings.seed, request.split_index, len(epochs), _SAMPLES)
            epochs.append({name: array[order] for name, array in spans.items()})
            samples += count
        return {
            name: _narrow(np.concatenate([spans[name] for spans in epochs])[: request.num_samples])
            for name in ("begins", "ends", "targets")
        }

    cache_key = {
        "kind": "sentences",
        "version": VERSION,
        **index_identity(source.prefix),
        "sequences": len(source.lengths),
        "documents": list(documents),
        "samples": request.num_samples,
        **asdict(settings),
    }
    if titles is not None:
        cache_key |= {f"titles_{name}": value for name, value in index_identity(titles.prefix).items()}
    return SentenceSpans(**cached_arrays(request.cache, cache_key, build))


def _too_few_samples(request: SplitRequest, settings: SpanSettings, samples: int) -> UsageError:
    source, (begin, end) = request.source, request.documents
    sentences = len(source.lengths) / max(1, source.num_documents)
    hint = ""
    if settings.min_sentences > sentences:
        hint = (
            f"; its documents have {sentences:.1f} sequences on average, and a sample needs {settings.min_sentences}:"
            " make it with dynmo-prep binarize --split-sentences"
        )
    return UsageError(
        f"the {request.split} split of {source.prefix} is too small: {end - begin:,} documents make {samples:,}"
        f" samples of {settings.tokens} tokens, and a batch needs {max(1, request.batch_size):,}; add text, lower the"
        " batch size or change --split" + ("" if request.split == "train" else ", or give --eval-iters 0") + hint
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SentenceDataset(ABC):
    """Samples of one split that are made of consecutive sentences; see ``Dataset``.

    Attributes:
        source: the data set, of one sentence per sequence.
        spans: the sentences of each sample.
        vocabulary: the tokenizer's.
        seq_length: tokens of a sample, with special tokens and padding.
        seed: seed of the run.
        split_index: number of the split.
    """

    source: IndexedDataset
    spans: SentenceSpans
    vocabulary: Vocabulary
    seq_length: int
    seed: int
    split_index: int

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """Columns of a row."""

    @abstractmethod
    def fill(self, row_C: Int64Array, index: int) -> None:
        """Write sample ``index`` to a row of zeros, int64 ``[C]``."""

    def __len__(self) -> int:
        return len(self.spans)

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Rows of several samples, int64 ``[N, C]``; ``indices`` are sample numbers, ``[N]``."""
        requested = np.asarray(indices, dtype=np.int64)
        rows_NC = np.zeros((len(requested), self.num_columns), dtype=np.int64)
        for row_C, index in zip(rows_NC, requested.tolist(), strict=True):
            self.fill(row_C, index)
        return rows_NC

    def sentences(self, index: int) -> list[Int64Array]:
        """Token ids of the sentences of the sample ``index``, int64 ``[length]`` each."""
        return sentence_tokens(
            self.source, int(self.spans.begins[index]), int(self.spans.ends[index]), self.vocabulary.size
        )

    def token_ranges(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """See ``Dataset``; ``indices`` are sample numbers, ``[N]``."""
        return self.spans.token_ranges(self.source, indices)
