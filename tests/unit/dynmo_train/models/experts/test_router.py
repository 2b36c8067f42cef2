"""Scores, choices and weights of a router against plain loops over tokens written from the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from dynmo_train.models.experts.moe import MoeMlp, route
from dynmo_train.models.experts.moe_dispatch import return_rows
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape, within_groups
from tests.tables import table

EXPERTS = 8


def drawn(*shape, seed=1, scale=1.5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def plain_route(row, router, top_k, bias):
    """Experts and weights of one token: DeepSeek-V3's equations 12 to 16, or softmax with the same parts."""
    if router.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in row]
    else:
        scores = [math.exp(value) / sum(math.exp(other) for other in row) for value in row]
    chosen_by = [score + bias[e] for e, score in enumerate(scores)]
    allowed = range(len(row))
    if router.num_groups:
        size = len(row) // router.num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(router.num_groups)]
        summed = [sum(sorted((chosen_by[e] for e in g), reverse=True)[: top_k // router.group_topk]) for g in groups]
        best = sorted(range(router.num_groups), key=lambda g: -summed[g])[: router.group_topk]
        allowed = [e for g in best for e in groups[g]]
    experts = sorted(allowed, key=lambda e: -chosen_by[e])[:top_k]
    total = sum(scores[e] for e in experts)
    normalizes = top_k > 1 if router.score_function == "sigmoid" else not router.pre_softmax
    factor = router.scaling_factor or 1.0
    return {e: factor * scores[e] / (total if normalizes else 1.0) for e in experts}


ROUTERS = [
    RouterShape(),
    RouterShape(pre_softmax=True),
    RouterShape(scaling_factor=2.5),
    RouterShape(score_function="sigmoid"),
    RouterShape(score_function="sigmoid", expert_bias=True, scaling_factor=2.5),
    RouterShape(num_groups=4, group_topk=2),
    RouterShape(score_function="sigmoid", expert_bias=True, num_groups=4, group_topk=2, scaling_factor=1.5),
]


@table(("router", "top_k"), [(r, k) for r in ROUTERS for k in (1, 2, 4) if k % (r.group_topk or 1) == 0], ids=str)
def test_route_equals_a_plain_loop_over_tokens(router, top_k):
    logits = drawn(40, EXPERTS)
    bias = drawn(EXPERTS, seed=2, scale=0.3) if router.expert_bias else torch.zeros(EXPERTS)
    moe = MoeShape(num_experts=EXPERTS, top_k=top_k, router=router)
    routing = route(logits, moe, bias_E=bias if router.expert_bias else None)
    # The expert of a slot: rows are sorted by expert, and a row's value is its expert's number.
    numbers = torch.arange(EXPERTS).repeat_interleave(torch.tensor(routing.rows.groups.host_counts()))[:, None]
    experts = return_rows(numbers, routing.rows, top_k)[..., 0]
    for n, row in enumerate(logits.tolist()):
        expected = plain_route(row, router, top_k, bias.tolist())
        assert experts[n].tolist() == list(expected)
        assert routing.weights_NC[n].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_bias_changes_the_choice_and_not_the_weights():
    moe = MoeShape(num_experts=EXPERTS, top_k=1, router=RouterShape(score_function="sigmoid", expert_bias=True))
    logits = torch.zeros(3, EXPERTS)
    bias = torch.zeros(EXPERTS)
    bias[5] = 0.25
    routing = route(logits, moe, bias_E=bias)
    assert routing.chosen_E.tolist() == [0, 0, 0, 0, 0, 3, 0, 0]
    assert routing.weights_NC.tolist() == [[0.5]] * 3


def test_one_sigmoid_trains_the_router():
    logits = drawn(4, EXPERTS).requires_grad_()
    moe = MoeShape(num_experts=EXPERTS, top_k=1, router=RouterShape(score_function="sigmoid"))
    route(logits, moe).weights_NC.sum().backward()
    assert logits.grad.count_nonzero() == 4


def test_sigmoids_that_underflow_have_finite_weights():
    logits = torch.full((2, EXPERTS), -200.0)
    moe = MoeShape(num_experts=EXPERTS, top_k=2, router=RouterShape(score_function="sigmoid"))
    assert route(logits, moe).weights_NC.tolist() == [[0.0, 0.0]] * 2


def test_groups_of_equal_score_go_to_the_lower_group():
    open_NE = within_groups(torch.zeros(1, EXPERTS), 4, 2, 2).isfinite()
    assert open_NE.tolist() == [[True] * 4 + [False] * 4]


def reference_sinkhorn(cost, tol):
    """S-BASE by alternate scaling of exp(logits), in float64, until the columns change by less than ``tol``."""
    cost = cost.double().exp()
    rows, columns = torch.ones(cost.shape[0]).double(), torch.ones(cost.shape[1]).double()
    while True:
        rows = 1 / (cost.shape[0] * (cost * columns).sum(1))
        new = 1 / (cost.shape[1] * (cost * rows[:, None]).sum(0))
        change, columns = float((new - columns).abs().mean()), new
        if change < tol:
            return cost * columns * rows[:, None]


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn_routes_by_balanced_logits_and_weighs_by_the_raw_ones(top_k):
    logits = drawn(256, EXPERTS) + torch.linspace(0, 3, EXPERTS)
    moe = MoeShape(num_experts=EXPERTS, top_k=top_k, routing="sinkhorn")
    routing = route(logits.requires_grad_(), moe, balanced=True)
    chosen = reference_sinkhorn(logits.detach(), 1e-12).topk(top_k, 1).indices
    assert torch.equal(routing.chosen_E, torch.bincount(chosen.flatten(), minlength=EXPERTS))
    gates = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
    expected = gates.gather(1, chosen)
    torch.testing.assert_close(routing.weights_NC, expected)
    grads = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (routing.weights_NC, expected)]
    torch.testing.assert_close(*grads)
    plain = torch.bincount(logits.topk(top_k, 1).indices.flatten(), minlength=EXPERTS)
    assert routing.chosen_E.max() < 0.7 * plain.max()


def test_sinkhorn_evaluation_routes_by_the_raw_logits():
    logits = drawn(64, EXPERTS) + torch.linspace(0, 3, EXPERTS)
    routing = route(logits, MoeShape(num_experts=EXPERTS, top_k=2, routing="sinkhorn"))
    expected = torch.bincount(logits.topk(2, 1).indices.flatten(), minlength=EXPERTS)
    assert torch.equal(routing.chosen_E, expected)


def test_router_of_a_manifest_is_the_same():
    router = RouterShape(score_function="sigmoid", expert_bias=True, num_groups=4, group_topk=2, scaling_factor=1.5)
    moe = MoeShape(num_experts=EXPERTS, top_k=4, router=router, seq_aux_loss_coeff=0.5, global_aux_loss_coeff=0.25)
    assert MoeShape.of_manifest(moe.manifest()) == moe


def test_expert_bias_stays_float32_in_bfloat16_items():
    moe = MoeShape(num_experts=4, router=RouterShape(score_function="sigmoid", expert_bias=True))
    made = MoeMlp(moe=moe, width=8, inner=16, activation="gelu", norm=torch.nn.LayerNorm(8), device=torch.device("cpu"))
    assert made.expert_bias.dtype == torch.float32
    assert "router.expert_bias" not in dict(made.named_parameters())
