"""Balance losses and biases of experts: the same bits on any placement, nearly those of one process on other axes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.models.experts.balance_losses import GLOBAL, StepCounts
from dynmo_train.models.experts.moe import route
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import set_parallel_dims
from tests.distributed.layouts import (
    CUT,
    D2,
    E2,
    OVERLAP,
    PD,
    T2,
    TE,
    ZERO,
    Layout,
    close,
    play_lists,
    play_named,
)
from tests.distributed.scenario import Scenario
from tests.distributed.test_placement import cut
from tests.distributed.workers import run_workers
from tests.levels import complete_but, of_level

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ROUTER = RouterShape(
    score_function="sigmoid", expert_bias=True, bias_update_rate=0.02, scaling_factor=1.5, num_groups=2, group_topk=1
)
BALANCED = Scenario(
    steps=5,
    prune=False,
    freeze=((4, 1),),
    moe=MoeShape(
        num_experts=4, top_k=2, aux_loss_coeff=0.05, seq_aux_loss_coeff=0.1, global_aux_loss_coeff=0.2, router=ROUTER
    ),
)
MOVING = replace(BALANCED, recompute=True, moves=((1, cut(2, 2)), (3, cut(2, 5))))
SINKHORN = replace(BALANCED, moe=MoeShape(num_experts=4, top_k=2, routing="sinkhorn", z_loss_coeff=0.01))
P2 = ParallelDims(pipeline=2)


@pytest.fixture(scope="module")
def one():
    return play_lists(
        1,
        {
            "balanced": [Layout(dims=ParallelDims(), scenario=replace(BALANCED, schedule="gpipe"))],
            "sinkhorn": [Layout(dims=ParallelDims(), scenario=SINKHORN)],
            "unbiased": [Layout(dims=ParallelDims(), scenario=replace(BALANCED, moe=MoeShape(num_experts=4, top_k=2)))],
        },
    )


@pytest.fixture(scope="module")
def two(request):
    scenarios = {
        "moving, recomputed": MOVING,
        "zero-bubble": replace(BALANCED, schedule="zero-bubble"),
        "interleaved": replace(BALANCED, schedule="interleaved-1f1b", virtual=2),
        "v-shaped": replace(BALANCED, schedule="zb-v", virtual=2, recompute=True),
        "sinkhorn": replace(SINKHORN, recompute=True, moves=MOVING.moves),
    }
    layouts = {name: Layout(dims=P2, scenario=scenario) for name, scenario in scenarios.items()}
    layouts |= {
        "replicas": Layout(dims=D2, scenario=BALANCED),
        "recomputing replicas": Layout(dims=D2, scenario=replace(BALANCED, recompute=True), settings=OVERLAP),
        "ZeRO": Layout(dims=D2, scenario=BALANCED, settings=ZERO),
    }
    layouts = of_level(request.config, layouts, "moving, recomputed", "replicas", "recomputing replicas")
    return play_lists(2, {name: [layout] for name, layout in layouts.items()})


@pytest.mark.parametrize(
    "name", complete_but(["moving, recomputed", "zero-bubble", "interleaved", "v-shaped"], "moving, recomputed")
)
def test_two_stages_have_the_bits_of_one(name, one, two):
    assert two[name] == one["balanced"]


@pytest.mark.complete
def test_sinkhorn_two_stages_have_the_bits_of_one(one, two):
    assert two["sinkhorn"] == one["sinkhorn"]


def test_scenario_moves_the_biases_and_changes_the_losses(one):
    [balanced], [unbiased] = one["balanced"], one["unbiased"]
    assert balanced["losses"] != unbiased["losses"]
    biases = {name: value for name, value in balanced["weights"].items() if "expert_bias" in name}
    assert len(biases) == 4
    assert len(set(biases.values())) > 1
    assert not any("expert_bias" in name for name in unbiased["weights"])


def test_recomputing_replicas_have_the_same_bits(two):
    assert two["recomputing replicas"] == two["replicas"]


@pytest.mark.complete
def test_zero_replicas_share_whole_biases(two):
    [got], [expected] = two["ZeRO"], two["replicas"]
    close(got, expected)
    assert got["weights"].keys() == expected["weights"].keys()


@pytest.mark.complete
def test_two_stages_of_two_replicas_have_the_bits_of_one_stage(two):
    layout = Layout(dims=PD, scenario=replace(MOVING, schedule="zero-bubble"))
    assert play_lists(4, {"both": [layout]})["both"] == two["replicas"]


# Each loss alone, so that a wrong one is not hidden by the others; clipping would hide a wrong scale.
EXACT = replace(BALANCED, steps=3, dropout=0.0, clip=1e9, freeze=())
LOSSES = {
    "auxiliary": MoeShape(num_experts=4, top_k=2, aux_loss_coeff=0.5),
    "sequence": MoeShape(num_experts=4, top_k=2, seq_aux_loss_coeff=0.5),
    "batch": MoeShape(num_experts=4, top_k=2, global_aux_loss_coeff=0.5),
    "z": MoeShape(num_experts=4, top_k=2, z_loss_coeff=0.05),
    "biases": MoeShape(num_experts=4, top_k=2, router=ROUTER),
}
ALL = {"all": replace(BALANCED.moe, z_loss_coeff=0.05)}
C2 = ParallelDims(data=2, context=2)
# Replicas count in another order of microbatches, so that only the loss over a batch differs from one process.
AXES = {"tensor": (T2, {}), "tokens": (T2, CUT), "context": (C2, {}), "experts of context": (replace(C2, expert=2), {})}
REPLICAS = {"experts": (E2, {}), "experts, ZeRO": (E2, ZERO)}


def layouts_of(axes, losses=LOSSES):
    return {
        f"{name}, {axis}": Layout(dims=dims, scenario=replace(EXACT, moe=moe), settings=settings)
        for name, moe in losses.items()
        for axis, (dims, settings) in axes.items()
    }


@pytest.fixture(scope="module")
def axes_one(request):
    layouts = layouts_of({"one": (ParallelDims(), {})}, LOSSES | ALL)
    return play_named(1, of_level(request.config, layouts, "sequence, one"))


@pytest.fixture(scope="module")
def axes_two(request):
    layouts = layouts_of({**AXES, **REPLICAS, "replicas": (D2, {})}) | layouts_of({"replicas": (D2, {})}, ALL)
    return play_named(2, of_level(request.config, layouts, "sequence, context"))


@pytest.fixture(scope="module")
def axes_four():
    return play_named(
        4, layouts_of({"tensor, context": (replace(C2, tensor=2), CUT), "tensor, experts": (TE, CUT)}, ALL)
    )


def biases_of(result):
    return {name.partition("@")[0]: value for name, value in result["weights"].items() if "expert_bias" in name}


def near(got, expected):
    """Losses, gradient norms and each bias."""
    close(got, expected)
    assert biases_of(got) == biases_of(expected)


@pytest.mark.parametrize("axis", complete_but(AXES, "context"))
@pytest.mark.parametrize("loss", complete_but(LOSSES, "sequence"))
def test_tensor_and_context_ranks_are_near_one_process(loss, axis, axes_one, axes_two):
    near(axes_two[f"{loss}, {axis}"], axes_one[f"{loss}, one"])


@pytest.mark.complete
@pytest.mark.parametrize("axis", REPLICAS)
@pytest.mark.parametrize("loss", LOSSES)
def test_expert_ranks_are_near_replicas_with_all_experts(loss, axis, axes_two):
    near(axes_two[f"{loss}, {axis}"], axes_two[f"{loss}, replicas"])


@pytest.mark.complete
@pytest.mark.parametrize("loss", [name for name, moe in LOSSES.items() if not moe.global_aux_loss_coeff])
def test_replicas_are_near_one_process(loss, axes_one, axes_two):
    near(axes_two[f"{loss}, replicas"], axes_one[f"{loss}, one"])


@pytest.mark.complete
def test_two_axes_together_are_near_one(axes_one, axes_two, axes_four):
    near(axes_four["all, tensor, context"], axes_one["all, one"])
    near(axes_four["all, tensor, experts"], axes_two["all, replicas"])


@pytest.mark.complete
@pytest.mark.parametrize("loss", ["auxiliary", "sequence", "batch", "z"])
def test_each_loss_changes_the_gradients_of_one_process(loss, axes_one):
    assert axes_one[f"{loss}, one"]["norms"] != axes_one["biases, one"]["norms"]


EXPERTS, TOP_K = 4, 2
SHAPE = MoeShape(num_experts=EXPERTS, top_k=TOP_K, global_aux_loss_coeff=1.0)


def logits_of(replica, microbatch):
    # Replicas with different numbers of tokens.
    generator = torch.Generator().manual_seed(10 * replica + microbatch)
    return torch.randn(6 + 3 * replica, EXPERTS, generator=generator)


def global_losses(world):
    world = set_parallel_dims(world, ParallelDims(data=world.size), 60)
    counts = StepCounts()
    counts.group = world.groups.data
    losses = []
    for step in (1, 2):
        counts.begin_step(3 * world.data_rank)
        for microbatch in range(3):
            # The second pass of a microbatch is a recomputation, after its successor has run.
            for at in (microbatch, microbatch - 1):
                counts.microbatch = 3 * world.data_rank + max(at, 0)
                routed = route(logits_of(world.data_rank, 10 * step + max(at, 0)), SHAPE, counts=counts)
                losses.append(float(routed.balance.finish()[GLOBAL]))
    return losses


def expected_losses(replica):
    losses = []
    for step in (1, 2):
        for microbatch in range(3):
            for at in (microbatch, max(microbatch - 1, 0)):
                n = torch.zeros(EXPERTS)
                for other in (0, 1):
                    for before in range(at + 1):
                        for row in logits_of(other, 10 * step + before).tolist():
                            for expert in sorted(range(EXPERTS), key=lambda e, row=row: -row[e])[:TOP_K]:
                                n[expert] += 1
                p = logits_of(replica, 10 * step + at).softmax(-1).mean(0)
                losses.append(float(EXPERTS * (n / n.sum() * p).sum()))
    return losses


def test_global_loss_counts_all_replicas_and_the_microbatches_so_far():
    for replica, losses in enumerate(run_workers(global_losses, 2)):
        assert losses == pytest.approx(expected_losses(replica), rel=1e-6)
