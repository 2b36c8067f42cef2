"""The step lifecycle of dynamic techniques: named hooks that the engine calls, and what a technique works on.

A technique overrides the hooks that it needs; the others do nothing. Every process calls every hook at the same steps,
so a hook may use collectives. ``Techniques`` calls the hooks of several techniques in the order of their registry
(``config/extensions.py``)::

    train_step(step)                                                              boundary after the step
    ┌───────────────────────────────────────────────────────────────────────────┐ ┌─────────────────────────────┐
    before_step ▶ forward, backward ▶ after_backward ▶ sum over replicas, unscale ▶ before_optimizer_step ▶ clip,
    update ▶ after_step ▶ Event ▶ profile, events.jsonl ▶ planner, moves, checkpoint (state_dict)

    start from a checkpoint: load_state_dict(state) ▶ resume(step)
    workers released:        set_world(world)

What a technique decides must not depend on placement: reduce over workers exactly (integer counts, or values per item
in list order), never over the items of one process. Tensors that it keeps of an item go into ``ItemStore.extras``,
which moves and checkpoints carry with the item. This module does not import torch: ``--help`` loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..models.layer_list import ModelFamily
    from ..optim.item_store import ItemStore
    from ..parallel.process_groups import World


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of what layers cost, for the profile and ``events.jsonl``.

    Attributes:
        kind: such as ``pruned`` or ``frozen``; any name but ``evaluated`` and ``checkpoint``.
        step: the optimizer step after which it happened.
        message: a sentence for the log.
        detail: JSON values for people and programs.
        next_expected_step: when the next event of this kind is due; None when there will be none.
        rebuild: whether the pipeline's stages must be rebuilt, because other gradients cross their boundaries now.
        freed_items: names of the items that store no activations from now on; ``events.jsonl`` then has their bytes.
    """

    kind: str
    step: int
    message: str
    detail: dict[str, Any] = field(default_factory=dict)
    next_expected_step: int | None = None
    rebuild: bool = False
    freed_items: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TechniqueContext:
    """What a technique works on, at one process.

    Attributes:
        family: the model.
        store: modules, parameters and optimizer state of this process's items; moves change it.
        world: the processes of the run; ``set_world`` replaces it.
        frozen_items: names of the items that some technique has frozen, in list order.
    """

    family: ModelFamily
    store: ItemStore
    world: World
    frozen_items: Callable[[], tuple[str, ...]]


class Technique:
    """A dynamic technique; each hook does nothing unless it is overridden.

    Attributes:
        frozen_items: names of the items at the front that run no backward, in list order; the engine builds its stages
            by them, so an ``Event`` with ``rebuild`` must accompany a change.
    """

    frozen_items: tuple[str, ...] = ()

    def before_step(self, step: int) -> None:
        """Called before the forward passes of ``step``; steps count from 1."""

    def after_backward(self, step: int) -> None:
        """Called after the last backward pass of ``step``; gradients are this replica's sums, times the loss scale."""

    def before_optimizer_step(self, step: int) -> None:
        """Called when the gradients of ``step`` are complete, before their norm is taken and clipped."""

    def after_step(self, step: int) -> Event | None:
        """Act at the boundary after ``step``; returns what changed, None where nothing did."""
        return None

    def frozen_parameters(self) -> set[str]:
        """Names of this process's parameters that receive no update."""
        return set()

    def resume(self, step: int) -> None:
        """Restore what is a function of the step, after ``load_state_dict`` and before the first step of a start."""

    def set_world(self, world: World) -> None:
        """Continue on the processes of ``world``: workers were released."""

    def state_dict(self) -> dict[str, Any] | None:
        """JSON values for the checkpoint's manifest; None where the state is a function of the step."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what ``state_dict`` returned."""


TechniqueBuilder = Callable[[TechniqueContext], Technique]
Kind = TypeVar("Kind", bound=Technique)


class Techniques:
    """The techniques of a run, in the order in which their hooks are called.

    Args:
        builders: of the techniques that are on, by name.
        family: the model.
        store: this process's items.
        world: the processes of the run.
    """

    def __init__(
        self, builders: Mapping[str, TechniqueBuilder], *, family: ModelFamily, store: ItemStore, world: World
    ) -> None:
        # A callable: techniques read the frozen items of later ones, and of later steps.
        context = TechniqueContext(family=family, store=store, world=world, frozen_items=lambda: self.frozen_items)
        self._by_name: dict[str, Technique] = {}
        for name, build in builders.items():
            self._by_name[name] = build(context)

    def __iter__(self) -> Iterator[Technique]:
        return iter(self._by_name.values())

    def find(self, kind: type[Kind]) -> Kind | None:
        """The technique of a class; None where it is off."""
        return next((each for each in self if isinstance(each, kind)), None)

    @property
    def frozen_items(self) -> tuple[str, ...]:
        """The longest frozen front of all techniques."""
        # Each is a prefix of the layer list, so the longest one contains the others.
        return max((each.frozen_items for each in self), key=len, default=())

    def frozen_parameters(self) -> set[str]:
        """Names of this process's parameters that receive no update."""
        return {name for each in self for name in each.frozen_parameters()}

    def after_step(self, step: int) -> list[Event]:
        """Let each technique act at the boundary after ``step``."""
        return [event for each in self if (event := each.after_step(step)) is not None]

    def state_dict(self) -> dict[str, Any]:
        """The state of those techniques that have one, by name."""
        states = {name: each.state_dict() for name, each in self._by_name.items()}
        return {name: state for name, state in states.items() if state is not None}

    def load_state_dict(self, states: Mapping[str, Any], step: int) -> None:
        """Restore all techniques to what they were after ``step``."""
        for name, each in self._by_name.items():
            each.load_state_dict(states.get(name))
            each.resume(step)
