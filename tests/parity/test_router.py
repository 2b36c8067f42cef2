"""The router of sigmoid scores, biases and groups equals the gate of transformers' DeepSeek-V3."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from dynmo_train.models.experts.moe import route
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape

pytestmark = pytest.mark.complete


@pytest.mark.parametrize(("groups", "chosen"), [(8, 4), (4, 4), (1, 1)])
def test_router_equals_deepseek_v3(groups, chosen):
    experts, top_k, width, tokens = 32, 2 * chosen, 16, 50
    config = DeepseekV3Config(
        hidden_size=width,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=chosen,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    theirs = DeepseekV3TopkRouter(config)
    generator = torch.Generator().manual_seed(groups)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(experts, width, generator=generator))
        theirs.e_score_correction_bias.copy_(0.2 * torch.randn(experts, generator=generator))
    x = torch.randn(tokens, width, generator=generator)
    logits, weights, indices = theirs(x)
    router = RouterShape(
        score_function="sigmoid", expert_bias=True, num_groups=groups, group_topk=chosen, scaling_factor=2.5
    )
    moe = MoeShape(num_experts=experts, top_k=top_k, router=router)
    ours = moe.router.choose(moe.router.scores(logits), top_k, theirs.e_score_correction_bias)
    # Theirs are in any order.
    assert torch.equal(ours.sort(1).values, indices.sort(1).values)
    dense = torch.zeros(tokens, experts)
    got = route(logits, moe, bias_E=theirs.e_score_correction_bias).weights_NC
    expected = dense.scatter(1, indices, weights)
    torch.testing.assert_close(dense.scatter(1, ours, got), expected, rtol=1e-5, atol=1e-6)
