"""Attention with soft caps and sinks in chunks against all scores at once: values, gradients, memory, compiled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynmo_train.models.attention import eager_attention
from dynmo_train.models.attention.positions import Rotary
from dynmo_train.models.attention.self_attention import SelfAttention
from dynmo_train.parallel.random_stream import ItemStream, drawing_from
from tests.tables import table

B, H, G, T, K = 2, 6, 2, 23, 8
CPU = torch.device("cpu")


def made(tokens=T, keys=T, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, tokens, K), (B, G, keys, K), (B, G, keys, K), (H,))
    return [(torch.randn(shape, generator=generator) * 2).to(dtype).requires_grad_() for shape in shapes]


def reference(q, k, v, sinks, *, scale=None, cap=None, mask=None, causal=False, window=None, factors=1.0):
    """The formula, of all scores at once; ``factors`` multiply the weights of keys."""
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    z = q @ k.transpose(-1, -2) * (K**-0.5 if scale is None else scale)
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    places, found = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None], torch.arange(k.shape[2])
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask
    if causal:
        visible = visible & (found <= places) & (found > places - (window or k.shape[2]))
    z = z.masked_fill(~visible, -math.inf)
    if sinks is None:
        return (z.softmax(-1) * factors) @ v
    with_sink = sinks.view(1, H, 1, 1).expand(*z.shape[:3], 1)
    return (torch.cat([z, with_sink], -1).softmax(-1)[..., :-1] * factors) @ v


PADDING = (torch.arange(T) >= torch.tensor([0, 5])[:, None])[:, None, None] | torch.eye(T, dtype=torch.bool)
CASES = {
    "cap": {"cap": 1.5},
    "causal": {"cap": 1.5, "causal": True, "scale": 0.7},
    "window": {"cap": 1.5, "causal": True, "window": 4},
    "window of one": {"cap": 1.5, "causal": True, "window": 1},
    "mask": {"cap": 0.7, "mask": PADDING},
    "mask, causal": {"cap": 0.7, "mask": PADDING, "causal": True},
    "sinks alone": {"causal": True, "window": 5},
}


@table("chunk", [1, 300, 1 << 20])
@table("has_sinks", [True, False])
@table("case", CASES)
def test_eager_attention_in_chunks_equals_all_scores(monkeypatch, case, has_sinks, chunk):
    monkeypatch.setattr(eager_attention, "CHUNK_SCORES", chunk)
    monkeypatch.setattr(eager_attention, "SHORTEST_CHUNK", 3)
    q, k, v, sinks = made()
    given = [q, k, v, sinks] if has_sinks else [q, k, v]
    ours = eager_attention.eager_attention(q, k, v, sinks_H=sinks if has_sinks else None, **CASES[case])
    theirs = reference(q, k, v, sinks if has_sinks else None, **CASES[case])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    of = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for one, other in zip(torch.autograd.grad(ours, given, of), torch.autograd.grad(theirs, given, of), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-5)


def test_later_queries_are_aligned_to_the_last_key():
    q, k, v, sinks = made(tokens=3, keys=11)
    options = {"cap": 1.2, "causal": True, "window": 4}
    ours = eager_attention.eager_attention(q, k, v, sinks_H=sinks, **options)
    torch.testing.assert_close(ours, reference(q, k, v, sinks, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32(dtype):
    exact, half = made(), made(dtype=dtype)
    options = {"cap": 1.5, "causal": True, "window": 6}
    results = [eager_attention.eager_attention(q, k, v, sinks_H=s, **options) for q, k, v, s in (exact, half)]
    assert results[1].dtype == dtype
    assert (results[1].float() - results[0]).abs().max() < 0.05
    for one, other in zip(
        *(torch.autograd.grad(r.float().square().sum(), g) for r, g in zip(results, (exact, half), strict=True)),
        strict=True,
    ):
        assert torch.linalg.vector_norm(other.float() - one) < 0.03 * torch.linalg.vector_norm(one)


def test_no_tensor_has_the_scores_of_a_long_sequence(monkeypatch):
    monkeypatch.setattr(eager_attention, "CHUNK_SCORES", 4096)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
            nonlocal largest
            result = function(*arguments, **(keywords or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    q, k, v, _ = made(tokens=256, keys=256)
    with Watch():
        for window in (None, 16):
            eager_attention.eager_attention(q, k, v, cap=1.0, causal=True, window=window).sum().backward()
    # Without chunks 2 x 6 x 256 x 256; queries themselves have 2 x 6 x 256 x 8.
    assert largest <= B * H * 256 * K


def attention(**options):
    torch.manual_seed(0)
    module = SelfAttention(
        width=48, heads=H, norm=nn.LayerNorm(48), device=CPU, groups=G, rotary=Rotary(8, 100.0), **options
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


@pytest.mark.parametrize("options", [{"softcap": 0.5, "window": 4}, {"sinks": True}, {"softcap": 0.5, "sinks": True}])
def test_compiled_attention_equals_the_eager_one(options):
    module = attention(**options)
    x = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(2), requires_grad=True)
    expected = module(x)
    expected.square().sum().backward()
    grads = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    compiled = torch.compile(module.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    result = compiled(x)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    for parameter, grad in zip(module.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-4)


def stream(seed=1):
    return ItemStream(torch.tensor([seed, 7], dtype=torch.int64))


@table("chunk", [1, 300, 1 << 20])
@table("has_sinks", [True, False])
@table("case", CASES)
def test_dropout_in_chunks_equals_all_weights(monkeypatch, case, has_sinks, chunk):
    monkeypatch.setattr(eager_attention, "CHUNK_SCORES", chunk)
    monkeypatch.setattr(eager_attention, "SHORTEST_CHUNK", 3)
    q, k, v, sinks = made()
    inputs = [q, k, v, *([sinks] if has_sinks else [])]
    # The numbers of all rows at once; a row is padded to whole words, of four numbers each.
    words = stream().next_words(B * H * T * 6)
    numbers = words.view(torch.int16).view(B, H, T, 24)[..., :T].int() + (1 << 15)
    factors = (numbers >= round(0.25 * (1 << 16))).float() / 0.75
    expected = reference(q, k, v, sinks if has_sinks else None, factors=factors, **CASES[case])
    grad = torch.randn_like(expected)
    references = torch.autograd.grad(expected, inputs, grad)
    with drawing_from(stream()):
        result = eager_attention.eager_attention(
            q, k, v, sinks_H=sinks if has_sinks else None, dropout=0.25, **CASES[case]
        )
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    # After the stream: the backward has the numbers of the forward.
    for got, value in zip(torch.autograd.grad(result, inputs, grad), references, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-4)


def test_dropout_has_its_rate_and_keeps_the_mean():
    q, k = torch.zeros(4, 6, 64, 8), torch.zeros(4, 2, 64, 8)
    v = torch.ones(4, 2, 64, 8)
    with drawing_from(stream()):
        y = eager_attention.eager_attention(q, k, v, sinks_H=torch.zeros(6), dropout=0.25)
        other = eager_attention.eager_attention(q, k, v, sinks_H=torch.zeros(6), dropout=0.25)
    # 64 equal keys and the sink, whose weight goes to no key; the deviation of a query is 0.07, that of the mean 0.002.
    assert abs(y.mean() * 65 / 64 - 1) < 0.01
    assert 0.05 < y[..., 0].std() < 0.1
    # Samples, heads, queries and draws have numbers of their own.
    assert len(y[..., 0].flatten(0, 1).unique(dim=0)) == 24
    assert not torch.equal(y, other)


@pytest.mark.parametrize("options", [{"softcap": 0.5, "window": 4}, {"sinks": True}])
def test_compiled_dropout_equals_the_eager_one(options):
    module = attention(**options, attention_dropout=0.3)
    x = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(2))
    with drawing_from(stream()):
        expected = module(x)
    with drawing_from(stream()):
        compiled = torch.compile(module.forward, fullgraph=True, dynamic=False, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)
    with drawing_from(stream(2)):
        assert not torch.equal(module(x), expected)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
