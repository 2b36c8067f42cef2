"""Random numbers by hash: their statistics, what they depend on, and the dropout that uses them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dynmo_train.models.attention.self_attention import SelfAttention
from dynmo_train.models.layers.feed_forward import Mlp
from dynmo_train.parallel.random_stream import (
    ItemStream,
    StreamKeys,
    active_stream,
    drawing_from,
    draws_from_generator,
    hash_words,
    item_dropout,
    normal,
    shared_normal,
)

CPU = torch.device("cpu")
NAMES = ("layers.0.attention", "layers.0.mlp", "head")


def keys(seed: int = 1234, step: int = 7, microbatches: range = range(20, 28), names=NAMES) -> StreamKeys:
    made = StreamKeys(seed, names, CPU)
    made.begin_step(step, microbatches)
    return made


def words(count: int = 1 << 16, *, microbatch: int = 20, **changes) -> torch.Tensor:
    return ItemStream(keys(**changes).key(microbatch, 0)).next_words(count)


def mask_of(p: float, shape=(1024, 1024), *, key: torch.Tensor | None = None, draws: int = 0) -> torch.Tensor:
    stream = ItemStream(keys().key(20, 0) if key is None else key)
    stream.draws = draws
    with drawing_from(stream):
        return item_dropout(torch.ones(shape), p, True) != 0


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard deviations of the correlation of independent samples."""
    a, b = a.double().flatten(), b.double().flatten()
    product = ((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std())
    return float(product) * math.sqrt(a.numel())


def chi_square(counts: torch.Tensor) -> float:
    """Chi-square of equal expected counts, in standard deviations from its mean."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def test_hash_is_that_of_splitmix64():
    """The first outputs of SplitMix64 with seed 1234567, as published with its reference code."""
    counters = torch.arange(1, 6) * (0x9E3779B97F4A7C15 - (1 << 64)) + 1234567
    expected = (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    )
    assert [int(word) % (1 << 64) for word in hash_words(counters)] == list(expected)


@pytest.mark.parametrize("changes", [{"seed": 1235}, {"step": 8}, {"microbatch": 21}, {"names": NAMES[1:]}])
def test_words_depend_on_seed_step_microbatch_and_item(changes):
    assert not (words() == words(**changes)).any()


def test_keys_do_not_depend_on_other_items_or_microbatches():
    """The same item and microbatch in another stage, replica and batch size."""
    there = keys(microbatches=range(24, 26), names=(NAMES[2], NAMES[0]))
    for microbatch in (24, 25):
        assert torch.equal(there.key(microbatch, 1), keys().key(microbatch, 0))
        assert torch.equal(there.key(microbatch, 0), keys().key(microbatch, 2))


def test_keys_of_many_items_microbatches_and_steps_are_distinct():
    names = [f"layers.{number}.mlp" for number in range(64)]
    found = [torch.stack(keys(step=step, microbatches=range(64), names=names)._keys) for step in range(1, 9)]
    whole = torch.cat(found)
    assert len(torch.unique(whole[:, 0])) == len(torch.unique(whole[:, 1])) == len(whole) == 64 * 64 * 8


@pytest.mark.parametrize("bits", [8, 16])
def test_words_are_uniform_in_each_part(bits):
    drawn = words(1 << 20)
    for begin in range(0, 64, bits):
        counts = torch.bincount((drawn >> begin) & ((1 << bits) - 1), minlength=1 << bits).double()
        assert abs(chi_square(counts)) < 5, f"bits {begin} to {begin + bits}"


def test_words_at_sequential_positions_are_independent():
    """Pairs of neighboring 16-bit numbers fill the plane evenly; so do numbers a row apart."""
    numbers = words(1 << 20).view(torch.int16).int() + (1 << 15)
    for lag in (1, 2, 3, 4, 5, 1024):
        pairs = (numbers[:-lag] >> 10) * 64 + (numbers[lag:] >> 10)
        assert abs(chi_square(torch.bincount(pairs, minlength=4096).double())) < 5, lag


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_dropout_rate_is_the_probability(p):
    mask = mask_of(p)
    assert abs(float(mask.double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / mask.numel()) + 2**-17


@pytest.mark.parametrize("other", ["step", "microbatch", "item", "draw", "scope"])
def test_masks_of_different_places_are_independent(other):
    made = keys()
    key = {"step": keys(step=8).key(20, 0), "microbatch": made.key(21, 0), "item": made.key(20, 1)}
    again = mask_of(0.3, key=key.get(other), draws=int(other == "draw"))
    if other == "scope":
        stream = ItemStream(made.key(20, 0))
        stream.scope = 1
        with drawing_from(stream):
            again = item_dropout(torch.ones(1024, 1024), 0.3, True) != 0
    first = mask_of(0.3)
    assert abs(correlation(first, again)) < 5
    # Also shifted against one another: no stream is a part of another one.
    for shift in (1, 4, 1024, 4097):
        assert abs(correlation(first.flatten()[shift:], again.flatten()[:-shift])) < 5


def test_masks_of_rows_and_columns_vary_as_independent_ones():
    counts = mask_of(0.25).double()
    for dim in (0, 1):
        variance = float(counts.sum(dim).var()) / (1024 * 0.25 * 0.75)
        assert 0.8 < variance < 1.2


def test_dropout_scales_gradients_by_the_mask():
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    stream = ItemStream(keys().key(20, 0))
    with drawing_from(stream):
        y = item_dropout(x, 0.4, True)
    mask = y != 0
    scale = 65536 / (65536 - round(0.4 * 65536))
    assert torch.equal(y, torch.where(mask, x * scale, 0.0))
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, mask.double() * scale)
    assert 0 < int(mask.sum()) < 35


def test_dropout_repeats_in_a_recomputation_and_differs_between_draws():
    x = torch.ones(64, 64, requires_grad=True)
    outputs = []

    def run(x):
        with drawing_from(ItemStream(keys().key(20, 0))):
            both = item_dropout(x, 0.5, True), item_dropout(x, 0.5, True)
        outputs.extend(each.detach() for each in both)
        return both[0] * both[1]

    checkpoint(run, x, use_reentrant=False).sum().backward()
    first, second, again, _ = (*outputs, None)[:4]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(x.grad, 2 * first * second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropout_has_the_mask_of_its_key_in_any_dtype(dtype):
    with drawing_from(ItemStream(keys().key(20, 0))):
        y = item_dropout(torch.ones(33, 7, dtype=dtype), 0.5, True)
    assert y.dtype == dtype
    assert torch.equal(y != 0, mask_of(0.5, (33, 7)))


def test_dropout_without_training_or_rate_returns_its_input():
    x = torch.ones(4)
    stream = ItemStream(keys().key(20, 0))
    with drawing_from(stream):
        assert item_dropout(x, 0.5, False) is x
        assert item_dropout(x, 0.0, True) is x
        assert float(item_dropout(torch.ones(1 << 18), 1.0, True).count_nonzero()) < 100
    assert stream.draws == 1


def test_dropout_outside_of_items_draws_from_the_generator():
    torch.manual_seed(3)
    expected = F.dropout(torch.ones(64), 0.5)
    torch.manual_seed(3)
    assert active_stream() is None
    assert torch.equal(item_dropout(torch.ones(64), 0.5, True), expected)


def test_normal_numbers_have_the_moments_of_a_normal_distribution():
    with drawing_from(ItemStream(keys().key(20, 0))):
        drawn = normal((512, 1024), CPU).double()
    assert drawn.dtype == torch.float64
    assert abs(float(drawn.mean())) < 5 / math.sqrt(drawn.numel())
    assert abs(float(drawn.var()) - 1) < 5 * math.sqrt(2 / drawn.numel())
    assert abs(float((drawn**4).mean()) - 3) < 5 * math.sqrt(96 / drawn.numel())
    assert torch.isfinite(drawn).all()
    assert float(drawn.abs().max()) > 4


def test_drawing_from_restores_the_outer_stream_after_an_error():
    outer = ItemStream(keys().key(20, 0))
    with drawing_from(outer):
        with pytest.raises(ValueError, match="inside"), drawing_from(None):
            raise ValueError("inside")
        assert active_stream() is outer
    assert active_stream() is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_dropout_has_the_bits_of_plain_one_in_one_graph():
    compiled = torch.compile(item_dropout, fullgraph=True, dynamic=False, backend="aot_eager")
    made, x = keys(), torch.randn(16, 16)
    torch._dynamo.utils.counters.clear()
    for microbatch in (20, 21, 22):
        outputs = []
        for function in (item_dropout, compiled):
            stream = ItemStream(made.key(microbatch, 0))
            with drawing_from(stream):
                outputs.append(function(x, 0.25, True))
            assert stream.draws == 1
        assert torch.equal(*outputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Foreign(nn.Module):
    """A module of another package."""


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Foreign(), True),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.LayerNorm(2)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
    ],
)
def test_items_that_may_draw_from_the_generator_are_found(module, expected):
    assert draws_from_generator(module) == expected


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_attention_with_dropout_draws_from_the_generator(rate):
    options = {"width": 8, "norm": nn.Identity(), "device": CPU, "dropout": 0.1}
    assert draws_from_generator(SelfAttention(heads=2, attention_dropout=rate, **options)) == (rate > 0)
    assert not draws_from_generator(Mlp(inner=8, activation="gelu", **options))


def test_shared_numbers_are_equal_on_tensor_ranks_that_draw_others():
    drawn = []
    for scope in (1, 2):
        stream = ItemStream(torch.tensor([3, 4]))
        stream.scope = scope
        with drawing_from(stream):
            drawn.append([normal((8,), CPU), shared_normal((8,), CPU), shared_normal((8,), CPU), normal((8,), CPU)])
        assert stream.scope == scope
    (own, shared, again, last), (other, same, same_again, other_last) = drawn
    assert torch.equal(shared, same)
    assert torch.equal(again, same_again)
    assert not torch.equal(own, other)
    assert not torch.equal(last, other_last)
    assert len({tuple(each.tolist()) for each in drawn[0]}) == 4
