"""Samples of a causal language model, compared with a plain implementation on Python lists."""

from __future__ import annotations

import numpy as np
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.data.blend import BlendedDataset
from dynmo_train.data.gpt_dataset import build_gpt_dataset
from dynmo_train.data.sample_format import SplitRequest, split_bounds
from dynmo_train.data.sample_index import permutation, sequences_of
from dynmo_train.formats.indexed import IndexedDataset
from tests.tables import table

ALL = (1.0, 0.0, 0.0)


def indexed(documents, *, gap=0):
    """A data set in memory; ``documents`` are lists of sequences, ``gap`` unused ids lie before each sequence."""
    tokens, lengths, starts, boundaries = [], [], [], [0]
    for document in documents:
        for sequence in document:
            tokens += [0] * gap
            starts.append(len(tokens))
            lengths.append(len(sequence))
            tokens += sequence
        boundaries.append(len(lengths))
    return IndexedDataset(
        prefix="memory",
        tokens=np.array(tokens, np.uint16),
        lengths=np.array(lengths, np.int32),
        starts=np.array(starts, np.int64),
        documents=np.array(boundaries, np.int64),
    )


def corpus(count=13, *, seed=0, gap=0):
    """Documents of one to three sequences of 0 to 9 tokens, each token unlike all others."""
    random = np.random.RandomState(seed)
    ids = iter(range(1, 10_000))
    shape = [[random.randint(0, 10) for _ in range(random.randint(1, 4))] for _ in range(count)]
    return indexed([[[next(ids) for _ in range(length)] for length in document] for document in shape], gap=gap)


def build(source, **changes):
    options = {"seq_length": 5, "seed": 3, "vocab_size": 10_000}
    options |= {name: changes.pop(name) for name in options if name in changes}
    request = {"split": "train", "shares": ALL, "num_samples": 50, "batch_size": 4} | changes
    return build_gpt_dataset(SplitRequest(source=source, **request), **options)


