"""SGD: equal to torch's, with state that moves."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.optim.optimizers.protocol import Update
from dynmo_train.optim.optimizers.sgd import SGDSettings
from tests.unit.dynmo_train.optim.optimizers.stores import (
    FAMILY,
    all_tensors,
    built_store,
    gradient_of,
    moved,
    plain_parameters,
    take_steps,
)


def skip(name, step):
    """Vectors have no gradient in every third step, one matrix has none in the first two."""
    return (step % 3 == 0 and name.endswith(".bias")) or (step < 3 and name == "layers.1.mlp.fc2.weight")


def torch_sgd(momentum, steps):
    """The weights after ``steps`` of ``torch.optim.SGD``, the plain loop over parameters."""
    parameters = plain_parameters()
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=momentum, foreach=False)
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = None if skip(name, step) else gradient_of(name, step, parameter.shape)
        optimizer.step()
    buffers = {name: optimizer.state[p].get("momentum_buffer") for name, p in parameters.items()}
    return parameters, buffers


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_ten_steps_with_a_move_equal_torch(momentum):
    settings = SGDSettings(momentum=momentum, weight_decay=0.1)
    store = built_store(settings)
    take_steps(store, range(1, 6), skip=skip)
    store = moved(store, settings)
    take_steps(store, range(6, 11), skip=skip)
    expected, buffers = torch_sgd(momentum, range(1, 11))
    tensors = all_tensors(store)
    for name, parameter in expected.items():
        torch.testing.assert_close(tensors[name], parameter.detach(), rtol=1e-6, atol=1e-8)
        if momentum:
            torch.testing.assert_close(tensors[f"{name}.momentum_buffer"], buffers[name], rtol=1e-6, atol=1e-8)
    assert any(name.endswith(".momentum_buffer") for name in tensors) == bool(momentum)


def test_sgd_counts_the_updates_of_each_parameter():
    store = built_store(SGDSettings(momentum=0.9, weight_decay=0.0))
    take_steps(store, range(1, 7), skip=skip)
    steps = store.export("layers.1.mlp").steps
    assert steps["layers.1.mlp.fc1.weight"] == 6
    assert steps["layers.1.mlp.fc2.weight"] == 4
    assert steps["layers.1.mlp.fc1.bias"] == 4


def test_sgd_skipped_update_is_not_counted():
    store = built_store(SGDSettings(momentum=0.9, weight_decay=0.0))
    take_steps(store, [1])
    for skipped in (1.0, 0.0):
        for _, name, parameter in store.parameters():
            parameter.grad = gradient_of(name, 2, parameter.shape)
        store.step(Update(lr=1e-2, weight_decay=0.0, skip=torch.tensor(skipped)))
    assert set(store.export("layers.1.mlp").steps.values()) == {2}


def test_sgd_tied_copy_is_updated_once():
    store = built_store(SGDSettings(momentum=0.9, weight_decay=0.0))
    take_steps(store, [1], weight_decay=0.0)
    (copy, owner), *_ = FAMILY.ties.items()
    weights = {name: parameter for _, name, parameter in store.parameters()}
    before = plain_parameters()[owner].detach()
    assert torch.equal(weights[copy], weights[owner])
    torch.testing.assert_close(weights[owner].detach(), before - 1e-2 * gradient_of(owner, 1, before.shape))
