"""BERT's and T5's samples: masked share, whole words, segments, spans; a sample is a function of its number."""

from __future__ import annotations

import numpy as np
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.data.bert_dataset import COLUMNS, BertDataset, bert_tensors, split_segments, truncate_segments
from dynmo_train.data.masking import choose_spans, masked_positions, sample_random, word_bounds
from dynmo_train.data.sentence_spans import SentenceSpans
from dynmo_train.data.t5_dataset import T5Dataset, corrupt_spans, t5_tensors
from dynmo_train.data.vocabulary import make_vocabulary
from dynmo_train.formats.indexed import IndexedDataset

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = {
    name: number for number, name in enumerate(SPECIAL + [f"w{n}" for n in range(60)] + [f"##p{n}" for n in range(35)])
}
VOCABULARY = make_vocabulary("made", WORDS, len(WORDS))
PAD, _, CLS, SEP, MASK = range(5)


def source(count: int = 400) -> tuple[IndexedDataset, SentenceSpans]:
    """Sentences of 3 to 20 tokens, five in a sample of 64 tokens."""
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
    return indexed, SentenceSpans(begins=begins, ends=begins + 5, targets=np.full(len(begins), 61))


def bert_dataset(**changes) -> BertDataset:
    indexed, spans_ = source()
    options = {"seq_length": 64, "is_pair": True, "mask_prob": 0.15, "whole_words": True}
    options |= {"seed": 5, "split_index": 0}
    return BertDataset(source=indexed, spans=spans_, vocabulary=VOCABULARY, **(options | changes))


def t5_dataset(**changes) -> T5Dataset:
    indexed, spans_ = source()
    options = {"seq_length": 64, "decoder_seq_length": 24, "mask_prob": 0.15, "whole_words": True}
    options |= {"seed": 5, "split_index": 0}
    sentinels = VOCABULARY.sentinels(20)
    options |= {"sentinels": sentinels} | changes
    return T5Dataset(source=indexed, spans=spans_, vocabulary=VOCABULARY, **options)


def test_word_bounds_join_continuations_and_skip_special_tokens():
    special = np.array([1, 0, 0, 0, 1, 0, 0, 1], dtype=bool)
    continues = np.array([0, 0, 1, 0, 0, 1, 1, 0], dtype=bool)
    begins, ends = word_bounds(special, continues)
    assert list(zip(begins.tolist(), ends.tolist(), strict=True)) == [(1, 3), (3, 4), (5, 7)]


def test_choose_spans_fit_the_budget_and_do_not_overlap():
    begins, ends = [0, 1, 3, 4, 5], [1, 3, 4, 5, 6]
    assert choose_spans([1, 3, 0], [1, 3, 1, 3, 1], begins, ends, 3) == [(1, 3)]
    assert choose_spans([1, 3, 0], [1, 1, 1, 3, 1], begins, ends, 3) == [(1, 2), (3, 4)]
    assert choose_spans([0, 1, 2, 3, 4], [3, 3, 3, 3, 3], begins, ends, 100) == [(0, 3), (3, 5)]


def test_masked_positions_are_the_share_and_at_least_one():
    random = sample_random(1, 0, 0)
    special, continues = np.zeros(400, dtype=bool), np.zeros(400, dtype=bool)
    counts = [len(masked_positions(random, special, continues, 0.15)) for _ in range(50)]
    assert set(counts) == {60}
    assert len(masked_positions(random, special[:3], continues[:3], 0.15)) == 1


def test_segments_are_split_anywhere_and_swapped_by_chance():
    sentences = [np.array([number]) for number in range(4)]
    cuts = {tuple(map(len, split_segments(sample_random(0, 0, n), sentences)[:2])) for n in range(60)}
    assert cuts == {(1, 3), (2, 2), (3, 1)}
    for number in range(20):
        first, second, swapped = split_segments(sample_random(0, 0, number), sentences)
        assert (first[0] > second[0]) == swapped


def test_truncate_segments_shortens_the_longer_one():
    first, second = truncate_segments(sample_random(0, 0, 1), np.arange(50), np.arange(100, 110), 30)
    assert (len(first), len(second)) == (20, 10)
    assert np.array_equal(np.diff(first), np.ones(19))
    assert first[0] > 0


