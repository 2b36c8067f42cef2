"""Refuses a checkpoint with weights that the model of the run does not have.

``check_same_model`` compares the settings of both models. A weight that no setting announces would stay unread, and the
run would compute something else without a message.
"""

from __future__ import annotations

import torch

from ..._common.document import short_repr
from ...formats.checkpoint import Checkpoint, CheckpointError
from ...models.layer_list import expert_biases_of, parameters_of
from ...optim.item_state import MEMORIES
from ...optim.item_store import ItemStore

MAX_NAMES = 5


def check_all_weights_are_read(checkpoint: Checkpoint, store: ItemStore) -> None:
    """Check that every weight of a checkpoint belongs to an item of the model of this run.

    Masks and optimizer state belong to weights, so they need no check of their own; those of gradient compression
    belong to ranks.

    Args:
        checkpoint: checkpoint to load.
        store: item store of this rank; its items of other ranks are built on the meta device only.

    Raises:
        CheckpointError: a weight belongs to no item; the message names the first ones.
    """
    expected = set()
    for item in store.family.items:
        # Ranks that share experts have some of an item's; others are of the whole item.
        for module in (store.blueprint(item.name), store.family.build(item.name, torch.device("meta"))):
            for name in (*parameters_of(item.name, module), *expert_biases_of(item.name, module)):
                expected.add(checkpoint.stored_name(store.sharding.stored_name(name)))
    memories = tuple(f".{kind}" for kind in MEMORIES)
    stored = checkpoint.names("parameter", "buffer")
    stored = [name for name in stored if not (".memory." in name and name.endswith(memories))]
    unread = [name for name in stored if name not in expected]
    if unread:
        listed = ", ".join(map(short_repr, unread[:MAX_NAMES])) + (", ..." if len(unread) > MAX_NAMES else "")
        raise CheckpointError(
            f"{checkpoint.directory}: has {len(unread)} weights that the model of this run does not have: {listed};"
            " they would be ignored, and the model would compute something else"
        )
