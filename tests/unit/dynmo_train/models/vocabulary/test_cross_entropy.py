"""The loss in chunks against torch's own: value and gradients, padding, weights, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dynmo_train.models.vocabulary.cross_entropy import (
    chunk_tokens_for,
    linear_cross_entropy,
    mean_linear_cross_entropy,
)
from dynmo_train.parallel.tensor_parallel import PendingGather, TensorRegion

N, D, V, R = 37, 16, 50, 64


def made(dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(R, D, generator=generator).to(dtype).requires_grad_()
    offsets = torch.randn(R, generator=generator).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, V, (N,), generator=generator)
    weights = torch.rand(N, generator=generator)
    return x, weight, offsets, labels, weights


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 100])
def test_linear_cross_entropy_in_chunks_equals_the_whole(chunk_tokens, bias):
    x, weight, offsets, labels, weights = made(bias=bias)
    given = [each for each in (x, weight, offsets) if each is not None]
    ours = linear_cross_entropy(x, weight, offsets, labels, weights, vocabulary=V, chunk_tokens=chunk_tokens)
    got = torch.autograd.grad(ours * 0.25, given)
    logits = F.linear(x, weight[:V], None if offsets is None else offsets[:V])
    whole = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    expected = torch.autograd.grad(whole * 0.25, given)
    torch.testing.assert_close(ours, whole)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not got[1][V:].any()


@pytest.mark.parametrize("cap", [0.5, 30.0, 400.0])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_linear_cross_entropy_of_capped_logits(cap, size):
    """Logits far below the label's underflow; the gradient of an unlikely label does not."""
    x, weight, offsets, labels, weights = made()
    given = [x, weight, offsets]
    ours = linear_cross_entropy(x * size, weight, offsets, labels, weights, vocabulary=V, chunk_tokens=8, cap=cap)
    got = torch.autograd.grad(ours, given)
    logits = torch.tanh(F.linear(x.double() * size, weight[:V].double(), offsets[:V].double()) / cap) * cap
    whole = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    expected = torch.autograd.grad(whole, given)
    torch.testing.assert_close(ours, whole.float(), rtol=1e-5, atol=1e-5)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * float(other.abs().max()))
    assert not got[1][V:].any()


@pytest.mark.parametrize(
    ("device", "vocabulary", "tokens"),
    [
        ("cpu", 50304, 128),
        ("cpu", 32000, 256),
        ("cpu", 8192, 512),
        ("cpu", 97, 512),
        ("cpu", 1 << 24, 128),
        ("cuda", 97, 4096),
    ],
)
def test_chunk_tokens_for_a_small_vocabulary_are_more(device, vocabulary, tokens):
    assert chunk_tokens_for(device, vocabulary) == tokens


def test_linear_cross_entropy_same_chunk_gives_same_bits():
    values = {linear_cross_entropy(*made(), vocabulary=V, chunk_tokens=8).item() for _ in range(3)}
    assert len(values) == 1


def test_linear_cross_entropy_split_backward_equals_one_backward():
    """As zero-bubble takes it: the input's gradient first, the weight's later, from the same graph."""
    x, weight, offsets, labels, weights = made()
    loss = linear_cross_entropy(x, weight, offsets, labels, weights, vocabulary=V, chunk_tokens=8) / 4
    whole = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    second = torch.autograd.grad(loss, [weight], retain_graph=True)
    assert torch.equal(first[0], whole[0])
    assert torch.equal(second[0], whole[1])
    doubled = torch.autograd.grad(loss * 2, [weight])
    torch.testing.assert_close(doubled[0], 2 * whole[1])


def test_linear_cross_entropy_backward_does_not_synchronize():
    """A device without values answers no question about them: forward and backward ask none."""
    x, weight, offsets, labels, weights = (tensor.to("meta") for tensor in made())
    given = [each.detach().requires_grad_() for each in (x, weight, offsets)]
    loss = linear_cross_entropy(*given, labels, weights, vocabulary=V, chunk_tokens=8)
    grads = torch.autograd.grad(loss / 4, given, retain_graph=True)
    again = torch.autograd.grad(loss / 4, given)
    assert [grad.shape for grad in (*grads, *again)] == [each.shape for each in given] * 2


def test_linear_cross_entropy_low_precision_accumulates_in_float32():
    x, weight, offsets, labels, weights = made(torch.bfloat16)
    loss = linear_cross_entropy(x, weight, offsets, labels, weights, vocabulary=V, chunk_tokens=4)
    grads = torch.autograd.grad(loss, [x, weight, offsets])
    assert loss.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3
    exact = made()
    reference = linear_cross_entropy(*exact, vocabulary=V, chunk_tokens=4)
    torch.testing.assert_close(loss, reference, rtol=0.02, atol=0.02)


