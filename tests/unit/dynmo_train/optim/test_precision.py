"""The loss scale's rule, and items that run on cast copies of float32 parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynmo_train._common.errors import UsageError
from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.layers.grouped_linear import stacked
from dynmo_train.optim.precision import ComputeCopies, LossScaler, LossScaling, unscale

DYNAMIC = LossScaling(initial=16.0, minimum=2.0, window=3, hysteresis=2)


def scales(scaler, outcomes):
    scales = []
    for finite in outcomes:
        scaler.update(finite=finite)
        scales.append(scaler.scale)
    return scales


def test_loss_scaler_follows_hysteresis_and_window():
    # By hand: the first overflow changes nothing, each later one halves; three clean steps double and reset the count.
    outcomes = [False, False, False, True, True, True, False, False]
    assert scales(LossScaler(DYNAMIC), outcomes) == [16, 8, 4, 4, 4, 8, 8, 4]


def test_loss_scaler_never_falls_below_its_minimum():
    assert scales(LossScaler(DYNAMIC), [False] * 8)[-1] == 2


def test_loss_scaler_constant_or_none_never_changes():
    constant = LossScaling(initial=128.0, minimum=1.0, window=0, hysteresis=1)
    assert scales(LossScaler(constant), [False, True] * 3) == [128.0] * 6
    assert scales(LossScaler(None), [False, True]) == [1.0, 1.0]
    assert LossScaler(None).state() is None


@pytest.mark.parametrize("at", range(8))
def test_loss_scaler_load_state_continues(at):
    outcomes = [False, False, True, True, True, False, True, False]
    whole = LossScaler(DYNAMIC)
    expected = scales(whole, outcomes)
    first, second = LossScaler(DYNAMIC), LossScaler(DYNAMIC)
    before = scales(first, outcomes[:at])
    second.load_state(first.state())
    assert before + scales(second, outcomes[at:]) == expected


@pytest.mark.parametrize("state", [{}, {"scale": "x", "clean_steps": 0, "overflows_left": 1}])
def test_loss_scaler_load_state_refuses_other_fields(state):
    with pytest.raises(UsageError, match="loss scale"):
        LossScaler(DYNAMIC).load_state(state)


def test_compute_copies_accumulate_gradients_in_float32():
    torch.manual_seed(0)
    master = nn.Linear(6, 4)
    copies = ComputeCopies(master, torch.bfloat16)
    plain = nn.Linear(6, 4).to(torch.bfloat16)
    plain.load_state_dict(master.state_dict())
    total = torch.zeros(4, 6)
    for seed in range(5):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        plain.zero_grad()
        plain(x).square().sum().backward()
        total += plain.weight.grad.float()
        output = copies(x)
        assert output.dtype == torch.bfloat16
        output.square().sum().backward()
    assert master.weight.grad.dtype == torch.float32
    assert torch.equal(master.weight.grad, total)
    assert master.weight.dtype == torch.float32


def test_compute_copies_refresh_follows_the_masters():
    master = nn.Linear(2, 2)
    copies = ComputeCopies(master, torch.float16)
    x = torch.ones(1, 2, dtype=torch.float16)
    before = copies(x)
    with torch.no_grad():
        master.weight.add_(1.0)
    assert torch.equal(copies(x), before)
    copies.refresh()
    assert not torch.equal(copies(x), before)


def test_compute_copies_of_experts_are_consecutive():
    """A grouped product then reads them in place, without a copy of all experts."""
    shape = MoeShape(num_experts=3)
    experts = MoeMlp(
        moe=shape, width=8, inner=16, activation="gelu", norm=nn.LayerNorm(8), device=torch.device("cpu")
    ).bfloat16()
    found = []
    with torch.no_grad():
        for number, parameter in enumerate(experts.parameters()):
            parameter.fill_(number)
    experts.experts.register_forward_pre_hook(
        lambda module, _: found.extend([[each.fc1.weight, each.fc2.weight, each.fc1.bias] for each in module.values()])
    )
    ComputeCopies(experts.float(), torch.bfloat16)(torch.zeros(1, 4, 8, dtype=torch.bfloat16))
    for tensors in zip(*found, strict=True):
        whole = stacked(tensors)
        assert whole.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
        assert torch.equal(whole, torch.stack(tensors))


def test_unscale_by_a_power_of_two_is_exact():
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(1))
    scaled = gradient * 2.0**20
    unscale([scaled], 2.0**20)
    assert torch.equal(scaled, gradient)
