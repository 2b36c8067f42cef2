"""Samples of conversations: packing, inputs, labels and loss mask, against plain lists."""

from __future__ import annotations

import numpy as np
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.data.chat_dataset import build_chat_dataset, open_mask, pack_best_fit
from dynmo_train.data.gpt_dataset import TokenError
from dynmo_train.data.sample_format import SplitRequest
from tests.tables import table
from tests.unit.dynmo_train.data.test_gpt_dataset import ALL, indexed

T = 8


def conversations(count=40, *, seed=0, longest=14):
    """Token ids unlike all others, and masks; some have one token, some no token to learn."""
    random = np.random.RandomState(seed)
    ids = iter(range(1, 10_000))
    lengths = [random.randint(1, longest) for _ in range(count)]
    tokens = [[next(ids) for _ in range(length)] for length in lengths]
    masks = [[int(random.rand() < 0.4) for _ in range(length)] for length in lengths]
    return tokens, masks


def build(tokens, masks, **changes):
    options = {"seq_length": T, "seed": 3, "vocab_size": 10_000, "pack": True}
    options |= {name: changes.pop(name) for name in tuple(changes) if name in options}
    request = {"split": "train", "shares": ALL, "num_samples": 50, "batch_size": 4} | changes
    source, mask = indexed([[each] for each in tokens]), indexed([[each] for each in masks])
    return build_chat_dataset(SplitRequest(source=source, **request), mask, **options)


def read_back(rows):
    """The (input, label) pairs of each conversation of the samples, and those that are learned."""
    found = []
    for row in rows.reshape(len(rows), 4, T):
        starts = sorted(set(row[2].tolist()))
        for begin, end in zip(starts, [*starts[1:], T], strict=True):
            pairs = list(zip(*row[:, begin:end].tolist(), strict=True))
            if any(ids or labels for ids, labels, _, _ in pairs):
                found.append(pairs)
    return found


def expected(tokens, masks):
    """Each conversation in its places: plain Python."""
    made = []
    for ids, mask in zip(tokens, masks, strict=True):
        ids, mask = ids[: T + 1], mask[: T + 1]
        if any(mask[1:]):
            made.append(list(zip(ids[:-1], ids[1:], mask[1:], strict=True)))
    return made


@pytest.mark.parametrize("pack", [True, False])
def test_epoch_has_each_conversation_once_with_its_labels_and_mask(pack):
    tokens, masks = conversations()
    data = build(tokens, masks, pack=pack)
    per_epoch = len(data.packs)
    for epoch in range(2):
        rows = data.batch(range(epoch * per_epoch, (epoch + 1) * per_epoch))
        found = [[(ids, label, mask) for ids, label, _, mask in pairs] for pairs in read_back(rows)]
        assert sorted(found) == sorted(expected(tokens, masks))
    first, second = data.batch(range(per_epoch)), data.batch(range(per_epoch, 2 * per_epoch))
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, second.tolist()))
    assert not np.array_equal(first, second)
    assert per_epoch < len(expected(tokens, masks)) if pack else per_epoch == len(expected(tokens, masks))


def test_padding_is_a_document_of_its_own_that_is_not_learned():
    rows = build(*conversations(), pack=True).batch(range(10)).reshape(10, 4, T)
    padding = rows[:, 0] == 0
    assert padding.any()
    assert not rows[:, 3][padding].any()
    for row, is_padding in zip(rows, padding, strict=True):
        places = np.flatnonzero(is_padding)
        assert (row[2][places] == places[:1]).all()


def test_samples_depend_on_neither_number_nor_batch():
    tokens, masks = conversations()
    long, short = build(tokens, masks, num_samples=400), build(tokens, masks, num_samples=5)
    numbers = range(4)
    assert np.array_equal(long.batch(numbers), short.batch(numbers))
    assert np.array_equal(long.batch([3, 1]), long.batch(numbers)[[3, 1]])


def test_token_ranges_have_the_tokens_of_the_sample():
    tokens, masks = conversations()
    data = build(tokens, masks)
    flat = [token for each in tokens for token in each]
    for number, ranges in enumerate(data.token_ranges(range(12))):
        row = data.batch([number]).reshape(4, T)
        stated = [flat[slice(*each["tokens"])] for each in ranges]
        assert [token for ids in stated for token in ids[:-1]] == row[0][: sum(len(ids) - 1 for ids in stated)].tolist()


@table("seed", range(20))
def test_packing_fits_and_wastes_little(seed):
    random = np.random.RandomState(seed)
    lengths = random.randint(1, 33, 200)
    packs = pack_best_fit(lengths, 32)
    sums = [int(lengths[packs[number]].sum()) for number in range(len(packs))]
    assert sorted(packs.members.tolist()) == list(range(200))
    assert max(sums) <= 32
    # No two samples could be one: the rule of every fit.
    assert sorted(sums)[0] + sorted(sums)[1] > 32
    assert len(packs) <= 11 / 9 * -(-int(lengths.sum()) // 32) + 1


def slow_best_fit(lengths, capacity):
    """Best-fit decreasing over all open samples."""
    samples = []
    for member in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        rooms = [capacity - sum(lengths[each] for each in sample) for sample in samples]
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[member]]
        if fitting:
            samples[min(fitting, key=lambda number: rooms[number])].append(member)
        else:
            samples.append([member])
    return samples


@table("seed", range(10))
def test_packing_has_the_samples_of_the_plain_rule(seed):
    lengths = np.random.RandomState(seed).randint(1, 17, 60).tolist()
    packs = pack_best_fit(lengths, 16)
    sums = sorted(sum(lengths[each] for each in packs[number]) for number in range(len(packs)))
    assert sums == sorted(sum(lengths[each] for each in sample) for sample in slow_best_fit(lengths, 16))


def test_mask_of_another_data_set_is_refused():
    tokens, masks = conversations()
    with pytest.raises(UsageError, match="is not the loss mask of"):
        build(tokens, [[*masks[0], 1], *masks[1:]])


def test_data_set_without_mask_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(UsageError, match="dynmo-prep binarize-chat"):
        open_mask(str(tmp_path / "data"))


def test_too_few_conversations_are_refused():
    tokens, masks = conversations(3)
    with pytest.raises(UsageError, match="conversations make"):
        build(tokens, masks, batch_size=64)


def test_conversations_with_nothing_to_learn_are_refused():
    with pytest.raises(UsageError, match="0 conversations"):
        build([[1, 2], [3], []], [[1, 0], [1], []])


def test_id_outside_the_vocabulary_is_refused():
    tokens, masks = conversations()
    with pytest.raises(TokenError, match="vocabulary has the ids 0 to 9"):
        build(tokens, masks, vocab_size=10).batch(range(8))
