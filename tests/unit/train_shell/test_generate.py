"""Decoding token by token equals reading the whole text; sampling keeps its promises."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dynmo_train.errors import UsageError
from dynmo_train.models.decoding import Cache, Decoder
from dynmo_train.models.gpt import Gpt, GptShape
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.world import World
from dynmo_train.tasks.generation import Asked, Ending, Generation
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


def engine_of(family, modules):
    """What a generation asks of an engine, with one process."""
    world = World(rank=0, size=1, device=torch.device("cpu"), host="here", dims=ParallelDims())
    precision = SimpleNamespace(compute=torch.float32)
    return SimpleNamespace(
        family=family,
        world=world,
        local_names=tuple(modules),
        held=SimpleNamespace(modules=modules),
        settings=SimpleNamespace(precision=precision),
    )


def complete(prompts, *, most=6, eod=None, stop=(), sampling=None, seeds=None, batch=8, recompute=False):
    family, modules = build()
    generation = Generation(
        engine_of(family, modules),
        max_tokens=SHAPE.max_position_embeddings,
        sampling=sampling or Sampling(),
        ending=Ending(eod=eod, stop=tuple(stop)),
        recompute=recompute,
    )
    asked = [Asked(ids=tuple(ids), most=most, seed=seed) for ids, seed in zip(prompts, seeds or [0] * 99, strict=False)]
    return [(list(answer.ids), answer.reason) for answer in generation.run(asked, batch)]


def slow(prompt, most=6):
    """Greedy, by reading everything again each time."""
    _, modules = build()
    modules = {name: module.eval() for name, module in modules.items()}
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(most):
            ids.append(int(whole(modules, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [[3, 1], [5], [7, 7, 2, 9], [4, 4], [1, 2, 3]]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_greedy_text_is_that_of_reading_again_each_time(batch, recompute):
    assert complete(PROMPTS, batch=batch, recompute=recompute) == [(slow(ids), "length") for ids in PROMPTS]


def test_text_ends_at_the_end_of_document_or_at_what_stops_it():
    whole_text = slow([3, 1], 9)
    eod = whole_text[4]
    cut = whole_text[: whole_text.index(eod)]
    assert complete([[3, 1]], most=9, eod=eod) == [(cut, "end")]
    pair = whole_text[2:4]
    first = next(at for at in range(8) if whole_text[at : at + 2] == pair)
    assert complete([[3, 1], [5]], most=9, stop=pair)[0] == (whole_text[:first], "stop")


def test_the_seed_fixes_the_draws_whatever_shares_the_batch():
    hot = Sampling(temperature=2.0)
    alone = [complete([[3]], sampling=hot, seeds=[seed])[0] for seed in range(5)]
    assert complete([[3]] * 5, sampling=hot, seeds=range(5)) == alone
    assert complete([[3]] * 5, sampling=hot, seeds=range(5), batch=2) == alone
    assert len({tuple(ids) for ids, _ in alone}) > 1


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
