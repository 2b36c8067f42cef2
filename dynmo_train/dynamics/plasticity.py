"""Adaptive freezing: freeze the first training layer when training no longer changes what it computes.

After Egeria (Wang et al. 2023, EuroSys, arXiv:2201.06227, sections 4.1 and 4.2). The plasticity of a layer is the
similarity-preserving distance (Tung and Mori 2019, arXiv:1907.09682) between its activations and those of a reference
copy. When the slope of plasticity over time stays small, the layer is frozen and the next one is measured.

Layer and copy read the same input, recorded from the training run, so a layer is measured at the rank that holds it:

    before_step   forward_pre_hook records the first microbatch's input of the measured items
    after_step    input ─┬─▶ item ───────────┐
                         └─▶ reference copy ─┴─▶ distance ─▶ sum over ranks ─▶ slope ─▶ patience_count ─▶ freeze
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from ..config.extensions import TechniqueSpec
from ..models.layer_list import expert_biases_of, masks_of, output_of, parameters_of
from ..optim.item_state import REFERENCE
from ..parallel.process_groups import gather_over, sum_over_pipeline, sum_over_replicas
from ..parallel.seeding import seeded
from .freezing import LayerFreezing, layers_of
from .technique import Event, TechniqueBuilder, TechniqueContext

if TYPE_CHECKING:
    from ..config import Config

MAX_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class PlasticityRule:
    """When a layer is frozen.

    Attributes:
        interval: optimizer steps between measurements.
        window: number of measurements that the slope is fitted to.
        tolerance: fraction of the layer's steepest slope up to which a slope is small.
        patience: number of consecutive small slopes after which the layer is frozen.
        max_layers: maximum number of frozen layers.
    """

    interval: int
    window: int
    tolerance: float
    patience: int
    max_layers: int


@dataclass(frozen=True, kw_only=True)
class PlasticityTrace:
    """The measurements of the layer that is measured now.

    Attributes:
        frozen_layers: number of layers before it, all frozen.
        values: the last measurements, at most ``PlasticityRule.window``.
        steepest: the steepest slope so far.
        patience_count: number of consecutive small slopes.
    """

    frozen_layers: int = 0
    values: tuple[float, ...] = ()
    steepest: float = 0.0
    patience_count: int = 0


def slope(values: Sequence[float]) -> float:
    """The slope of a linear regression over equally spaced values: of 1, 3, 5 it is 2."""
    middle = (len(values) - 1) / 2
    spread = sum((place - middle) ** 2 for place in range(len(values)))
    return sum((place - middle) * value for place, value in enumerate(values)) / spread


def observe(trace: PlasticityTrace, value: float, rule: PlasticityRule) -> PlasticityTrace:
    """The trace after one more measurement; when patience runs out, an empty trace of the next layer.

    Args:
        trace: the measurements so far.
        value: plasticity of the layer, a distance of at least 0.
        rule: when the layer is frozen.
    """
    values = (*trace.values, value)[-rule.window :]
    if len(values) < rule.window:
        return replace(trace, values=values)
    current = abs(slope(values))
    steepest = max(trace.steepest, current)
    patience_count = trace.patience_count + 1 if current <= rule.tolerance * steepest else 0
    if patience_count >= rule.patience and trace.frozen_layers < rule.max_layers:
        return PlasticityTrace(frozen_layers=trace.frozen_layers + 1)
    return replace(trace, values=values, steepest=steepest, patience_count=patience_count)


def similarity_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Mean squared difference of normalized row similarities (Tung and Mori 2019, equations 2 to 4).

    Args:
        first: activations ``[..., D]``; the first 256 tokens count.
        second: activations of the same shape.

    Returns:
        A float32 scalar.
    """

    def similarities(x: torch.Tensor) -> torch.Tensor:
        # The similarities of N rows are N x N values, so the number of rows is bounded.
        rows = x.flatten(0, -2)[:MAX_ROWS].float()
        return torch.nn.functional.normalize(rows @ rows.t(), dim=1)

    return (similarities(first) - similarities(second)).square().mean()


