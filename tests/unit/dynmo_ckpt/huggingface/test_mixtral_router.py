"""A router that a Mixtral does not have is refused with the fields that differ; older manifests have none of them."""

from __future__ import annotations

import pytest

from dynmo_ckpt.huggingface.decoders import unlike_mixtral
from dynmo_ckpt.huggingface.models import architecture_of_model
from dynmo_ckpt.io.errors import UnsupportedError
from dynmo_ckpt.operations.logits import unsupported_reason
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape

MODEL = {
    "family": "llama",
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "position_embedding": "rotary",
    "num_experts": 4,
    "moe_top_k": 2,
}


def test_plain_router_is_that_of_a_mixtral():
    for model in (MODEL, MODEL | MoeShape(num_experts=4).manifest()):
        assert architecture_of_model(model)[0] == "mixtral"
        assert unsupported_reason(model) == ""


@pytest.mark.parametrize(
    ("router", "field"),
    [
        ({"score_function": "sigmoid"}, "moe_router_score_function = sigmoid"),
        ({"score_function": "sigmoid", "expert_bias": True}, "moe_router_enable_expert_bias = True"),
        ({"pre_softmax": True}, "moe_router_pre_softmax = True"),
        ({"scaling_factor": 2.5}, "moe_router_topk_scaling_factor = 2.5"),
        ({"num_groups": 2, "group_topk": 1}, "moe_router_num_groups = 2, moe_router_group_topk = 1"),
    ],
)
def test_another_router_is_refused(router, field):
    model = MODEL | MoeShape(num_experts=4, router=RouterShape(**router)).manifest()
    with pytest.raises(UnsupportedError, match=field):
        architecture_of_model(model)
    # What the reference model computes is more than a Mixtral: the routers of DeepSeek, too.
    assert unsupported_reason(model) == ""


@pytest.mark.parametrize(("routing", "is_refused"), [("balanced", True), ("sinkhorn", True), ("expert-choice", False)])
def test_weights_of_an_assignment_are_refused(routing, is_refused):
    assert bool(unlike_mixtral(MODEL | {"moe_routing": routing})) == is_refused