def test_bert_sample_is_well_formed_and_a_function_of_its_number():
    data = bert_dataset()
    rows = data.batch(range(60))
    np.testing.assert_array_equal(rows[[40, 7]], bert_dataset().batch([40, 7]))
    tensors = {name: tensor.numpy() for name, tensor in bert_tensors(rows).items()}
    tokens = data.source.tokens
    replaced = unchanged = other = 0
    for index in range(60):
        ids, types, mask, labels, loss_mask = (tensors[name][index] for name in COLUMNS)
        size = int(mask.sum())
        true = np.where(loss_mask == 1, labels, ids)
        assert mask[:size].all()
        assert (ids[size:] == PAD).all()
        assert true[0] == CLS
        assert (true[:size] == SEP).sum() == 2
        assert true[size - 1] == SEP
        border = int(np.flatnonzero(true == SEP)[0])
        assert types[: border + 1].sum() == 0
        assert types[border + 1 : size].all()
        assert loss_mask.sum() <= max(1, round(size * 0.15))
        assert not loss_mask[[0, border, size - 1]].any()
        # A token that continues a word is masked with the token before it.
        inner = VOCABULARY.continues[true] & (np.roll(true, 1) != SEP) & (np.roll(true, 1) != CLS)
        assert (loss_mask[1:size][inner[1:size]] == loss_mask[: size - 1][inner[1:size]]).all()
        first, second = true[1:border], true[border + 1 : size - 1]
        if tensors["order"][index]:
            first, second = second, first
        text = tokens[data.source.starts[index * 5] : data.source.starts[index * 5 + 5]]
        words = " ".join(map(str, text))
        assert " ".join(map(str, first)) in words
        assert " ".join(map(str, second)) in words
        masked = loss_mask == 1
        replaced += (ids[masked] == MASK).sum()
        unchanged += (ids[masked] == labels[masked]).sum()
        other += ((ids[masked] != MASK) & (ids[masked] != labels[masked])).sum()
    total = replaced + unchanged + other
    assert 0.7 < replaced / total < 0.9
    assert 0.04 < unchanged / total < 0.18
    assert 0.04 < other / total < 0.18


def test_bert_sample_of_one_segment_has_one_type():
    tensors = bert_tensors(bert_dataset(is_pair=False, whole_words=False).batch(range(5)))
    assert not tensors["types"].any()
    assert not tensors["order"].any()


def test_corrupt_spans_moves_spans_behind_sentinels():
    encoder, decoder = corrupt_spans(np.array([1, 2, 3, 4]), [(1, 3)], [90, 91])
    assert encoder.tolist() == [1, 90, 4]
    assert decoder.tolist() == [90, 2, 3]


def test_t5_encoder_and_decoder_together_give_the_text():
    data = t5_dataset()
    rows = data.batch(range(60))
    tensors = {name: tensor.numpy() for name, tensor in t5_tensors(rows, 64).items()}
    sentinels = set(data.sentinels)
    for index in range(60):
        read = tensors["encoder_ids"][index][tensors["encoder_attention_mask"][index]].tolist()
        size = int(tensors["loss_mask"][index].sum())
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


def test_t5_short_decoder_has_fewer_spans():
    tensors = t5_tensors(t5_dataset(decoder_seq_length=6).batch(range(60)), 64)
    assert tensors["loss_mask"].sum(1).max() <= 6
    few = t5_tensors(t5_dataset(sentinels=[100]).batch(range(60)), 64)
    assert (few["encoder_ids"] == 100).sum(1).max() == 1


def test_vocabulary_without_the_special_tokens_is_refused():
    with pytest.raises(UsageError, match=r"cls \(\[CLS\].*mask"):
        make_vocabulary("made", {"a": 0}, 1).special("cls", "mask")


def test_make_vocabulary_detects_marks_of_three_tokenizers():
    assert make_vocabulary("m", {"a": 0, "##b": 1}, 2).continues.tolist() == [False, True]
    assert make_vocabulary("m", {"\u2581a": 0, "b": 1, "</s>": 2}, 3).continues.tolist() == [False, True, False]
    assert not make_vocabulary("m", {"a": 0, "b": 1}, 2).continues.any()
    assert make_vocabulary("m", {"<extra_id_0>": 0, "b": 1}, 2).sentinels(1) == [0]
    assert make_vocabulary("m", {"b": 0}, 1).sentinels(2) == [1, 2]


def test_token_id_beyond_the_vocabulary_is_refused():
    data = bert_dataset()
    data.source.tokens[:] = 200
    with pytest.raises(UsageError, match="token id 200"):
        data.batch([0])
