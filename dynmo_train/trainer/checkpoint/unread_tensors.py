"""Refuses a checkpoint with weights that the model of the run does not have.

``check_same_model`` compares the settings of both models. A weight that no setting announces would stay unread, and the
run would compute something else without a message.

The names are those of items that are built on the meta device. With many experts that takes a second for 12 layers of
128, so an item is built once, on one rank; each rank checks the weights of its share of the items.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from ..._common.document import short_repr
from ...formats.checkpoint import Checkpoint, CheckpointError
from ...models.families.vocabulary_family import VocabularyShardedFamily
from ...models.layer_list import ModelFamily, expert_biases_of, parameters_of
from ...optim.item_state import MEMORIES, REFERENCE
from ...optim.item_store import ItemStore
from ...parallel.process_groups import World

MAX_NAMES = 5


def check_all_weights_are_read(checkpoint: Checkpoint, store: ItemStore, world: World) -> None:
    """Check that every weight of a checkpoint belongs to an item of the model of this run; each rank checks a share.

    Masks, optimizer state and the references of adaptive freezing belong to weights; the memories of gradient
    compression belong to ranks.

    Args:
        checkpoint: checkpoint to load.
        store: item store of this rank; its items of other ranks are built on the meta device only.
        world: all ranks call this, inside of ``run_on_all_ranks``.

    Raises:
        CheckpointError: a weight belongs to no item; the message names the first ones.
    """
    # Of the whole model: ranks that share experts or the vocabulary have some weights of an item.
    family = store.family.base if isinstance(store.family, VocabularyShardedFamily) else store.family
    unread = unread_weights(checkpoint, family, world)
    if unread:
        # The run may have divided or extended an item.
        own = {
            checkpoint.stored_name(store.sharding.stored_name(name))
            for item in store.family.items
            for name in _names(item.name, store.blueprint(item.name))
        }
        unread = [name for name in unread if name.removesuffix(f".{REFERENCE}") not in own]
    _refuse(checkpoint, unread)


def check_model_has_all_weights(checkpoint: Checkpoint, family: ModelFamily, world: World) -> None:
    """As :func:`check_all_weights_are_read`, of the model that an evaluation or a generation runs.

    Args:
        checkpoint: checkpoint to load.
        family: the model of its manifest.
        world: all ranks call this, inside of ``run_on_all_ranks``.

    Raises:
        CheckpointError: a weight belongs to no item; the message names the first ones.
    """
    _refuse(checkpoint, unread_weights(checkpoint, family, world))


def unread_weights(checkpoint: Checkpoint, family: ModelFamily, world: World) -> list[str]:
    """The stored weights that no item of a model has, among those of this rank's share of the items.

    Args:
        checkpoint: the stored weights.
        family: the model.
        world: its ranks share the items.
    """
    memories = tuple(f".{kind}" for kind in MEMORIES)
    stored = [
        name for name in checkpoint.names("parameter", "buffer") if not (".memory." in name and name.endswith(memories))
    ]
    numbers = {item.name: number for number, item in enumerate(family.items)}
    by_item: dict[str | None, list[str]] = {}
    for name in stored:
        by_item.setdefault(_item_of(name, numbers), []).append(name)
    unread: list[str] = []
    for item, names in by_item.items():
        # Neighbors, because attention and MLP alternate; weights of no item are those of the first rank.
        if (0 if item is None else numbers[item] * world.size // len(numbers)) != world.rank:
            continue
        expected: set[str] = set()
        if item is not None:
            module = family.build(item, torch.device("meta"))
            expected = {checkpoint.stored_name(name) for name in _names(item, module)}
        unread += [name for name in names if name.removesuffix(f".{REFERENCE}") not in expected]
    return unread


def _item_of(name: str, items: Container[str]) -> str | None:
    """The item whose weight has a name: the longest one that it extends."""
    parts = name.split(".")
    return next((item for end in range(len(parts) - 1, 0, -1) if (item := ".".join(parts[:end])) in items), None)


def _names(item: str, module: nn.Module) -> list[str]:
    return [*parameters_of(item, module), *expert_biases_of(item, module)]


def _refuse(checkpoint: Checkpoint, unread: list[str]) -> None:
    if unread:
        listed = ", ".join(map(short_repr, unread[:MAX_NAMES])) + (", ..." if len(unread) > MAX_NAMES else "")
        raise CheckpointError(
            f"{checkpoint.directory}: has {len(unread)} weights that the model of this run does not have: {listed};"
            " they would be ignored, and the model would compute something else"
        )
