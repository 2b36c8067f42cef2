"""Balance losses against loops over tokens, sequences and microbatches, and their gradients against differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dynmo_train.models.experts.balance_losses import AUX, GLOBAL, SEQUENCE, StepCounts
from dynmo_train.models.experts.moe import MoeMlp, route
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape

EXPERTS, TOP_K = 4, 2
COEFFICIENTS = {AUX: "aux_loss_coeff", SEQUENCE: "seq_aux_loss_coeff", GLOBAL: "global_aux_loss_coeff"}
ROUTERS = {
    "softmax": RouterShape(),
    "sigmoid": RouterShape(score_function="sigmoid"),
    "biased groups": RouterShape(score_function="sigmoid", expert_bias=True, num_groups=2, group_topk=1),
}


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shape(router=None, **coefficients):
    return MoeShape(num_experts=EXPERTS, top_k=TOP_K, router=router or RouterShape(), **coefficients)


def scores_of(row, kind):
    if kind == "softmax":
        return [math.exp(value) / sum(map(math.exp, row)) for value in row]
    sigmoids = [1 / (1 + math.exp(-value)) for value in row]
    return [value / sum(sigmoids) for value in sigmoids]


def plain_counts(rows, kind):
    """Tokens of each expert: the ``TOP_K`` highest scores, without biases and groups."""
    counts = [0] * EXPERTS
    for row in rows:
        scores = scores_of(row, kind)
        for expert in sorted(range(EXPERTS), key=lambda e, scores=scores: -scores[e])[:TOP_K]:
            counts[expert] += 1
    return counts


def plain_loss(rows, kind, counts):
    """``E sum_e f_e P_e``, f of ``counts``, P of ``rows``."""
    scores = [scores_of(row, kind) for row in rows]
    means = [sum(each[e] for each in scores) / len(rows) for e in range(EXPERTS)]
    return EXPERTS * sum(n / sum(counts) * mean for n, mean in zip(counts, means, strict=True))


@pytest.mark.parametrize("router", ROUTERS)
def test_losses_equal_the_formulas(router):
    kind = ROUTERS[router].score_function
    bias = torch.tensor([0.0, 0.5, -0.5, 0.2]) if ROUTERS[router].expert_bias else None
    moe = shape(ROUTERS[router], aux_loss_coeff=1, seq_aux_loss_coeff=1, global_aux_loss_coeff=1)
    counts, before = StepCounts(), [0] * EXPERTS
    counts.begin_step(6)
    for microbatch in (6, 7, 8):
        counts.microbatch = microbatch
        logits = drawn(3, 7, EXPERTS, seed=microbatch)
        got = route(logits.flatten(0, 1), moe, sequences=3, bias_E=bias, counts=counts).balance.finish()
        rows, sequences = logits.flatten(0, 1).tolist(), logits.tolist()
        here = plain_counts(rows, kind)
        before = [a + b for a, b in zip(before, here, strict=True)]
        by_sequence = [plain_loss(each, kind, plain_counts(each, kind)) for each in sequences]
        assert float(got[AUX]) == pytest.approx(plain_loss(rows, kind, here), rel=1e-5)
        assert float(got[SEQUENCE]) == pytest.approx(sum(by_sequence) / 3, rel=1e-5)
        assert float(got[GLOBAL]) == pytest.approx(plain_loss(rows, kind, before), rel=1e-5)
        assert len({round(float(value), 6) for value in got.values()}) > (2 if microbatch > 6 else 1)


def test_uniform_routing_has_losses_of_one():
    # Each token prefers the next two experts, by the same logits.
    logits = torch.stack([torch.tensor([1.0, 1.0, 0.0, 0.0]).roll(n) for n in range(8)])
    moe = shape(aux_loss_coeff=1, seq_aux_loss_coeff=1, global_aux_loss_coeff=1)
    for value in route(logits, moe, sequences=2).balance.finish().values():
        assert float(value) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("loss", COEFFICIENTS)
def test_gradient_equals_differences(loss, kind):
    """The counts have no gradient: they stay the same in a small neighborhood of the logits."""
    logits = drawn(10, EXPERTS).requires_grad_()
    moe = shape(RouterShape(score_function=kind), **{COEFFICIENTS[loss]: 1})
    counts = StepCounts()
    counts.begin_step(0)
    counts.microbatch = 0
    route(drawn(10, EXPERTS, seed=5), moe, sequences=2, counts=counts).balance.finish()
    counts.microbatch = 1

    def value(x):
        return route(x, moe, sequences=2, counts=counts).balance.finish()[loss]

    value(logits).backward()
    step = 1e-2
    for n, e in ((0, 0), (3, 1), (9, 3), (5, 2)):
        moved = torch.zeros_like(logits)
        moved[n, e] = step
        with torch.no_grad():
            difference = float(value(logits + moved) - value(logits - moved)) / (2 * step)
        assert float(logits.grad[n, e]) == pytest.approx(difference, rel=2e-2, abs=2e-5)


def test_counts_refuse_another_order_of_microbatches():
    counts = StepCounts()
    counts.begin_step(4)
    counts.microbatch = 5
    with pytest.raises(RuntimeError, match="microbatch 5 is computed before microbatch 4"):
        counts.start_sum(torch.ones(EXPERTS, dtype=torch.int64))


def test_counts_begin_again_in_each_step():
    counts = StepCounts()
    for first in (0, 4):
        counts.begin_step(first)
        for microbatch in (first, first + 1):
            counts.microbatch = microbatch
            counts.record(torch.tensor([1, 2]))
            total = counts.start_sum(torch.tensor([1, 2])).wait()
        assert total.tolist() == [2, 4]
        assert counts.recorded(2, torch.device("cpu")).tolist() == [2, 4]


def layer(**options):
    router = RouterShape(score_function="sigmoid", expert_bias=True)
    made = MoeMlp(
        moe=shape(router, **options),
        width=8,
        inner=16,
        activation="gelu",
        norm=torch.nn.LayerNorm(8),
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number))
    return made


def test_recomputed_layer_counts_once_and_has_the_same_gradients():
    gradients, counted = [], []
    for recompute in (False, True):
        made = layer(global_aux_loss_coeff=1.0, seq_aux_loss_coeff=1.0)
        made.counts.begin_step(0)
        results = []
        for microbatch in range(3):

            def run(x, microbatch=microbatch, made=made):
                made.counts.microbatch = microbatch
                return made(x)

            x = drawn(2, 5, 8, seed=20 + microbatch).requires_grad_()
            results.append(checkpoint(run, x, use_reentrant=False) if recompute else run(x))
        for result in reversed(results):
            torch.autograd.backward([result.output.sum(), *result.losses.values()])
        gradients.append([parameter.grad for parameter in made.parameters()])
        counted.append(made.counts.recorded(EXPERTS, torch.device("cpu")))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert torch.equal(*counted)
    assert int(counted[0].sum()) == 3 * 10 * TOP_K


def test_evaluation_and_frozen_layers_count_nothing():
    made = layer(global_aux_loss_coeff=1.0)
    made.counts.begin_step(0)
    made.counts.microbatch = 0
    with torch.no_grad():
        made(drawn(2, 5, 8))
    made.eval()(drawn(2, 5, 8))
    assert made.counts.recorded(EXPERTS, torch.device("cpu")).tolist() == [0] * EXPERTS
    made.counts.start_sum(torch.ones(EXPERTS, dtype=torch.int64))  # the first sum of the step is still to come


def test_metrics_are_those_that_the_item_declares():
    for options in ({}, {"aux_loss_coeff": 1.0}, {"global_aux_loss_coeff": 1.0}, {"seq_aux_loss_coeff": 1.0}):
        made = layer(**options)
        result = made(drawn(2, 5, 8))
        assert {name: value.numel() for name, value in result.metrics.items()} == dict(made.moe.metrics)
        assert set(result.losses) == set(made.moe.coefficients)
