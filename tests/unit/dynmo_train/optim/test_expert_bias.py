"""Biases of experts after a step: by the signs of exact counts, and unchanged where the step is skipped."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.optim.expert_bias import update_expert_biases
from dynmo_train.optim.item_state import is_whole, role_of


def layer(experts=4, *, bias=True, rate=0.5):
    router = RouterShape(score_function="sigmoid", expert_bias=bias, bias_update_rate=rate)
    return MoeMlp(
        moe=MoeShape(num_experts=experts, router=router),
        width=8,
        inner=8,
        activation="gelu",
        norm=torch.nn.Identity(),
        device=torch.device("cpu"),
    )


def updated(counts, skip=0.0, rate=0.5, trains=True):
    made = layer(len(counts[0]), rate=rate).requires_grad_(trains)
    made.counts.begin_step(0)
    for microbatch, chosen in enumerate(counts):
        made.counts.microbatch = microbatch
        made.counts.record(torch.tensor(chosen))
    update_expert_biases([torch.nn.Linear(2, 2), made, layer(bias=False)], None, torch.tensor(skip))
    return made.expert_bias.tolist()


def test_bias_moves_against_the_load_of_all_microbatches():
    # The sums are 9, 5, 1, 5, and their mean is 5.
    assert updated([[5, 5, 0, 0], [4, 0, 1, 5]]) == [-0.5, 0.0, 0.5, 0.0]


def test_bias_compares_large_counts_exactly():
    # As float32, the counts and their mean would be equal.
    base = 1 << 26
    assert updated([[base + 1, base, base, base - 1]]) == [-0.5, 0.0, 0.0, 0.5]


def test_bias_of_a_skipped_step_stays():
    assert updated([[5, 5, 0, 0]], skip=1.0) == [0.0] * 4


def test_bias_of_a_router_that_does_not_train_stays():
    assert updated([[5, 5, 0, 0]], trains=False) == [0.0] * 4


def test_bias_without_counts_stays():
    assert updated([[0, 0, 0, 0]]) == [0.0] * 4


def test_expert_bias_is_a_buffer_that_zero_does_not_cut():
    name = "layers.3.mlp.router.expert_bias"
    assert role_of(name) == "buffer"
    assert is_whole(name)
    assert not is_whole("layers.3.mlp.router.weight")


@pytest.mark.parametrize("rate", [1e-3, 0.25])
def test_update_rate_is_the_change_of_a_step(rate):
    assert updated([[2, 0]], rate=rate) == pytest.approx([-rate, rate])