def slow_samples(source, *, seq_length, seed, num_samples, low, high, number):
    """The same samples from plain lists."""
    bodies = [
        [
            int(token)
            for sequence in range(source.documents[document], source.documents[document + 1])
            for token in source.tokens[source.starts[sequence] :][: source.lengths[sequence]]
        ]
        for document in range(low, high)
    ]
    epoch_tokens = sum(map(len, bodies))
    stream = []
    epochs = num_samples * seq_length // epoch_tokens + 3
    for epoch in range(epochs):
        for document in permutation(len(bodies), seed, number, epoch, 0):
            stream += bodies[document]
    starts_by_epoch = [[] for _ in range(epochs)]
    for start in range(0, len(stream), seq_length):
        starts_by_epoch[start // epoch_tokens].append(start)
    samples = []
    for epoch, starts in enumerate(starts_by_epoch):
        order = permutation(len(starts), seed, number, epoch, 1)
        samples += [stream[starts[at] : starts[at] + seq_length + 1] for at in order]
    return samples[:num_samples]


@table("gap", [0, 3])
@table("seq_length", [1, 5, 11])
@table("split", ["train", "valid"])
def test_batch_equals_the_plain_implementation(gap, seq_length, split):
    source = corpus(30, gap=gap)
    shares = (0.5, 0.5, 0.0)
    low, high = (0, 15) if split == "train" else (15, 30)
    data = build(source, split=split, shares=shares, seq_length=seq_length, num_samples=150)
    slow = slow_samples(
        source, seq_length=seq_length, seed=3, num_samples=150, low=low, high=high, number=int(split == "valid")
    )
    assert data.batch(range(150)).tolist() == slow


@pytest.mark.parametrize("gap", [0, 3])
def test_token_ranges_contain_the_tokens_of_each_sample(gap):
    source = corpus(30, gap=gap)
    data = build(source, num_samples=150)
    blended = BlendedDataset(parts=[data, build(source, seed=8)], weights=[2.0, 1.0], length=60)
    for samples, found in ((data, data.token_ranges(range(150))), (blended, blended.token_ranges(range(20, 60)))):
        tokens = samples.batch(range(150) if samples is data else range(20, 60))
        for sample, pieces in zip(tokens.tolist(), found, strict=True):
            assert [id for piece in pieces for id in source.tokens[slice(*piece["tokens"])].tolist()] == sample
            for piece in pieces:
                sequence = piece["sequences"][0]
                begin, end = piece["tokens"]
                assert source.starts[sequence] <= begin < end <= source.starts[sequence] + source.lengths[sequence]


def test_more_samples_begin_with_the_same_samples():
    source = corpus()
    few, many = build(source, num_samples=7), build(source, num_samples=300)
    assert (len(few), len(many)) == (7, 300)
    assert few.batch(range(7)).tolist() == many.batch(range(7)).tolist()


def test_one_epoch_covers_every_token_once():
    source = corpus()
    total = int(source.lengths.sum())
    data = build(source, seq_length=1, num_samples=total)
    assert sorted(data.batch(range(total))[:, 0].tolist()) == list(range(1, total + 1))


def test_another_seed_gives_another_order():
    source = corpus()
    assert build(source, seed=3).batch(range(9)).tolist() != build(source, seed=4).batch(range(9)).tolist()


def test_epochs_are_shuffled_separately():
    source = corpus()
    total = int(source.lengths.sum())
    data = build(source, seq_length=1, num_samples=2 * total)
    first = data.batch(range(total))[:, 0].tolist()
    second = data.batch(range(total, 2 * total))[:, 0].tolist()
    assert sorted(first) == sorted(second)
    assert first != second


def test_splits_do_not_share_documents():
    source = corpus(40)
    tokens = []
    for split in ("train", "valid", "test"):
        data = build(source, split=split, shares=(0.5, 0.25, 0.25), seq_length=2, num_samples=400)
        tokens.append(set(data.batch(range(400)).ravel().tolist()))
    assert not tokens[0] & tokens[1]
    assert not tokens[0] & tokens[2]
    assert not tokens[1] & tokens[2]


@pytest.mark.parametrize(
    ("count", "shares", "bounds"),
    [
        (1000, (0.969, 0.03, 0.001), (0, 969, 999, 1000)),
        (10, (0.8, 0.2, 0.0), (0, 8, 10, 10)),
        (3, (0.5, 0.5, 0.0), (0, 1, 3, 3)),
        (1, (1.0, 0.0, 0.0), (0, 1, 1, 1)),
        (0, (1.0, 0.0, 0.0), (0, 0, 0, 0)),
    ],
)
def test_split_bounds_equal_megatrons(count, shares, bounds):
    assert split_bounds(count, shares) == bounds


@table("count", range(12))
@table("shares", [(0.969, 0.03, 0.001), (1 / 3, 1 / 3, 1 / 3), (0.1, 0.1, 0.8), (0.0, 0.5, 0.5)])
def test_split_bounds_are_in_order_and_complete(count, shares):
    bounds = split_bounds(count, shares)
    assert list(bounds) == sorted(bounds)
    assert (bounds[0], bounds[3]) == (0, count)


def test_permutation_equals_a_stored_one():
    assert permutation(8, 1234, 0, 0, 0).tolist() == [1, 7, 0, 5, 2, 3, 6, 4]


def test_sequences_of_documents_follow_their_order():
    documents = np.array([0, 2, 2, 3, 6])
    assert sequences_of(documents, np.array([3, 0, 1])).tolist() == [3, 4, 5, 0, 1]


def test_too_little_text_is_refused():
    with pytest.raises(
        UsageError, match=r"train split of memory is too small: 2 documents with 10 tokens make 1 samples"
    ):
        build(indexed([[[1] * 5], [[2] * 5]]), batch_size=2)
    with pytest.raises(UsageError, match="--eval-iters 0"):
        build(corpus(), split="test", shares=(0.9, 0.1, 0.0))


def test_exactly_one_batch_of_text_is_accepted():
    assert len(build(indexed([[list(range(11))]]), batch_size=2, num_samples=2)) == 2


def test_token_id_beyond_the_vocabulary_is_refused():
    data = build(indexed([[[1, 2, 3, 4, 5, 99, 7, 8, 9, 10, 11]]]), vocab_size=99, batch_size=1, num_samples=20)
    with pytest.raises(UsageError, match="contains the token id 99; the vocabulary has the ids 0 to 98"):
        data.batch(range(20))
