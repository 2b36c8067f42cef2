"""Decoding token by token equals reading the whole text; sampling keeps its promises."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.errors import UsageError
from dynmo_train.models.decoding import Cache, Decoder
from dynmo_train.models.gpt import Gpt, GptShape
from dynmo_train.tasks.generate import complete
from dynmo_train.tasks.sampling import Sampling, next_token

SHAPE = GptShape(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=12,
    vocab_size=23,
    padded_vocab_size=32,
    init_method_std=0.5,
)


def build():
    family = Gpt(SHAPE)
    modules = {item.name: family.build(item.name, torch.device("cpu")) for item in family.items}
    return family, modules


def whole(modules, ids_BT):
    """Logits of every position by the training modules themselves: [B, T, V]."""
    x = ids_BT
    for module in list(modules.values())[:-1]:
        x = module(x)
    return modules["head"].logits(x)


@pytest.mark.parametrize("pieces", [[9], [1] * 9, [4, 1, 3, 1], [2, 7]])
def test_reading_in_pieces_equals_reading_at_once(pieces):
    family, modules = build()
    decoder = Decoder(family, modules, SHAPE.max_position_embeddings)
    ids = torch.randint(23, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = whole(modules, ids)
    cache, read = Cache(), 0
    for piece in pieces:
        logits = decoder.read(ids[:, read : read + piece], cache)
        read += piece
        torch.testing.assert_close(logits, expected[:, read - 1], rtol=1e-5, atol=1e-5)


def test_greedy_text_is_that_of_reading_again_each_time():
    family, modules = build()
    decoder = Decoder(family, modules, SHAPE.max_position_embeddings)
    new, reason = complete(decoder, [3, 1], max_new_tokens=6, eod=None, sampling=Sampling(), seed=0)
    slow = [3, 1]
    with torch.no_grad():
        for _ in range(6):
            slow.append(int(whole(modules, torch.tensor([slow]))[0, -1].argmax()))
    assert (new, reason) == (slow[2:], "length")


def test_text_ends_at_the_last_position_and_at_the_end_of_document():
    family, modules = build()
    decoder = Decoder(family, modules, SHAPE.max_position_embeddings)
    new, reason = complete(decoder, [3, 1], max_new_tokens=99, eod=None, sampling=Sampling(), seed=0)
    assert (len(new), reason) == (11, "positions")
    eod = new[4]
    shorter, reason = complete(decoder, [3, 1], max_new_tokens=99, eod=eod, sampling=Sampling(), seed=0)
    assert (shorter, reason) == (new[: new.index(eod)], "end")


def test_the_seed_fixes_the_draws():
    family, modules = build()
    decoder = Decoder(family, modules, SHAPE.max_position_embeddings)

    def drawn(seed):
        return complete(decoder, [3], max_new_tokens=8, eod=None, sampling=Sampling(temperature=2.0), seed=seed)[0]

    assert drawn(5) == drawn(5)
    assert len({tuple(drawn(seed)) for seed in range(5)}) > 1


def counts(sampling, draws=4000):
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    seen = [next_token(logits, sampling, generator) for _ in range(draws)]
    return [seen.count(token) / draws for token in range(4)]


def test_draws_follow_the_probabilities():
    assert counts(Sampling(temperature=1.0)) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)
    flat = [p**0.5 for p in (0.1, 0.4, 0.2, 0.3)]
    assert counts(Sampling(temperature=2.0)) == pytest.approx([p / sum(flat) for p in flat], abs=0.03)


def test_top_k_and_top_p_cut_the_tail():
    assert counts(Sampling(temperature=1.0, top_k=2)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert counts(Sampling(temperature=1.0, top_p=0.65)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert counts(Sampling(temperature=1.0, top_p=0.75)) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.03)
    assert counts(Sampling(temperature=1.0, top_p=0.01)) == [0, 1, 0, 0]
    assert counts(Sampling(), 3) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.1}, "--top-p"),
    ],
)
def test_values_out_of_range_are_refused(values, flag):
    with pytest.raises(UsageError, match=flag):
        Sampling(**values).check()
    Sampling(temperature=1.0, top_k=5, top_p=1.0).check()
