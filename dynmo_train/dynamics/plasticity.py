"""Adaptive freezing: a layer is frozen when training has ceased to change what it computes.

After Egeria (Wang et al. 2023, EuroSys, arXiv:2201.06227, sections 4.1 and 4.2): the plasticity of the foremost layer
that trains is the similarity-preserving distance (Tung and Mori 2019, arXiv:1907.09682) between its activations and
those of a reference copy; once the slope of its course stays small, the layer is frozen and the next one is watched.
Here copy and layer get the same input, that of the training run, so a layer is measured where it lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from ..models.layer_list import ItemSpec, masks_of, output_of, parameters_of
from ..optim.item_store import REFERENCE, ItemStore
from ..parallel.process_groups import World, sum_over_pipeline, sum_over_replicas
from ..parallel.seeding import seeded
from .freezing import LayerFreezing, layers_of
from .technique import Event

ROWS = 256


@dataclass(frozen=True, kw_only=True)
class PlasticityRule:
    """When a layer is frozen.

    Attributes:
        interval: steps between measurements.
        window: measurements that the slope is fitted to.
        tolerance: share of the steepest slope that this layer had, below which a slope is small.
        patience: small slopes in a row after which the layer is frozen.
        most: layers that are frozen at most.
    """

    interval: int
    window: int
    tolerance: float
    patience: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Course:
    """What was measured of the layer that is watched, and how many layers are frozen before it."""

    frozen_layers: int = 0
    values: tuple[float, ...] = ()
    steepest: float = 0.0
    calm: int = 0


def slope(values: Sequence[float]) -> float:
    """The least-squares slope of values that follow one another: of 1, 3, 5 it is 2."""
    middle = (len(values) - 1) / 2
    spread = sum((place - middle) ** 2 for place in range(len(values)))
    return sum((place - middle) * value for place, value in enumerate(values)) / spread


def observe(course: Course, value: float, rule: PlasticityRule) -> Course:
    """The course after one more measurement; a layer more is frozen, and the course begun anew, where it is calm."""
    values = (*course.values, value)[-rule.window :]
    if len(values) < rule.window:
        return replace(course, values=values)
    now = abs(slope(values))
    steepest = max(course.steepest, now)
    calm = course.calm + 1 if now <= rule.tolerance * steepest else 0
    if calm >= rule.patience and course.frozen_layers < rule.most:
        return Course(frozen_layers=course.frozen_layers + 1)
    return replace(course, values=values, steepest=steepest, calm=calm)


def similarity_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Mean squared difference of the normalised similarities of rows (Tung and Mori 2019, equations 2 to 4).

    Rows are tokens, of ``[..., D]`` the first 256.
    """

    def similarities(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)[:ROWS].float()
        return torch.nn.functional.normalize(rows @ rows.t(), dim=1)

    return (similarities(first) - similarities(second)).square().mean()


class AdaptiveFreezing(LayerFreezing):
    """Freezes the front layer by layer, as plasticity says; otherwise as by schedule."""

    def __init__(
        self,
        rule: PlasticityRule,
        items: Sequence[ItemSpec],
        store: ItemStore,
        ties: Mapping[str, str],
        freeze_tied: bool,
        world: World,
    ) -> None:
        super().__init__((), items, store, ties, freeze_tied)
        self.rule, self._world = rule, world
        self.course = Course()
        self._layers = layers_of(items)
        self._seen: dict[str, tuple[Any, ...]] = {}
        self._hooks: list[RemovableHandle] = []

    def set_world(self, world: World) -> None:
        """Go on among the processes of ``world``."""
        self._world = world

    def state(self) -> dict[str, Any]:
        """For a checkpoint; the reference copies are with the items."""
        course = self.course
        return {
            "frozen_layers": course.frozen_layers,
            "values": list(course.values),
            "steepest": course.steepest,
            "calm": course.calm,
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on from ``state``."""
        if state is not None:
            self.course = Course(**{**state, "values": tuple(state["values"])})
        self._set_schedule()

    def _set_schedule(self) -> None:
        self.schedule = ((0, self.course.frozen_layers),) if self.course.frozen_layers else ()

    def _watched(self) -> list[str]:
        """Items of the layer that is watched, none where no more may be frozen."""
        if self.course.frozen_layers >= min(self.rule.most, len(self._layers)):
            return []
        layer = self._layers[self.course.frozen_layers]
        return [item.name for item in self.items if item.layer == layer]

    def before_step(self, step: int) -> None:
        """Where a measurement is due after ``step``, look at what the watched items get of its first microbatch."""
        if step % self.rule.interval:
            return
        for name in self._watched():
            if name in self.store.modules:
                self._hooks.append(self.store.modules[name].register_forward_pre_hook(self._looker(name)))

    def _looker(self, name: str) -> Any:
        def look(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if name not in self._seen:
                self._seen[name] = tuple(
                    each.detach().float() if each.is_floating_point() else each for each in arguments
                )

        return look

    def after_step(self, step: int) -> Event | None:
        """Measure where it is due; freeze a layer where it is calm."""
        if step % self.rule.interval:
            return None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        watched = self._watched()
        if not watched:
            return None
        before = self.course
        self.course = observe(before, self._plasticity(watched), self.rule)
        self._seen.clear()
        self._set_schedule()
        if self.course.frozen_layers == before.frozen_layers:
            return None
        for name in watched:
            self.store.extras.pop(name, None)
        return super().after_step(step)

    def _plasticity(self, watched: Sequence[str]) -> float:
        """Of the watched layer, the same at every process: its items' distances added in list order."""
        distances = torch.zeros(len(watched), dtype=torch.float64)
        for place, name in enumerate(watched):
            if name in self._seen:
                distances[place] = self._distance(name)
        means = sum_over_replicas(self._world, sum_over_pipeline(self._world, distances)) / self._world.dims.data
        return float(sum(means.tolist()))

    def _distance(self, name: str) -> float:
        module = self.store.modules[name]
        own = {full: p for full, p in parameters_of(name, module).items() if full not in self.store.family.ties}
        extras = self.store.extras.setdefault(name, {})
        if not extras:  # the first measurement of a layer takes the copy
            extras.update({f"{full}.{REFERENCE}": parameter.detach().clone() for full, parameter in own.items()})
        reference = {full[len(name) + 1 :]: extras[f"{full}.{REFERENCE}"] for full in own}
        training = module.training
        module.eval()
        try:
            with torch.no_grad(), seeded(self.store.device, "plasticity", name):
                now = output_of(module(*self._seen[name]))
                _weights_changed(name, module)
                then = output_of(functional_call(module, reference, self._seen[name]))
        finally:
            module.train(training)
            _weights_changed(name, module)
        return float(similarity_distance(now, then))


def _weights_changed(name: str, module: nn.Module) -> None:
    for layer in masks_of(name, module).values():
        layer.weights_changed()
