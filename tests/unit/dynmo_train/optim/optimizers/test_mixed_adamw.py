"""AdamW with moments in bfloat16: near torch's, with unbiased rounding, state that moves and loads from float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.optim.item_state import ItemState
from dynmo_train.optim.optimizers import mixed_adamw
from dynmo_train.optim.optimizers.adamw import AdamWSettings
from dynmo_train.optim.optimizers.mixed_adamw import MixedAdamW, round_stochastically
from dynmo_train.optim.optimizers.protocol import OptimizerContext, Update
from dynmo_train.optim.optimizers.registry import state_bytes
from tests.unit.dynmo_train.optim.optimizers.stores import (
    FAMILY,
    all_tensors,
    built_store,
    empty_store,
    gradient_of,
    moved,
    take_steps,
)

FLOAT32 = AdamWSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
BOTH = replace(FLOAT32, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
FIRST = replace(FLOAT32, exp_avg_dtype=torch.bfloat16)


def test_mixed_adamw_in_float32_equals_torch(monkeypatch):
    monkeypatch.setattr(mixed_adamw, "BATCH_ELEMENTS", 100)
    parameters = {f"layers.0.mlp.{n}": torch.nn.Parameter(torch.randn(8, 8)) for n in range(3)}
    plain = [torch.nn.Parameter(each.detach().clone()) for each in parameters.values()]
    mixed = MixedAdamW(FLOAT32)
    mixed.add(parameters)
    torchs = torch.optim.AdamW(plain, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1, 11):
        for (name, parameter), other in zip(parameters.items(), plain, strict=True):
            parameter.grad, other.grad = gradient_of(name, step, (8, 8)), gradient_of(name, step, (8, 8))
        mixed.step(Update(lr=1e-2, weight_decay=0.1))
        torchs.step()
    for parameter, other in zip(parameters.values(), plain, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(mixed.moments(parameter)["exp_avg_sq"], torchs.state[other]["exp_avg_sq"])


@pytest.mark.parametrize("settings", [BOTH, FIRST])
def test_mixed_adamw_stays_near_float32_and_keeps_its_dtypes(settings):
    expected, store = built_store(FLOAT32), built_store(settings)
    for each in (expected, store):
        take_steps(each, range(1, 21), lr=1e-3)
    tensors = all_tensors(store)
    for name, tensor in all_tensors(expected).items():
        if not name.endswith(("exp_avg", "exp_avg_sq")):
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=2e-3, msg=name)
    dtypes = {tensors[f"layers.0.mlp.fc1.weight.{key}"].dtype for key in ("exp_avg", "exp_avg_sq")}
    assert dtypes == {settings.exp_avg_dtype, settings.exp_avg_sq_dtype}
    assert settings.describe(OptimizerContext()) == "AdamW with moments in bfloat16"


def test_mixed_adamw_moved_items_and_other_items_change_no_bit():
    stayed, other = built_store(BOTH), built_store(BOTH)
    take_steps(stayed, range(1, 7))
    take_steps(other, range(1, 4))
    other = moved(other, BOTH)
    take_steps(other, range(4, 7))
    part = built_store(BOTH, ["layers.1.mlp"])
    take_steps(part, range(1, 7))
    expected = all_tensors(stayed)
    for got in (all_tensors(other), all_tensors(part)):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in got.items())


def test_mixed_adamw_copies_of_a_tied_weight_stay_equal():
    """On two ranks both copies are updated; here one store has the owner alone, another the copy."""
    (copy, owner), *_ = FAMILY.ties.items()
    first, second = built_store(BOTH, ["embedding"]), built_store(BOTH, ["head"])
    for step in range(1, 6):
        for store in (first, second):
            for _, name, parameter in store.parameters():
                parameter.grad = gradient_of(FAMILY.ties.get(name, name), step, parameter.shape)
            store.step(Update(lr=1e-2, weight_decay=0.1))
    for key in ("", ".exp_avg", ".exp_avg_sq"):
        assert torch.equal(all_tensors(first)[owner + key], all_tensors(second)[copy + key])


@pytest.mark.parametrize(("before", "after"), [(FLOAT32, BOTH), (BOTH, FLOAT32)])
def test_moments_of_another_dtype_are_cast_on_load(before, after):
    store = built_store(before)
    take_steps(store, [1, 2])
    other = empty_store(after)
    for item in store.modules:
        state = store.export(item)
        other.load_state(item, ItemState(tensors=dict(state.tensors), steps=dict(state.steps)))
    take_steps(other, [3])
    moment = other.optimizers.moments("layers.0.mlp.fc1.weight")["exp_avg_sq"]
    assert moment.dtype == after.exp_avg_sq_dtype
    assert other.optimizers.steps("layers.0.mlp.fc1.weight") == 3


def test_round_stochastically_keeps_the_mean_and_both_neighbors():
    """1 + 1/512 is a quarter of a bfloat16 step above 1."""
    values = torch.full((20_000,), 1 + 1 / 512)
    rounded = round_stochastically(values, 7).float()
    assert set(rounded.tolist()) == {1.0, 1 + 1 / 128}
    assert rounded.mean().item() == pytest.approx(1 + 1 / 512, abs=1e-4)
    assert torch.equal(round_stochastically(values, 7).float(), rounded)
    exact = torch.tensor([0.0, 0.5, 3.0, torch.inf])
    assert torch.equal(round_stochastically(exact, 1).float(), exact)


def test_exp_avg_sq_falls_with_a_slow_decay_rate():
    """Rounded to the nearest number, 0.999 of a bfloat16 is that bfloat16."""
    parameter = torch.nn.Parameter(torch.zeros(4_096))
    optimizer = MixedAdamW(replace(BOTH, beta2=0.999))
    optimizer.add({"layers.0.mlp.norm.weight": parameter})
    moments = {"exp_avg": torch.zeros(4_096).bfloat16(), "exp_avg_sq": torch.ones(4_096).bfloat16()}
    optimizer.load_state(parameter, 1, moments)
    for _ in range(200):
        parameter.grad = torch.zeros(4_096)
        optimizer.step(Update(lr=1e-3, weight_decay=0.0))
    assert optimizer.moments(parameter)["exp_avg_sq"].float().mean().item() == pytest.approx(0.999**200, rel=0.02)


def test_state_bytes_of_bfloat16_moments_are_half():
    shapes = {"layers.0.mlp.fc1.weight": (16, 8), "layers.0.mlp.fc1.bias": (16,)}
    assert state_bytes(BOTH, shapes) * 2 == state_bytes(FLOAT32, shapes) == 8 * 144
    assert state_bytes(FIRST, shapes) == 6 * 144
