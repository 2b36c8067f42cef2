"""Items updated by apex's FusedAdam and by torch's AdamW: the same weights, moments and counts, moves included."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.layer_list import parameters_of
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.optim.item_sharding import ItemBuilder, ItemSharding
from dynmo_train.optim.item_state import ItemState
from dynmo_train.optim.item_store import ItemStore, OptimizerStates
from dynmo_train.optim.optimizers.adamw import MOMENTS, AdamWSettings
from dynmo_train.optim.optimizers.protocol import Update

ITEMS = ("embedding", "layers.0.attention", "layers.0.mlp")
SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
FAMILY = Gpt(
    GptShape(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=4,
        vocab_size=10,
        padded_vocab_size=12,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        seed=5,
    )
)


class FusedAdam(torch.optim.Optimizer):
    """What apex's class of this name does, in plain torch: its signature, its state, its count of a whole group."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
    ):
        assert adam_w_mode
        assert not amsgrad
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                if group["params"]:
                    self._update(group)

    def _update(self, group):
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        correction1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correction2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if len(state) == 0:
                state["exp_avg"] = torch.zeros_like(p, dtype=torch.float)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float)
            m = state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
            v = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            update = (m / correction1) / ((v / correction2).sqrt() + group["eps"]) + group["weight_decay"] * p
            p.sub_(group["lr"] * update)


def empty_store(fused_adam):
    builder = ItemBuilder(sharding=ItemSharding(family=FAMILY), device=torch.device("cpu"))
    return ItemStore(builder, OptimizerStates(SETTINGS, fused_adam), SparseTable())


def built_store(fused_adam):
    store = empty_store(fused_adam)
    for name in ITEMS:
        store.build(name)
    return store


def take_steps(store, steps):
    """Gradients that depend on step and name only; from the fourth step on every third one leaves vectors out."""
    for step in steps:
        for _, name, parameter in store.parameters():
            if step > 3 and step % 3 == 0 and parameter.dim() == 1:
                continue
            generator = torch.Generator().manual_seed(sum(name.encode()) * 100 + step)
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1
        store.step(Update(lr=1e-2, weight_decay=SETTINGS.weight_decay))
        assert all(parameter.grad is None for _, _, parameter in store.parameters())


def moved(store, fused_adam):
    """The items in the hands of another worker, which gets copies of what this one exports."""
    other = empty_store(fused_adam)
    for name in ITEMS:
        state = store.export(name)
        tensors = {key: value.clone() for key, value in state.tensors.items()}
        other.load_state(name, ItemState(tensors=tensors, steps=dict(state.steps)))
    return other


def all_states(store):
    states = [store.export(name) for name in ITEMS]
    return {k: v for state in states for k, v in state.tensors.items()}, {
        k: v for state in states for k, v in state.steps.items()
    }


def assert_close(store, reference):
    tensors, steps = all_states(store)
    expected, expected_steps = all_states(reference)
    assert steps == expected_steps
    assert list(tensors) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=2e-6, atol=2e-7, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("after_move", [FusedAdam, None])
@pytest.mark.parametrize("before_move", [FusedAdam, None])
def test_item_store_ten_steps_with_a_move_match_torch(before_move, after_move):
    """Also where a checkpoint resumes on a machine with the other optimizer."""
    reference = built_store(None)
    take_steps(reference, range(1, 11))
    store = built_store(before_move)
    take_steps(store, range(1, 6))
    store = moved(store, after_move)
    take_steps(store, range(6, 11))
    assert_close(store, reference)
    counts = set(all_states(store)[1].values())
    assert counts == {8, 10}  # vectors had no gradient in two steps


def test_item_store_export_and_load_change_no_bit():
    store = built_store(FusedAdam)
    take_steps(store, range(1, 4))
    tensors, steps = all_states(store)
    assert {f"layers.0.mlp.fc1.weight.{key}" for key in MOMENTS} <= set(tensors)
    other, other_steps = all_states(moved(store, FusedAdam))
    assert steps == other_steps
    assert all(torch.equal(tensors[name], other[name]) for name in tensors)


@pytest.mark.parametrize("fused_adam", [FusedAdam, None])
def test_optimizer_states_drop_restarts_the_moments(fused_adam):
    store = built_store(fused_adam)
    take_steps(store, [1, 2])
    name = "layers.0.mlp.fc1.weight"
    store.optimizers.drop({name})
    state = store.export("layers.0.mlp")
    assert name not in state.steps
    assert f"{name}.exp_avg" not in state.tensors
    assert state.steps["layers.0.mlp.fc2.weight"] == 2
    take_steps(store, [3])
    assert store.export("layers.0.mlp").steps[name] == 1


def test_fused_adamw_groups_equal_steps_and_decay():
    calls = []

    class Counting(FusedAdam):
        def _update(self, group):
            calls.append(len(group["params"]))
            super()._update(group)

    store = empty_store(Counting)
    store.build("layers.0.mlp")
    take_steps(store, [1, 2])
    count = len(list(parameters_of("layers.0.mlp", store.modules["layers.0.mlp"])))
    assert calls == [2, count - 2] * 2 or calls == [count - 2, 2] * 2
