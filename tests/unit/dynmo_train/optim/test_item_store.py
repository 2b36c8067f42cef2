"""The item store: gate and up of a gated MLP lie together, and nothing is shared, however an item came here."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.layer_list import masks_of
from dynmo_train.models.layers.gated import are_stacked
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.optim.item_sharding import ItemBuilder, ItemSharding
from dynmo_train.optim.item_state import ItemState
from dynmo_train.optim.item_store import ItemStore, OptimizerStates
from dynmo_train.optim.optimizers.protocol import Update
from dynmo_train.optim.optimizers.sgd import SGDSettings

MLP = "layers.0.mlp"
SETTINGS = SGDSettings(momentum=0.9, weight_decay=0.1)
FAMILY = Llama(
    LlamaShape(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=4,
        vocab_size=10,
        padded_vocab_size=12,
    )
)


def empty_store():
    builder = ItemBuilder(sharding=ItemSharding(family=FAMILY), device=torch.device("cpu"))
    return ItemStore(builder, OptimizerStates(SETTINGS, sharding=builder.sharding), SparseTable())


def stepped(store):
    """One update with gradients that depend on the values alone."""
    for _, _, parameter in store.parameters():
        parameter.grad = parameter.detach() * 0.5 + 0.1
    store.step(Update(lr=1e-2, weight_decay=0.1))
    return {name: tensor.clone() for name, tensor in store.export(MLP).tensors.items()}


@pytest.mark.parametrize("owned", [True, False])
def test_loaded_item_has_the_layout_of_a_built_one(owned):
    built, loaded = empty_store(), empty_store()
    built.build(MLP)
    state = built.export(MLP)
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    loaded.load_state(MLP, ItemState(tensors=tensors, steps=dict(state.steps)), owned=owned)
    for store in (built, loaded):
        mlp = store.modules[MLP]
        assert are_stacked(mlp.gate.weight, mlp.up.weight)
    # The optimizer updates the parameters that the module reads.
    expected = stepped(built)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stepped(loaded).items())
    assert torch.equal(loaded.modules[MLP].up.weight, expected[f"{MLP}.up.weight"])


def test_loaded_item_outlives_the_memory_that_it_was_copied_from():
    source, loaded = empty_store(), empty_store()
    source.build(MLP)
    stepped(source)
    for name, layer in masks_of(MLP, source.modules[MLP]).items():
        source.prune(MLP, name, layer, torch.arange(layer.weight.numel()).reshape(layer.weight.shape) % 3 > 0)
    state = source.export(MLP)
    expected = {name: tensor.clone() for name, tensor in state.tensors.items()}
    assert any(name.endswith(".mask") for name in expected)
    loaded.load_state(MLP, state)
    for tensor in state.tensors.values():
        tensor.zero_()
    found = loaded.export(MLP).tensors
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
