"""Freezing of the front: from given steps on, the embedding's lookup and the first layers run no backward.

The frozen items keep their forward (with dropout). Their optimizer state is dropped: a front never thaws. A weight that
is tied to the head goes on training through it, unless ``freeze_tied``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.layer_list import SUBLAYERS, ItemSpec, parameters_of
from ..optim.item_store import ItemStore
from ..parallel.process_groups import World
from .technique import Event


def layers_of(items: Sequence[ItemSpec]) -> list[str]:
    """Names of the blocks, in list order; a block may be one item."""
    blocks = (item for item in items if item.kind in SUBLAYERS or (item.kind == "layer" and item.name[-1].isdecimal()))
    return list(dict.fromkeys(item.layer for item in blocks))


def frozen_items(items: Sequence[ItemSpec], schedule: Sequence[tuple[int, int]], step: int) -> tuple[str, ...]:
    """Names of the items that are frozen after ``step``: embedding and first layers, in list order.

    Args:
        schedule: (step, number of frozen layers from then on), in order of step.
    """
    count = max((layers for at, layers in schedule if at <= step), default=0)
    if count == 0:
        return ()
    front = set(layers_of(items)[:count])
    last = max(index for index, item in enumerate(items) if item.layer in front)
    return tuple(item.name for item in items[: last + 1])


class LayerFreezing:
    """Keeps the frozen front of the held items as the schedule says."""

    def __init__(
        self,
        schedule: Sequence[tuple[int, int]],
        items: Sequence[ItemSpec],
        store: ItemStore,
        ties: Mapping[str, str],
        freeze_tied: bool,
    ) -> None:
        self.schedule, self.items, self.store = tuple(schedule), items, store
        self._still_training = set() if freeze_tied else {*ties, *ties.values()}
        self._frozen_weights = {*ties, *ties.values()} if freeze_tied else set()
        self.frozen: tuple[str, ...] = ()

    def before_step(self, step: int) -> None:
        """Called before each step; a schedule needs nothing of it."""

    def set_world(self, world: World) -> None:
        """Go on among the processes of ``world``: some have left; a schedule needs nothing of it."""

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps beside the frozen items; None for a schedule."""
        return None

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what ``state`` gave, before ``resume``."""

    def after_step(self, step: int) -> Event | None:
        """Freeze what is due after this step."""
        due = frozen_items(self.items, self.schedule, step)
        if due == self.frozen:
            return None
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
        """Freeze what is frozen after ``step``, and drop its optimizer state."""
        self.frozen = frozen_items(self.items, self.schedule, step)
        self.store.drop_moments(self.without_updates())

    def without_updates(self) -> set[str]:
        """Names of the held parameters that train no more."""
        names = {
            name
            for item in self.frozen
            if item in self.store.modules
            for name in parameters_of(item, self.store.modules[item])
        }
        return (names - self._still_training) | (self._frozen_weights if self.frozen else set())
