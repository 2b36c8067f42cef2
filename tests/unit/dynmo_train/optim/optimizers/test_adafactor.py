"""Adafactor: equal to torch's, with factors that move, are stored and leave pruned weights alone."""

from __future__ import annotations

import torch

from dynmo_train.models.layer_list import masks_of
from dynmo_train.optim.optimizers.adafactor import AdafactorSettings
from dynmo_train.optim.optimizers.protocol import Update
from tests.unit.dynmo_train.optim.optimizers.stores import (
    all_tensors,
    built_store,
    gradient_of,
    moved,
    plain_parameters,
    take_steps,
)

SETTINGS = AdafactorSettings(weight_decay=0.1)


def skip(name, step):
    return step < 3 and name == "layers.1.mlp.fc2.weight"


def test_adafactor_ten_steps_with_a_move_equal_torch():
    parameters = plain_parameters()
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.Adafactor(groups, lr=1e-2, foreach=True)
    for step in range(1, 11):
        for name, parameter in parameters.items():
            parameter.grad = None if skip(name, step) else gradient_of(name, step, parameter.shape)
        optimizer.step()
    store = built_store(SETTINGS)
    take_steps(store, range(1, 6), skip=skip)
    store = moved(store, SETTINGS)
    take_steps(store, range(6, 11), skip=skip)
    tensors = all_tensors(store)
    for name, parameter in parameters.items():
        torch.testing.assert_close(tensors[name], parameter.detach(), rtol=1e-6, atol=1e-7)
        for key in SETTINGS.state_shapes(name, parameter.shape):
            torch.testing.assert_close(tensors[f"{name}.{key}"], optimizer.state[parameter][key], rtol=1e-6, atol=1e-9)
    assert store.export("layers.1.mlp").steps["layers.1.mlp.fc2.weight"] == 8


def test_adafactor_pruned_weights_stay_zero():
    item, name = "layers.0.mlp", "layers.0.mlp.fc1.weight"
    store = built_store(SETTINGS, [item])
    take_steps(store, [1])
    layer = masks_of(item, store.modules[item])[name]
    mask = torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    store.prune(item, name, layer, mask)
    for _, each, parameter in store.parameters():
        parameter.grad = gradient_of(each, 2, parameter.shape) * (mask if each == name else 1)
    store.step(Update(lr=1e-2, weight_decay=0.1))
    tensors = all_tensors(store)
    assert not tensors[name][~mask].any()
    assert tensors[name][mask].all()
    assert tensors[f"{name}.row_var"].all()
