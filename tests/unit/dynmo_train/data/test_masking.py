"""BERT's and T5's samples: shares, whole words, segments, spans, and that a sample depends on its number alone."""

from __future__ import annotations

import numpy as np
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.data.bert_dataset import MaskedDataset, masked_tensors, truncated, two_segments
from dynmo_train.data.masking import choose_runs, positions_to_hide, sample_random, words_of
from dynmo_train.data.sentence_spans import Runs
from dynmo_train.data.t5_dataset import SpanDataset, corrupted, span_tensors
from dynmo_train.data.vocabulary import make_vocabulary
from dynmo_train.formats.indexed import IndexedDataset

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = {
    name: number for number, name in enumerate(SPECIAL + [f"w{n}" for n in range(60)] + [f"##p{n}" for n in range(35)])
}
VOCABULARY = make_vocabulary("made", WORDS, len(WORDS))
PAD, _, CLS, SEP, MASK = range(5)


def source(count: int = 400) -> tuple[IndexedDataset, Runs]:
    """Sentences of 3 to 20 tokens, five in a run of 64 tokens."""
    random = np.random.default_rng(3)
    lengths = random.integers(3, 20, count).astype(np.int32)
    tokens = random.integers(5, 100, lengths.sum()).astype(np.int32)
    indexed = IndexedDataset(
        prefix="made",
        tokens=tokens,
        lengths=lengths,
        starts=np.cumsum(lengths, dtype=np.int64) - lengths,
        documents=np.array([0, count]),
    )
    begins = np.arange(0, count - 5, 5)
    return indexed, Runs(begins=begins, ends=begins + 5, targets=np.full(len(begins), 61))


def masked(**changes) -> MaskedDataset:
    indexed, runs = source()
    options = {"seq_length": 64, "binary": True, "share": 0.15, "whole_words": True, "seed": 5, "part": 0}
    return MaskedDataset(source=indexed, runs=runs, vocabulary=VOCABULARY, **(options | changes))


def spans(**changes) -> SpanDataset:
    indexed, runs = source()
    options = {"seq_length": 64, "answer_length": 24, "share": 0.15, "whole_words": True, "seed": 5, "part": 0}
    sentinels = VOCABULARY.sentinels(20)
    return SpanDataset(
        source=indexed, runs=runs, vocabulary=VOCABULARY, **({"sentinels": sentinels} | options | changes)
    )


def test_words_are_found():
    special = np.array([1, 0, 0, 0, 1, 0, 0, 1], dtype=bool)
    continues = np.array([0, 0, 1, 0, 0, 1, 1, 0], dtype=bool)
    begins, ends = words_of(special, continues)
    assert list(zip(begins.tolist(), ends.tolist(), strict=True)) == [(1, 3), (3, 4), (5, 7)]


def test_runs_are_shortened_to_the_budget_and_never_meet():
    begins, ends = [0, 1, 3, 4, 5], [1, 3, 4, 5, 6]
    assert choose_runs([1, 3, 0], [1, 3, 1, 3, 1], begins, ends, 3) == [(1, 3)]
    assert choose_runs([1, 3, 0], [1, 1, 1, 3, 1], begins, ends, 3) == [(1, 2), (3, 4)]
    assert choose_runs([0, 1, 2, 3, 4], [3, 3, 3, 3, 3], begins, ends, 100) == [(0, 3), (3, 5)]


def test_the_share_is_hidden():
    random = sample_random(1, 0, 0)
    special, continues = np.zeros(400, dtype=bool), np.zeros(400, dtype=bool)
    counts = [len(positions_to_hide(random, special, continues, 0.15)) for _ in range(50)]
    assert set(counts) == {60}
    assert len(positions_to_hide(random, special[:3], continues[:3], 0.15)) == 1


def test_segments_are_cut_and_swapped_by_chance():
    sentences = [np.array([number]) for number in range(4)]
    cuts = {tuple(map(len, two_segments(sample_random(0, 0, n), sentences)[:2])) for n in range(60)}
    assert cuts == {(1, 3), (2, 2), (3, 1)}
    for number in range(20):
        first, second, swapped = two_segments(sample_random(0, 0, number), sentences)
        assert (first[0] > second[0]) == swapped


def test_the_longer_segment_is_truncated():
    first, second = truncated(sample_random(0, 0, 1), np.arange(50), np.arange(100, 110), 30)
    assert (len(first), len(second)) == (20, 10)
    assert np.array_equal(np.diff(first), np.ones(19))
    assert first[0] > 0


