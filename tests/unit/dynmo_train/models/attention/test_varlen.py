"""Padding masks as sequences of variable length: the same outputs for real tokens, and no mask on a device."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dynmo_train.models.attention import self_attention as blocks
from dynmo_train.models.attention import varlen
from dynmo_train.models.attention.cross_attention import CrossAttention
from dynmo_train.models.attention.documents import STARTS, PackedAttention
from dynmo_train.models.attention.positions import RelativeBias
from dynmo_train.models.attention.self_attention import SelfAttention
from dynmo_train.models.attention.varlen import FULL, attend_sequences, has_kernel, padded_offsets, whole_offsets
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.kv_cache import Decoder, DecodingCache

D, H = 32, 4
LLAMA = LlamaShape(
    num_layers=2,
    hidden_size=D,
    ffn_hidden_size=48,
    num_attention_heads=H,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    vocab_size=31,
    padded_vocab_size=32,
    sliding_window=4,
)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()


def plain_varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=FULL, enable_gqa=False):
    """The kernel's definition, one sequence after another."""
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert q1 - q0 <= max_q
        assert k1 - k0 <= max_k
        rows, columns = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)[None]
        distance = rows + (k1 - k0) - (q1 - q0) - columns
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        left, right = window_size
        mask &= (distance <= left) if left >= 0 else True
        mask &= (distance >= -right) if right >= 0 else True
        each = (part.transpose(0, 1) for part in (q[q0:q1], k[k0:k1], v[k0:k1]))
        parts.append(F.scaled_dot_product_attention(*each, mask, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def on_cpu(monkeypatch):
    """Run the path of a device on the CPU, in float32."""
    monkeypatch.setattr(varlen, "_varlen", lambda: plain_varlen)
    varlen._options.cache_clear()
    yield lambda: monkeypatch.setattr(blocks, "has_kernel", lambda *_: True)
    varlen._options.cache_clear()


def made(kind, **options):
    torch.manual_seed(0)
    module = kind(width=D, heads=H, norm=nn.LayerNorm(D), device=torch.device("cpu"), **options)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return module


def test_padded_offsets_are_samples_and_their_padding():
    assert padded_offsets(MASK).tolist() == [0, 4, 6, 12, 12, 13, 18]
    assert padded_offsets(MASK).dtype == torch.int32
    assert whole_offsets(3, 5, MASK.device).tolist() == [0, 5, 5, 10, 10, 15, 15]


def run(module, x, arguments, where):
    """Output and gradients from the tokens that count."""
    x = x.clone().requires_grad_()
    y = module(x, *arguments)
    grads = torch.autograd.grad((y * where[..., None]).square().sum(), [x, *module.parameters()])
    return [y[where], *grads]


def test_padded_self_attention_equals_a_mask_on_real_tokens(on_cpu):
    attention, x = made(SelfAttention, causal=False), torch.randn(3, 6, D)
    expected = run(attention, x, [MASK], MASK)
    on_cpu()
    for one, other in zip(run(attention, x, [MASK], MASK), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_padded_cross_attention_equals_a_mask(on_cpu):
    attention, x, memory = made(CrossAttention), torch.randn(3, 5, D), torch.randn(3, 6, D)
    everywhere = torch.ones(3, 5, dtype=torch.bool)
    expected = run(attention, x, [memory, MASK], everywhere)
    on_cpu()
    for one, other in zip(run(attention, x, [memory, MASK], everywhere), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attend_sequences_grouped_queries_in_a_window(on_cpu, groups):
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, groups, 6, 8), torch.randn(2, groups, 6, 8)
    offsets = torch.tensor([0, 6, 12])
    got = attend_sequences(q, k, v, (offsets, offsets), (6, 6), window=(2, 0))
    mask = torch.ones(6, 6).tril().triu(-2).bool()
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(got, expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_padded_attention_on_a_device_reads_no_mask(kind):
    meta = torch.device("meta")
    norm = nn.LayerNorm(D, device=meta)
    options = {"width": D, "heads": H, "norm": norm, "device": meta}
    attention = SelfAttention(causal=False, **options) if kind == "self" else CrossAttention(**options)
    attention.to(torch.bfloat16)
    x = torch.empty(3, 6, D, device=meta, dtype=torch.bfloat16, requires_grad=True)
    arguments = [] if kind == "self" else [torch.empty_like(x)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(x, *arguments, MASK.to(meta)).sum().backward()
    assert x.grad.shape == x.shape
    names = {event.key for event in profile.key_averages()}
    assert any("varlen" in name for name in names)
    assert not any("scaled_dot_product" in name for name in names)


def test_padded_attention_keeps_its_mask_where_scores_are_needed(monkeypatch):
    """A bias by distance, and selected tokens, have no kernel of variable length."""
    monkeypatch.setattr(blocks, "has_kernel", lambda *_: pytest.fail("asked for the kernel"))
    relative = RelativeBias(8, H, 16, torch.device("cpu"))
    nn.init.zeros_(relative.weight)
    x = torch.randn(3, 6, D)
    made(SelfAttention, causal=False, relative=relative)(x, MASK)
    made(SelfAttention, causal=True)(x)
    made(SelfAttention, causal=False)(x, MASK, positions=torch.arange(6).expand(3, 6))


@pytest.mark.parametrize(
    ("device", "dtype", "width", "dropout", "expected"),
    [
        ("meta", torch.bfloat16, 64, 0.0, True),
        ("meta", torch.float16, 256, 0.0, True),
        ("meta", torch.float32, 64, 0.0, False),
        ("meta", torch.bfloat16, 64, 0.1, False),
        ("meta", torch.bfloat16, 60, 0.0, False),
        ("meta", torch.bfloat16, 264, 0.0, False),
        ("cpu", torch.bfloat16, 64, 0.0, False),
    ],
)
def test_has_kernel_by_device_type_head_and_dropout(device, dtype, width, dropout, expected):
    assert has_kernel(torch.empty(1, 1, 1, width, device=device, dtype=dtype), dropout) == expected


def by_keys(x, window):
    """Which inputs each token's output depends on, bool ``[T, T]``: from the gradients."""
    tokens = x.shape[1]
    return [[max(0, t - window + 1) <= s <= t for s in range(tokens)] for t in range(tokens)]


@pytest.mark.parametrize("window", [1, 3, 6, 9])
@pytest.mark.parametrize("path", ["mask", "kernel"])
def test_window_attends_to_the_last_tokens_up_to_itself(on_cpu, window, path):
    attention, x = made(SelfAttention, window=window), torch.randn(1, 6, D, requires_grad=True)
    if path == "kernel":
        on_cpu()
    y = attention(x)
    reads = []
    for token in range(6):
        [gradient] = torch.autograd.grad(y[0, token].sum(), x, retain_graph=True)
        reads.append((gradient[0].abs().sum(1) > 1e-6).tolist())
    assert reads == by_keys(x, window)


def test_window_of_documents_ends_where_they_begin(on_cpu, monkeypatch):
    starts = torch.tensor([[0, 0, 0, 0, 4, 4]])
    attention = made(PackedAttention, reset_positions=True, reset_mask=True, window=2)
    x = torch.randn(1, 6, D)
    masked = attention(x, starts)
    attention.prepare_batch({STARTS: starts})
    monkeypatch.setattr(blocks, "has_kernel", lambda *_: True)
    torch.testing.assert_close(attention(x, starts), masked)
    first = made(SelfAttention, window=2)(x[:, :4])
    torch.testing.assert_close(masked[:, :4], first)


@pytest.mark.parametrize("padded", [True, False])
def test_window_decoding_equals_the_whole_sequence(padded):
    """A prompt longer than the window, several tokens after it, then one after another; with padding at the start."""
    family = Llama(LLAMA)
    modules = {item.name: family.build(item.name, torch.device("cpu")) for item in family.items}
    for module in modules.values():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 31, (1, 12), generator=torch.Generator().manual_seed(0))

    def logits(count):
        x = ids[:, :count]
        for item in family.items[:-1]:
            x = modules[item.name](x)
        return modules["head"].logits(x)[:, -1]

    decoder = Decoder(family, modules, 20)
    cache = DecodingCache(padding=torch.tensor([2]) if padded else None)
    prompt = F.pad(ids[:, :6], (2, 0)) if padded else ids[:, :6]
    with torch.no_grad():
        torch.testing.assert_close(decoder.read(prompt, cache), logits(6), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(decoder.read(ids[:, 6:9], cache), logits(9), rtol=1e-4, atol=1e-4)
        for at in range(9, 12):
            torch.testing.assert_close(decoder.read(ids[:, at : at + 1], cache), logits(at + 1), rtol=1e-4, atol=1e-4)


def test_window_on_a_device_reads_no_mask():
    meta = torch.device("meta")
    norm = nn.LayerNorm(D, device=meta)
    attention = SelfAttention(width=D, heads=H, norm=norm, device=meta, window=3).to(torch.bfloat16)
    x = torch.empty(3, 6, D, device=meta, dtype=torch.bfloat16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert any("varlen" in name for name in names)
    assert not any("scaled_dot_product" in name for name in names)


def test_window_is_in_the_manifest_of_a_model_that_has_one():
    assert Llama(LLAMA).own_manifest()["sliding_window"] == 4
    assert "sliding_window" not in Llama(replace(LLAMA, sliding_window=None)).own_manifest()