def test_linear_cross_entropy_float16_gradients_keep_small_values():
    """Gradients of unlikely tokens, 1e-9 here, are below float16's range until the loss scale lifts them."""
    generator = torch.Generator().manual_seed(0)
    tokens, rows, scale = 512, 4000, 65536.0
    x, weight = torch.randn(tokens, D, generator=generator), torch.randn(rows, D, generator=generator) * 0.02
    labels, weights = torch.randint(0, rows, (tokens,), generator=generator), torch.full((tokens,), 1 / tokens**2)

    def scaled(dtype: torch.dtype, factor: float) -> list[torch.Tensor]:
        given = [each.to(dtype).detach().clone().requires_grad_() for each in (x, weight)]
        loss = linear_cross_entropy(*given, None, labels, weights, vocabulary=rows, chunk_tokens=128, factor=factor)
        return [gradient.float() for gradient in torch.autograd.grad(loss * scale, given)]

    exact = scaled(torch.float32, 1.0)
    # An exit's share of the loss is another factor than that of the step.
    for factor in (scale, scale / 4):
        for gradient, reference in zip(scaled(torch.float16, factor), exact, strict=True):
            assert (gradient == 0).float().mean() < 1e-3
            assert torch.linalg.vector_norm(gradient - reference) < 2e-3 * torch.linalg.vector_norm(reference)
    assert (scaled(torch.float16, 1.0)[1] == 0).float().mean() > 0.5, "too large to show the loss of small values"


def test_mean_linear_cross_entropy_averages_counted_tokens():
    x, weight, offsets, labels, _ = made()
    counts = torch.zeros(N, dtype=torch.long)
    assert mean_linear_cross_entropy(x, weight, offsets, labels, counts, V) == 0
    counts[5] = 1
    one = mean_linear_cross_entropy(x, weight, offsets, labels, counts, V)
    alone = mean_linear_cross_entropy(x[5:6], weight, offsets, labels[5:6], None, V)
    torch.testing.assert_close(one, alone)


def test_linear_cross_entropy_never_allocates_all_logits():
    """No tensor of the computation has more elements than one chunk of logits and the weight's gradient."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
            nonlocal largest
            result = function(*arguments, **(keywords or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    x = torch.randn(4000, 8, requires_grad=True)
    weight = torch.randn(500, 8, requires_grad=True)
    labels = torch.randint(0, 500, (4000,))
    with Watch():
        linear_cross_entropy(x, weight, None, labels, torch.rand(4000), vocabulary=500, chunk_tokens=100).backward()
    assert largest == 100 * 500


class Alone(TensorRegion):
    """One of two tensor ranks without a process group; ``other`` is what the other one would send."""

    def __init__(self, rank=1, other=None):
        self.rank, self.size, self.sequence, self.other = rank, 2, False, other
        self.gathers = 0

    def enter(self, x):
        return x

    def start_gather(self, x):
        self.gathers += 1
        other = torch.zeros_like(x) if self.other is None else self.other(x)
        pair = [x, other] if self.rank == 0 else [other, x]
        return PendingGather(torch.stack(pair), None)


def test_linear_cross_entropy_rank_with_only_padding_rows():
    """Of a vocabulary of 8, padded to 16 for two ranks, the second one has no real row."""
    x, weight = torch.randn(6, D, requires_grad=True), torch.randn(8, D, requires_grad=True)

    def other(statistics):
        return torch.stack([torch.zeros(6), torch.full((6,), 8.0), torch.zeros(6)])

    labels = torch.zeros(6, dtype=torch.long)
    region = Alone(other=other)
    loss = linear_cross_entropy(
        x, weight, None, labels, torch.full((6,), 1 / 6), vocabulary=8, chunk_tokens=6, region=region
    )
    torch.testing.assert_close(loss, torch.tensor(8.0).log())
    loss.backward()
    assert not weight.grad.any()
    assert not x.grad.any()


def test_linear_cross_entropy_sharded_memory_and_collectives():
    """Two chunks of this rank's columns at most, one collective each, and no product of a chunk twice."""
    largest, products = 0, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
            nonlocal largest, products
            result = function(*arguments, **(keywords or {}))
            products += function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    x = torch.randn(4000, 8, requires_grad=True)
    weight = torch.randn(500, 8, requires_grad=True)
    labels = torch.randint(0, 1000, (4000,))
    region = Alone(rank=0)
    with Watch():
        linear_cross_entropy(
            x, weight, None, labels, torch.rand(4000), vocabulary=1000, chunk_tokens=100, region=region
        ).backward()
    assert largest == 100 * 500
    assert region.gathers == 40
    assert products == 3 * 40


def test_mean_linear_cross_entropy_usual_microbatch_is_one_collective():
    region = Alone(rank=0)
    mean_linear_cross_entropy(
        torch.randn(1, 128, 8), torch.randn(32, 8), None, torch.zeros(1, 128).long(), None, 60, region
    )
    assert region.gathers == 1
