"""Every optimizer of the option, its state, and the decoupled learning rate of embeddings."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from dynmo_train.config import config_of
from dynmo_train.config.sections.optimizer import OptimizerName
from dynmo_train.formats.checkpoint.document import OPTIMIZER_STATE, state_shape
from dynmo_train.models.layer_list import is_embedding_or_output
from dynmo_train.optim.item_state import parameter_of, role_of
from dynmo_train.optim.item_store import OptimizerStates
from dynmo_train.optim.optimizers.adamw import AdamWSettings
from dynmo_train.optim.optimizers.protocol import Update
from dynmo_train.optim.optimizers.registry import OPTIMIZERS, optimizer_settings, option_of_type, state_bytes
from tests.unit.dynmo_train.config.small_config import SMALL
from tests.unit.dynmo_train.optim.optimizers.stores import (
    FAMILY,
    all_tensors,
    built_store,
    gradient_of,
    moved,
    take_steps,
)
from tests.unit.dynmo_train.optim.optimizers.test_adamw import FusedAdam


def settings_of(name):
    return optimizer_settings(config_of(**{**SMALL, "optimizer": name}).optimizer)


def test_optimizers_are_those_of_the_option():
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))
    assert {kind.STORED_TYPE for kind in OPTIMIZERS.values()} <= set(OPTIMIZER_STATE)
    assert option_of_type("adamw") == "adam"
    assert option_of_type("sgd") == "sgd"


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_optimizer_state_has_the_declared_names_and_shapes(name):
    settings = settings_of(name)
    store = built_store(settings)
    take_steps(store, [1])
    tensors = all_tensors(store)
    state = {each: tuple(tensor.shape) for each, tensor in tensors.items() if role_of(each) == "optimizer"}
    parameters = {each: tuple(tensor.shape) for each, tensor in tensors.items() if role_of(each) == "parameter"}
    assert state == {
        f"{parameter}.{key}": shape
        for parameter, of in parameters.items()
        for key, shape in settings.state_shapes(parameter, of).items()
    }
    for each, shape in state.items():
        suffix = each.rpartition(".")[2]
        assert suffix in OPTIMIZER_STATE[settings.STORED_TYPE]
        assert shape == tuple(state_shape(suffix, list(parameters[parameter_of(each)])))
    assert state_bytes(settings, parameters) == 4 * sum(math.prod(shape) for shape in state.values())


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_optimizer_moved_items_have_the_bits_of_those_that_stayed(name):
    settings = settings_of(name)
    stayed, other = built_store(settings), built_store(settings)
    take_steps(stayed, range(1, 7))
    take_steps(other, range(1, 4))
    other = moved(other, settings)
    take_steps(other, range(4, 7))
    expected, got = all_tensors(stayed), all_tensors(other)
    assert list(got) == list(expected)
    assert all(torch.equal(got[each], tensor) for each, tensor in expected.items())


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_optimizer_update_does_not_depend_on_the_other_items(name):
    settings = settings_of(name)
    whole = built_store(settings)
    take_steps(whole, range(1, 4))
    expected = all_tensors(whole)
    for items in (("layers.0.attention",), ("layers.1.mlp", "layers.0.mlp")):
        part = built_store(settings, items)
        take_steps(part, range(1, 4))
        for each, tensor in all_tensors(part).items():
            assert torch.equal(tensor, expected[each]), each


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_optimizer_divides_gradients_and_skips_updates(name):
    """A power of two divides without rounding; a skipped update leaves gradients that are not finite nowhere."""
    settings = settings_of(name)
    expected, store = built_store(settings), built_store(settings)
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    for step in (1, 2, 3):
        take_steps(expected, [step])
        for _, each, parameter in store.parameters():
            parameter.grad = gradient_of(each, step, parameter.shape) * 2
        store.step(Update(lr=1e-2, weight_decay=0.1, divisor=two, skip=1 - one))
        for _, _, parameter in store.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf)
        store.step(Update(lr=1e-2, weight_decay=0.1, divisor=one * torch.inf, skip=one))
        assert all(parameter.grad is None for _, _, parameter in store.parameters())
    got = all_tensors(store)
    assert all(torch.equal(got[each], tensor) for each, tensor in all_tensors(expected).items())


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_decoupled_lr_applies_to_word_embedding_and_output(name):
    settings = settings_of(name)
    before = all_tensors(built_store(settings))
    frozen, trained = built_store(settings), built_store(settings)
    take_steps(frozen, [1], decoupled_lr=0.0)
    take_steps(trained, [1], lr=0.0, decoupled_lr=1e-2)
    for each in before:
        apart = is_embedding_or_output(each)
        assert torch.equal(all_tensors(frozen)[each], before[each]) == apart, each
        assert torch.equal(all_tensors(trained)[each], before[each]) != apart, each
    assert {each for each in before if is_embedding_or_output(each)} == {"embedding.word.weight", "head.weight"}
    assert FAMILY.ties == {"head.weight": "embedding.word.weight"}


def test_decoupled_lr_with_apex_equals_that_with_torch():
    settings = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    expected, store = built_store(settings), built_store(settings)
    store.optimizers = OptimizerStates(settings, FusedAdam)
    for item in store.modules:
        store.optimizers.add(item, store.local_parameters(item))
    store.optimizers.alias(FAMILY.ties)
    for each in (expected, store):
        take_steps(each, range(1, 4), decoupled_lr=3e-2)
    for name, tensor in all_tensors(expected).items():
        torch.testing.assert_close(all_tensors(store)[name], tensor, rtol=1e-5, atol=1e-6)
