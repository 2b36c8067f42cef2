"""Small item stores with any optimizer, and the same parameters in a plain torch optimizer."""

from __future__ import annotations

import torch

from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.optim.item_sharding import ItemBuilder, ItemSharding
from dynmo_train.optim.item_state import ItemState
from dynmo_train.optim.item_store import ItemStore, OptimizerStates
from dynmo_train.optim.optimizers.protocol import Update
from dynmo_train.optim.optimizers.sgd import SGDSettings

ITEMS = ("embedding", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp", "head")
FAMILY = Gpt(
    GptShape(
        num_layers=2,
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


def empty_store(settings):
    builder = ItemBuilder(sharding=ItemSharding(family=FAMILY), device=torch.device("cpu"))
    return ItemStore(builder, OptimizerStates(settings, sharding=builder.sharding), SparseTable())


def built_store(settings, items=ITEMS):
    store = empty_store(settings)
    for name in items:
        store.build(name)
    return store


def gradient_of(name, step, shape):
    """A gradient that depends on step and name only."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 100 + step)
    return torch.randn(shape, generator=generator) * 0.1


def take_steps(store, steps, *, lr=1e-2, weight_decay=0.1, decoupled_lr=None, skip=lambda name, step: False):
    for step in steps:
        for _, name, parameter in store.parameters():
            if not skip(name, step):
                parameter.grad = gradient_of(name, step, parameter.shape)
        store.step(Update(lr=lr, weight_decay=weight_decay, decoupled_lr=decoupled_lr))


def moved(store, settings):
    """The items of another store, which gets copies of what this one exports."""
    other = empty_store(settings)
    for name in store.modules:
        state = store.export(name)
        tensors = {key: value.clone() for key, value in state.tensors.items()}
        other.load_state(name, ItemState(tensors=tensors, steps=dict(state.steps)))
    return other


def all_tensors(store):
    return {name: tensor for item in store.modules for name, tensor in store.export(item).tensors.items()}


def plain_parameters(where=lambda name: True):
    """Global name -> parameter with the initial weights of a store; without the tied output layer."""
    store = built_store(SGDSettings(momentum=0.0, weight_decay=0.0))
    return {
        name: torch.nn.Parameter(parameter.detach().clone())
        for _, name, parameter in store.parameters()
        if name not in FAMILY.ties and where(name)
    }
