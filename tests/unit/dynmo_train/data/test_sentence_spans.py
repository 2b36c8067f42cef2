"""Spans of sentences: the vectorized implementation compared with Megatron's loop."""

from __future__ import annotations

import numpy as np
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.data import sentence_spans
from dynmo_train.data.sample_format import SplitRequest
from dynmo_train.data.sentence_spans import SpanSettings, build_sentence_spans, epoch_spans, hashed_uniform
from dynmo_train.formats.indexed import IndexedDataset

SETTINGS = SpanSettings(tokens=40, min_sentences=2, short_probability=0.3, seed=7, split_index=0)


def source_of(documents: list[list[int]]) -> IndexedDataset:
    """A data set of documents given by the lengths of their sentences."""
    lengths = np.array([length for document in documents for length in document], dtype=np.int32)
    return IndexedDataset(
        prefix="made",
        tokens=np.arange(lengths.sum(), dtype=np.int32) % 50,
        lengths=lengths,
        starts=np.cumsum(lengths, dtype=np.int64) - lengths,
        documents=np.cumsum([0] + [len(document) for document in documents]).astype(np.int64),
    )


def random_source(count: int, seed: int = 0) -> IndexedDataset:
    random = np.random.default_rng(seed)
    return source_of([random.integers(1, 30, random.integers(0, 25)).tolist() for _ in range(count)])


def plain_spans(source, settings, epoch):
    """Megatron's loop over the sentences."""
    found = []
    for first, last in zip(source.documents, source.documents[1:], strict=False):
        sizes = source.lengths[first:last]
        if last - first < settings.min_sentences or (
            last - first > 1 and sizes.max() > sentence_spans.MAX_SENTENCE_TOKENS
        ):
            continue
        begin, target = int(first), None
        length = count = 0
        for sentence in range(first, last):
            if target is None:
                [target] = sentence_spans.span_targets(np.array([begin]), settings, epoch)
            length, count = length + int(source.lengths[sentence]), count + 1
            remaining = last - sentence - 1
            if (length >= target and remaining > 1 and count >= settings.min_sentences) or remaining == 0:
                found.append((begin, sentence + 1, int(target)))
                begin, target, length, count = sentence + 1, None, 0, 0
    return found


@pytest.mark.parametrize("min_sentences", [1, 2])
def test_epoch_spans_equal_the_plain_loop(min_sentences):
    settings = SpanSettings(tokens=40, min_sentences=min_sentences, short_probability=0.3, seed=7, split_index=0)
    source = random_source(200)
    for epoch in (0, 1):
        fast = epoch_spans(source, (0, 200), settings, epoch)
        found = list(zip(*(fast[name].tolist() for name in ("begins", "ends", "targets")), strict=True))
        assert found == plain_spans(source, settings, epoch)
        assert len({target for _, _, target in found}) > 10


def test_document_with_a_long_sentence_is_skipped():
    source = source_of([[10, 600, 10], [10, 10, 10, 10]])
    assert epoch_spans(source, (0, 2), SETTINGS, 0)["begins"].tolist()[0] == 3


def test_short_targets_have_the_given_probability():
    drawn = hashed_uniform(np.arange(100_000), 1, 2, 3)
    assert 0.29 < (drawn < 0.3).mean() < 0.31
    assert not np.array_equal(drawn, hashed_uniform(np.arange(100_000), 1, 2, 4))
    never = SpanSettings(tokens=40, min_sentences=2, short_probability=0.0, seed=7, split_index=0)
    assert set(epoch_spans(random_source(50), (0, 50), never, 0)["targets"].tolist()) == {40}


def build(source, num_samples, cache=None):
    shares = (0.8, 0.2, 0.0)
    request = SplitRequest(
        source=source, split="train", shares=shares, num_samples=num_samples, batch_size=8, cache=cache
    )
    return build_sentence_spans(request, SETTINGS)


def test_longer_run_begins_with_the_samples_of_a_shorter_one():
    source = random_source(100)
    short, long = build(source, 50), build(source, 3000)
    for name in ("begins", "ends", "targets"):
        np.testing.assert_array_equal(getattr(short, name), getattr(long, name)[:50])
    assert len(long) == 3000
    assert long.ends.max() <= source.documents[80]


def test_token_ranges_are_those_of_the_sentences():
    source = random_source(40)
    spans = build(source, 30)
    for index, [piece] in enumerate(spans.token_ranges(source, range(30))):
        begin, end = piece["sequences"]
        assert (begin, end) == (spans.begins[index], spans.ends[index])
        assert piece["tokens"] == [source.starts[begin], source.starts[end - 1] + source.lengths[end - 1]]


def test_spans_are_read_from_the_cache(tmp_path, monkeypatch):
    source = random_source(100)
    monkeypatch.setattr("dynmo_train.data.index_cache.MIN_CACHED_BYTES", 100)
    first = build(source, 500, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(sentence_spans, "epoch_spans", None)
    again = build(source, 500, tmp_path)
    assert isinstance(again.begins, np.memmap)
    np.testing.assert_array_equal(first.begins, again.begins)


def test_too_few_samples_are_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"make 0 samples of 40 tokens.*--split-sentences"):
        build(source_of([[30]] * 20), 10)