def test_a_sample_is_well_formed_and_depends_on_its_number_alone():
    data = masked()
    rows = data.batch(range(60))
    np.testing.assert_array_equal(rows[[40, 7]], masked().batch([40, 7]))
    tensors = {name: tensor.numpy() for name, tensor in masked_tensors(rows).items()}
    tokens = data.source.tokens
    changed = kept = other = 0
    for index in range(60):
        ids, types, seen, labels, counts = (tensors[n][index] for n in ("ids", "types", "seen", "labels", "counts"))
        size = int(seen.sum())
        true = np.where(counts == 1, labels, ids)
        assert seen[:size].all()
        assert (ids[size:] == PAD).all()
        assert true[0] == CLS
        assert (true[:size] == SEP).sum() == 2
        assert true[size - 1] == SEP
        border = int(np.flatnonzero(true == SEP)[0])
        assert types[: border + 1].sum() == 0
        assert types[border + 1 : size].all()
        assert counts.sum() <= max(1, round(size * 0.15))
        assert not counts[[0, border, size - 1]].any()
        # A piece that goes on with a word is hidden with the piece before it.
        inner = VOCABULARY.continues[true] & (np.roll(true, 1) != SEP) & (np.roll(true, 1) != CLS)
        assert (counts[1:size][inner[1:size]] == counts[: size - 1][inner[1:size]]).all()
        first, second = true[1:border], true[border + 1 : size - 1]
        if tensors["order"][index]:
            first, second = second, first
        text = tokens[data.source.starts[index * 5] : data.source.starts[index * 5 + 5]]
        words = " ".join(map(str, text))
        assert " ".join(map(str, first)) in words
        assert " ".join(map(str, second)) in words
        hidden = counts == 1
        changed += (ids[hidden] == MASK).sum()
        kept += (ids[hidden] == labels[hidden]).sum()
        other += ((ids[hidden] != MASK) & (ids[hidden] != labels[hidden])).sum()
    total = changed + kept + other
    assert 0.7 < changed / total < 0.9
    assert 0.04 < kept / total < 0.18
    assert 0.04 < other / total < 0.18


def test_without_two_segments_there_is_one_type():
    tensors = masked_tensors(masked(binary=False, whole_words=False).batch(range(5)))
    assert not tensors["types"].any()
    assert not tensors["order"].any()


def test_spans_go_behind_sentinels():
    read, written = corrupted(np.array([1, 2, 3, 4]), [(1, 3)], [90, 91])
    assert read.tolist() == [1, 90, 4]
    assert written.tolist() == [90, 2, 3]


def test_encoder_and_decoder_together_hold_the_text():
    data = spans()
    rows = data.batch(range(60))
    tensors = {name: tensor.numpy() for name, tensor in span_tensors(rows, 64).items()}
    sentinels = set(data.sentinels)
    for index in range(60):
        read = tensors["encoder_ids"][index][tensors["encoder_seen"][index]].tolist()
        size = int(tensors["counts"][index].sum())
        labels = tensors["labels"][index][:size].tolist()
        assert labels[-1] == SEP
        assert tensors["decoder_ids"][index][:size].tolist() == [CLS, *labels[:-1]]
        answers, current = {}, None
        for token in labels[:-1]:
            if token in sentinels:
                current = token
                answers[current] = []
            else:
                answers[current].append(token)
        text = [token for each in read for token in (answers[each] if each in sentinels else [each])]
        begin = data.source.starts[index * 5]
        assert text == data.source.tokens[begin : begin + len(text)].tolist()
        assert list(answers) == data.sentinels[: len(answers)]
        assert sum(map(len, answers.values())) >= 1


def test_a_short_decoder_gets_fewer_spans():
    tensors = span_tensors(spans(answer_length=6).batch(range(60)), 64)
    assert tensors["counts"].sum(1).max() <= 6
    few = span_tensors(spans(sentinels=[100]).batch(range(60)), 64)
    assert (few["encoder_ids"] == 100).sum(1).max() == 1


def test_a_vocabulary_without_the_tokens_is_refused():
    with pytest.raises(UsageError, match=r"cls \(\[CLS\].*mask"):
        make_vocabulary("made", {"a": 0}, 1).special("cls", "mask")


def test_word_marks_of_three_kinds():
    assert make_vocabulary("m", {"a": 0, "##b": 1}, 2).continues.tolist() == [False, True]
    assert make_vocabulary("m", {"\u2581a": 0, "b": 1, "</s>": 2}, 3).continues.tolist() == [False, True, False]
    assert not make_vocabulary("m", {"a": 0, "b": 1}, 2).continues.any()
    assert make_vocabulary("m", {"<extra_id_0>": 0, "b": 1}, 2).sentinels(1) == [0]
    assert make_vocabulary("m", {"b": 0}, 1).sentinels(2) == [1, 2]


def test_ids_beyond_the_vocabulary_are_told():
    data = masked()
    data.source.tokens[:] = 200
    with pytest.raises(UsageError, match="token id 200"):
        data.batch([0])
