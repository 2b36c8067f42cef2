"""The router learns from the loss of the model in every form of routing that the rules over options accept."""

from __future__ import annotations

import itertools

import torch

from dynmo_train.config import DefaultContext, config_of, validate
from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.experts.moe_shape import MoeShape
from tests.tables import table
from tests.unit.dynmo_train.config.small_config import SMALL

WIDTH, EXPERTS = 8, 4
GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
BIASES = {"moe_router_enable_expert_bias": True}
FORMS = {
    f"{routing}, {balance}, {score}{' without division' if before else ''}, top {top_k}{''.join(more)}": {
        "num_experts": EXPERTS,
        "moe_routing": routing,
        "moe_router_load_balancing_type": balance,
        "moe_router_score_function": score,
        "moe_router_pre_softmax": before,
        "moe_router_topk": top_k,
        **{name: value for each in more.values() for name, value in each.items()},
    }
    for routing, balance, score, before, top_k, more in itertools.product(
        ("topk", "expert-choice", "balanced"),
        ("none", "sinkhorn"),
        ("softmax", "sigmoid"),
        (False, True),
        (1, 2),
        ({}, {", groups": GROUPS}, {", biases": BIASES}, {", capacity": {"moe_expert_capacity_factor": 1.0}}),
    )
}


def problems(options):
    return validate(config_of(DefaultContext(world_size=1), **SMALL | options), 1)


def router_gradient(options):
    """The largest gradient of the router's weight, of a sum of the outputs without the balance losses."""
    moe = MoeShape.from_config(config_of(DefaultContext(world_size=1), **SMALL | options))
    norm, random = torch.nn.LayerNorm(WIDTH), torch.Generator().manual_seed(1)
    made = MoeMlp(moe=moe, width=WIDTH, inner=16, activation="gelu", norm=norm, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.5)
    made(torch.randn(2, 16, WIDTH, generator=random)).output.sum().backward()
    return 0.0 if made.router.weight.grad is None else float(made.router.weight.grad.abs().max())


ACCEPTED = [name for name, options in FORMS.items() if not problems(options)]


def test_forms_of_every_routing_are_accepted():
    assert len(ACCEPTED) > 20
    assert {(FORMS[name]["moe_routing"], FORMS[name]["moe_router_topk"]) for name in ACCEPTED} == {
        *itertools.product(("topk", "expert-choice"), (1, 2)),
        ("balanced", 1),
    }


@table("name", ACCEPTED)
def test_router_has_a_gradient_from_the_loss_of_the_model(name):
    assert router_gradient(FORMS[name]) > 1e-2


def test_softmax_over_one_chosen_expert_has_none_and_is_refused():
    options = {"num_experts": EXPERTS, "moe_router_topk": 1}
    assert router_gradient(options) < 1e-5
    [problem] = problems(options)
    assert problem.path == "--moe-router-topk"
    assert "--moe-router-pre-softmax" in problem.message
    assert problems(options | {"moe_router_pre_softmax": True}) == []
    assert problems(options | {"moe_router_score_function": "sigmoid"}) == []
