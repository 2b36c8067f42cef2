"""Refuses a checkpoint with weights that the model of the run does not have.

``check_same_model`` compares the settings of both models. A weight that no setting announces would stay unread, and the
run would compute something else without a message.
"""

from __future__ import annotations

import torch

from ..._common.document import short_repr
from ...formats.checkpoint import Checkpoint, CheckpointError
from ...models.layer_list import expert_biases_of, parameters_of
from ...models.vocabulary_family import VocabularyShardedFamily
from ...optim.item_state import MEMORIES, REFERENCE
from ...optim.item_store import ItemStore

MAX_NAMES = 5


def check_all_weights_are_read(checkpoint: Checkpoint, store: ItemStore) -> None:
    """Check that every weight of a checkpoint belongs to an item of the model of this run.

    Masks, optimizer state and the references of adaptive freezing belong to weights; the memories of gradient
    compression belong to ranks.

    Args:
        checkpoint: checkpoint to load.
        store: item store of this rank; its items of other ranks are built on the meta device only.

    Raises:
        CheckpointError: a weight belongs to no item; the message names the first ones.
    """
    # Of the whole model: ranks that share experts or the vocabulary have some weights of an item.
    family = store.family.base if isinstance(store.family, VocabularyShardedFamily) else store.family
    modules = [(item.name, family.build(item.name, torch.device("meta"))) for item in family.items]
    modules += [(item.name, store.blueprint(item.name)) for item in store.family.items]
    expected = set()
    for item, module in modules:
        for name in (*parameters_of(item, module), *expert_biases_of(item, module)):
            expected.add(checkpoint.stored_name(store.sharding.stored_name(name)))
    memories = tuple(f".{kind}" for kind in MEMORIES)
    stored = checkpoint.names("parameter", "buffer")
    stored = [name for name in stored if not (".memory." in name and name.endswith(memories))]
    unread = [name for name in stored if name.removesuffix(f".{REFERENCE}") not in expected]
    if unread:
        listed = ", ".join(map(short_repr, unread[:MAX_NAMES])) + (", ..." if len(unread) > MAX_NAMES else "")
        raise CheckpointError(
            f"{checkpoint.directory}: has {len(unread)} weights that the model of this run does not have: {listed};"
            " they would be ignored, and the model would compute something else"
        )
