"""Balanced ways to route against plain references."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.experts.moe_routing import balanced_assignment, expert_choice, sinkhorn
from dynmo_train.models.experts.moe_shape import MoeShape

CPU = torch.device("cpu")


def drawn(*shape, seed=1, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def layer(routing, top_k):
    moe = MoeShape(num_experts=4, top_k=top_k, routing=routing)
    made = MoeMlp(moe=moe, width=8, inner=16, activation="gelu", norm=torch.nn.LayerNorm(8), device=CPU)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number, scale=0.5))
    return made


@pytest.mark.parametrize(("tokens", "experts"), [(12, 4), (13, 4), (3, 5), (64, 8)])
def test_balanced_assignment_skewed_logits_respect_capacity(tokens, experts):
    logits = drawn(tokens, experts)
    logits[:, 0] += 10.0
    assigned = balanced_assignment(logits)
    counts = torch.bincount(assigned, minlength=experts)
    assert int(counts.sum()) == tokens
    assert int(counts.max()) <= math.ceil(tokens / experts)
    assert torch.equal(assigned, balanced_assignment(logits))


def test_balanced_assignment_reads_no_value():
    """Meta tensors have none."""
    assert balanced_assignment(torch.empty(12, 4, device="meta")).shape == (12,)


def test_balanced_assignment_is_near_the_optimum():
    worse = []
    for seed in range(10):
        logits = drawn(6, 3, seed=seed)
        places = [0, 0, 1, 1, 2, 2]
        best = max(sum(float(logits[t, e]) for t, e in enumerate(each)) for each in set(itertools.permutations(places)))
        ours = float(logits.gather(1, balanced_assignment(logits)[:, None]).sum())
        plain = float(logits.mean(1).sum())
        assert ours <= best + 1e-5
        worse.append((best - ours) / (best - plain))
    assert sum(worse) / len(worse) < 0.1, "less than a tenth of what a random assignment loses"


def test_sinkhorn_columns_have_equal_sums():
    plan = sinkhorn(drawn(32, 4, scale=2.0) + torch.tensor([3.0, 0, 0, 0]), rounds=50).exp()
    torch.testing.assert_close(plan.sum(1), torch.ones(32, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(0), torch.full((4,), 8.0, dtype=torch.float64), rtol=1e-3, atol=0)


def test_expert_choice_takes_the_likeliest_tokens():
    probabilities = drawn(10, 4).softmax(-1)
    tokens, weights = expert_choice(probabilities, 2)
    assert tokens.shape == (4, 5)
    for expert in range(4):
        assert set(tokens[expert].tolist()) == set(probabilities[:, expert].topk(5).indices.tolist())
        assert torch.equal(weights[expert], probabilities[tokens[expert], expert])


@pytest.mark.parametrize(("routing", "top_k"), [("expert-choice", 2), ("balanced", 1)])
def test_moe_mlp_equals_all_experts_with_masks(routing, top_k):
    made = layer(routing, top_k)
    x = drawn(2, 6, 8, seed=9).requires_grad_()
    plain = x.detach().clone().requires_grad_()
    grad = drawn(2, 6, 8, seed=10)
    result = made(x)
    result.output.backward(grad)
    got = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    flat = made.norm(plain).reshape(12, 8)
    logits = made.router(flat)
    weights = torch.zeros(12, 4)
    if routing == "balanced":
        chosen = F.one_hot(balanced_assignment(logits), 4)
        weights = logits.sigmoid() * chosen
    else:
        probabilities = logits.softmax(-1)
        chosen = torch.zeros(12, 4).scatter(0, probabilities.topk(6, dim=0).indices, 1.0)
        weights = probabilities * chosen
    assert result.metrics["expert_tokens"].tolist() == chosen.sum(0).tolist()
    outputs = torch.stack([expert(flat) for expert in made.experts.values()], 1)
    expected = plain + (outputs * weights[..., None]).sum(1).view_as(plain)
    expected.backward(grad)
    torch.testing.assert_close(result.output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-4, atol=1e-4)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(("routing", "top_k"), [("expert-choice", 2), ("balanced", 1)])
def test_moe_mlp_evaluation_is_causal(routing, top_k):
    made = layer(routing, top_k).eval()
    x = drawn(1, 8, 8, seed=3)
    other = x.clone()
    other[:, 4:] = drawn(1, 4, 8, seed=4)
    torch.testing.assert_close(made(x).output[:, :4], made(other).output[:, :4])
