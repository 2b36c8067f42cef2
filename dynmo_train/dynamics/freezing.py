"""Layer freezing: from given steps on, the embedding and the first layers run no backward and receive no update.

Frozen items keep their forward, with dropout. Their optimizer state is dropped: a frozen front never trains again. A
weight that is tied to the head keeps training through the head, unless ``freeze_tied`` is set.

    items      embedding | layers.0 | layers.1 | layers.2 | ... | head
    step 1000  └─ frozen_items ─┘                 no autograd graph up to here: no backward, no gradient sent
    step 2000  └────── frozen_items ──────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..config.extensions import TechniqueSpec
from ..models.layer_list import SUBLAYERS, ItemSpec, parameters_of
from ..models.vocabulary_family import stored_ties, word_parameters
from .technique import Event, Technique, TechniqueBuilder, TechniqueContext

if TYPE_CHECKING:
    from ..config import Config


def layers_of(items: Sequence[ItemSpec]) -> list[str]:
    """Names of the transformer blocks, in list order; a block is one item or several."""
    blocks = (item for item in items if item.kind in SUBLAYERS or (item.kind == "layer" and item.name[-1].isdecimal()))
    return list(dict.fromkeys(item.layer for item in blocks))


def frozen_items(items: Sequence[ItemSpec], schedule: Sequence[tuple[int, int]], step: int) -> tuple[str, ...]:
    """Names of the items that are frozen after ``step``: the embedding and the first layers, in list order.

    Args:
        items: the layer list.
        schedule: (step, number of frozen layers from then on), in order of step.
        step: the last completed optimizer step.
    """
    count = max((layers for at, layers in schedule if at <= step), default=0)
    if count == 0:
        return ()
    front = set(layers_of(items)[:count])
    # Everything up to the last frozen layer, with items between the layers: a backward passes through none of them.
    last = max(index for index, item in enumerate(items) if item.layer in front)
    return tuple(item.name for item in items[: last + 1])


class LayerFreezing(Technique):
    """Freezes the front of the model on a schedule.

    Args:
        schedule: (step, number of frozen layers from then on), in order of step.
        freeze_tied: whether weights that the front shares with the head are frozen too.
        context: what the technique works on.
    """

    def __init__(self, schedule: Sequence[tuple[int, int]], freeze_tied: bool, context: TechniqueContext) -> None:
        self.schedule = tuple(schedule)
        self.items, self.store = context.family.items, context.store
        # Owner and copies together: a weight that one of them trains would differ from the others.
        ties = context.family.ties
        self._shards_train = bool(stored_ties(context.family)) and not freeze_tied
        self._still_training = set() if freeze_tied else {*ties, *ties.values()}
        self._frozen_weights = {*ties, *ties.values()} if freeze_tied else set()

    def after_step(self, step: int) -> Event | None:
        """Freeze the layers that are due after this step."""
        due = frozen_items(self.items, self.schedule, step)
        if due == self.frozen_items:
            return None
        # What is frozen is a function of the step: the same code runs here and after a restart.
        self.resume(step)
        later = [at for at, _ in self.schedule if at > step]
        return Event(
            kind="frozen",
            step=step,
            message=f"frozen: {due[0]} to {due[-1]}",
            detail={"frozen_items": list(due)},
            next_expected_step=min(later, default=None),
            rebuild=True,
        )

    def resume(self, step: int) -> None:
        """Freeze the layers that are frozen after ``step``, and drop their optimizer state."""
        self.frozen_items = frozen_items(self.items, self.schedule, step)
        self.store.optimizers.drop(self.frozen_parameters())

    def frozen_parameters(self) -> set[str]:
        """Names of this process's parameters that receive no update."""
        names = {
            name
            for item in self.frozen_items
            if item in self.store.modules
            for name in parameters_of(item, self.store.modules[item])
        }
        if self.frozen_items and not self._shards_train:
            names |= word_parameters(self.store.family, self.store.modules)
        return (names - self._still_training) | (self._frozen_weights if self.frozen_items else set())


def _build(config: Config) -> TechniqueBuilder | None:
    options = config.freezing
    if options.freeze_steps and not options.freeze_adaptive:
        return partial(LayerFreezing, options.freeze_steps, options.freeze_tied)
    return None


TECHNIQUE = TechniqueSpec(build=_build)