class AdaptiveFreezing(LayerFreezing):
    """Freezes the front layer by layer, by plasticity instead of a schedule.

    Args:
        rule: when a layer is frozen.
        freeze_tied: as ``LayerFreezing``.
        context: what the technique works on.
    """

    def __init__(self, rule: PlasticityRule, freeze_tied: bool, context: TechniqueContext) -> None:
        super().__init__((), freeze_tied, context)
        self.rule = rule
        self.trace = PlasticityTrace()
        self._layers = layers_of(self.items)
        self._inputs: dict[str, tuple[Any, ...]] = {}
        self._hooks: list[RemovableHandle] = []

    def state_dict(self) -> dict[str, Any]:
        """The trace; the reference copies are stored with their items."""
        trace = self.trace
        return {
            "frozen_layers": trace.frozen_layers,
            "values": list(trace.values),
            "steepest": trace.steepest,
            "patience_count": trace.patience_count,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the trace."""
        if state is not None:
            self.trace = PlasticityTrace(**{**state, "values": tuple(state["values"])})
        self._set_schedule()

    def _set_schedule(self) -> None:
        self.schedule = ((0, self.trace.frozen_layers),) if self.trace.frozen_layers else ()

    def _measured_items(self) -> list[str]:
        """Items of the layer that is measured; empty where no further layer may be frozen."""
        if self.trace.frozen_layers >= min(self.rule.max_layers, len(self._layers)):
            return []
        layer = self._layers[self.trace.frozen_layers]
        return [item.name for item in self.items if item.layer == layer]

    def before_step(self, step: int) -> None:
        """Where a measurement is due after ``step``, record the inputs of the measured items."""
        if step % self.rule.interval:
            return
        for name in self._measured_items():
            if name in self.store.modules:
                self._hooks.append(self.store.modules[name].register_forward_pre_hook(self._recorder(name)))

    def _recorder(self, name: str) -> Any:
        def record(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            # The hook of a recomputed or second microbatch finds the name, and records nothing.
            if name not in self._inputs:  # of the first microbatch alone
                self._inputs[name] = tuple(
                    each.detach().float() if each.is_floating_point() else each for each in arguments
                )

        return record

    def after_step(self, step: int) -> Event | None:
        """Measure the plasticity where that is due after ``step``; freeze the layer when patience runs out."""
        if step % self.rule.interval:
            return None
        # On every rank, also those without the layer: the measurement below contains collectives.
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        measured = self._measured_items()
        if not measured:
            return None
        before = self.trace
        self.trace = observe(before, self._plasticity(measured), self.rule)
        self._inputs.clear()
        self._set_schedule()
        if self.trace.frozen_layers == before.frozen_layers:
            return None
        # The next measured layer gets a copy of its own; moves and checkpoints need not carry this one any more.
        for name in measured:
            self.store.extras.pop(name, None)
        return super().after_step(step)

    def _plasticity(self, names: Sequence[str]) -> float:
        """The sum of the items' distances in list order, so that it is the same on every partition."""
        # One entry per item, which only the rank of the item fills: sums over the pipeline add zeros, which is exact.
        distances = torch.zeros(len(names), dtype=torch.float64)
        for place, name in enumerate(names):
            if name in self._inputs:
                distances[place] = self._distance(name)
        # With sequence parallelism each tensor rank measures its own tokens. All must decide the same: a rank that
        # freezes a layer alone waits for the others in a collective.
        parts = gather_over(self._world.groups.tensor, sum_over_pipeline(self._world, distances))
        distances = torch.stack(parts).sum(dim=0) / len(parts)
        means = sum_over_replicas(self._world, distances) / self._world.dims.data
        return float(sum(means.tolist()))

    def _distance(self, name: str) -> float:
        module = self.store.modules[name]
        # Biases of experts change what a layer computes, as its weights do.
        values: dict[str, torch.Tensor] = {**parameters_of(name, module), **expert_biases_of(name, module)}
        own = {full: value for full, value in values.items() if full not in self.store.family.ties}
        extras = self.store.extras.setdefault(name, {})
        if not extras:  # the first measurement of a layer makes the copy
            extras.update({f"{full}.{REFERENCE}": value.detach().clone() for full, value in own.items()})
        # A checkpoint of an earlier version has no copies of biases.
        copied = [full for full in own if f"{full}.{REFERENCE}" in extras]
        reference = {full[len(name) + 1 :]: extras[f"{full}.{REFERENCE}"] for full in copied}
        training = module.training
        module.eval()
        try:
            # A measurement must not advance the generator that training draws from.
            with torch.no_grad(), seeded(self.store.device, "plasticity", name):
                current = output_of(module(*self._inputs[name]))
                _reset_sparse_forms(name, module)
                initial = output_of(functional_call(module, reference, self._inputs[name]))
        finally:
            module.train(training)
            _reset_sparse_forms(name, module)
        return float(similarity_distance(current, initial))


def _reset_sparse_forms(name: str, module: nn.Module) -> None:
    # The sparse form of a pruned weight is cached; ``functional_call`` swaps the weight under it.
    for layer in masks_of(name, module).values():
        layer.weights_changed()


def _build(config: Config) -> TechniqueBuilder | None:
    options = config.freezing
    if not options.freeze_adaptive:
        return None
    rule = PlasticityRule(
        interval=options.freeze_interval,
        window=options.freeze_window,
        tolerance=options.freeze_tolerance,
        patience=options.freeze_patience,
        max_layers=config.model.num_layers - 1,
    )
    return partial(AdaptiveFreezing, rule, options.freeze_tied)


TECHNIQUE = TechniqueSpec(build=_build)
