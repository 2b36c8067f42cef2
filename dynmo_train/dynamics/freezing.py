"""Layer freezing: from given steps on, the embedding and the first layers run no backward and receive no update.

Frozen items keep their forward, with dropout. Their optimizer state is dropped: a frozen front never trains again. A
weight that is tied to a later item, as the word table to the head, keeps training through its copy, unless
``freeze_tied`` is set.

    items      embedding | layers.0 | layers.1 | layers.2 | ... | head
    step 1000  └─ frozen_items ─┘                 no autograd graph up to here: no backward, no gradient sent
    step 2000  └────── frozen_items ──────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .._common.console import human_bytes
from ..config.extensions import TechniqueSpec
from ..models.families.multi_token import is_prediction
from ..models.families.vocabulary_family import stored_ties, word_parameters
from ..models.layer_list import SUBLAYERS, ItemSpec, parameters_of
from ..parallel.process_groups import World, all_gather_objects
from .technique import Event, Technique, TechniqueBuilder, TechniqueContext

if TYPE_CHECKING:
    from ..config import Config


def layers_of(items: Sequence[ItemSpec]) -> list[str]:
    """Names of the transformer blocks, in list order; a block is one item or several."""
    blocks = (
        item
        for item in items
        if item.kind in SUBLAYERS or (item.kind == "layer" and item.name[-1].isdecimal() and not is_prediction(item))
    )
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


def weights_tied_to(ties: Mapping[str, str], items: Iterable[str]) -> set[str]:
    """Names of the tied weights that the items own, with their copies anywhere in the model.

    Args:
        ties: copy -> owner.
        items: names of items.
    """
    prefixes = tuple(f"{item}." for item in items)
    owned = {owner for owner in ties.values() if owner.startswith(prefixes)}
    return owned | {copy for copy, owner in ties.items() if owner in owned}


@dataclass(frozen=True, kw_only=True)
class FreedBytes:
    """Memory that a freeze releases on each pipeline rank: the largest of the rank's processes.

    Attributes:
        gradients: bytes of the gradients that no longer exist, during and after the backward pass.
        optimizer: bytes of optimizer state.
    """

    gradients: list[int]
    optimizer: list[int]

    @classmethod
    def by_rank(cls, world: World, gradients: int, optimizer: int) -> FreedBytes:
        """Gather the bytes of all processes; every rank calls this.

        Args:
            world: process groups.
            gradients: of this process.
            optimizer: of this process.
        """
        found = all_gather_objects(world, [world.pipeline_rank, gradients, optimizer])
        largest = [[0, 0] for _ in range(world.dims.pipeline)]
        for rank, *sizes in found:
            largest[rank] = [max(pair) for pair in zip(largest[rank], sizes, strict=True)]
        return cls(gradients=[each[0] for each in largest], optimizer=[each[1] for each in largest])

    def text(self) -> str:
        """One sentence for the log, with the first four pipeline ranks that free memory."""
        parts = [
            f"{human_bytes(gradients)} + {human_bytes(optimizer)} on pipeline rank {rank}"
            for rank, (gradients, optimizer) in enumerate(zip(self.gradients, self.optimizer, strict=True))
            if gradients or optimizer
        ]
        if not parts:
            return "freed nothing"
        shown = ", ".join(parts[:4]) + (f", and on {len(parts) - 4} more" if len(parts) > 4 else "")
        return f"freed gradients + optimizer state: {shown}"


class LayerFreezing(Technique):
    """Freezes the front of the model on a schedule.

    Args:
        schedule: (step, number of frozen layers from then on), in order of step.
        freeze_tied: whether weights that the front shares with later items are frozen too.
        context: what the technique works on.
    """

    def __init__(self, schedule: Sequence[tuple[int, int]], freeze_tied: bool, context: TechniqueContext) -> None:
        self.schedule = tuple(schedule)
        self.items, self.store, self._world = context.family.items, context.store, context.world
        self._freeze_tied, self._ties = freeze_tied, context.family.ties
        self._tied = {*self._ties, *self._ties.values()}
        table = f"{self.items[0].name}.word.weight"
        self._shards_train = table in stored_ties(context.family).values() and not freeze_tied

    def after_step(self, step: int) -> Event | None:
        """Freeze the layers that are due after this step."""
        due = frozen_items(self.items, self.schedule, step)
        if due == self.frozen_items:
            return None
        freed_items = tuple(name for name in due if name not in self.frozen_items)
        before, self.frozen_items = self.frozen_parameters(), due
        freed = self._freed_bytes(self.frozen_parameters() - before)
        # What is frozen is a function of the step: the same code runs here and after a restart.
        self.resume(step)
        later = [at for at, _ in self.schedule if at > step]
        return Event(
            kind="frozen",
            step=step,
            message=f"frozen: {due[0]} to {due[-1]} ({freed.text()})",
            detail={
                "frozen_items": list(due),
                "freed_gradient_bytes": freed.gradients,
                "freed_optimizer_bytes": freed.optimizer,
            },
            next_expected_step=min(later, default=None),
            rebuild=True,
            freed_items=freed_items,
        )

    def set_world(self, world: World) -> None:
        """Continue on the processes of ``world``."""
        self._world = world

    def _freed_bytes(self, names: set[str]) -> FreedBytes:
        """What these parameters of this process free, before their state is dropped; a collective."""
        optimizers = self.store.optimizers
        # ``names`` has frozen ties of other processes, too.
        freed = [(name, p) for _, name, p in self.store.parameters() if name in names]
        # A tied copy on the rank of its owner has the owner's state, and a gradient of its own.
        gradients = sum(p.numel() * p.element_size() for _, p in freed)
        moments = {t.data_ptr(): t.nbytes for name, _ in freed for t in optimizers.moments(name).values()}
        return FreedBytes.by_rank(self._world, gradients, sum(moments.values()))

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
        # Owner and copies together: a weight that one of them trains would differ from the others.
        frozen = weights_tied_to(self._ties, self.frozen_items) if self._freeze_tied else set()
        return (names - self._tied) | frozen


def _build(config: Config) -> TechniqueBuilder | None:
    options = config.freezing
    if options.freeze_steps and not options.freeze_adaptive:
        return partial(LayerFreezing, options.freeze_steps, options.freeze_tied)
    return None


TECHNIQUE = TechniqueSpec(build=_build)
