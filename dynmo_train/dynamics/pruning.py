"""Gradual pruning by magnitude, over the whole model or in each layer.

Schedule: Zhu and Gupta, arXiv:1710.01878, equation 1. The matrices of attention and MLP items are pruned, except those
of frozen items. Global pruning finds the exact k-th smallest magnitude over all workers without gathering a weight:

    each worker       weights ─▶ scores ─▶ histogram of one digit (2,048 or 1,024 counts)
    all workers       sum of the histograms ─▶ the digit of the k-th smallest score ─▶ next digit (three rounds)
    each worker       mask = scores above the threshold ─▶ weight and moments become zero elsewhere

Counts are integers, so the threshold is the same bits on every partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..config.extensions import TechniqueSpec
from ..models.layer_list import masks_of
from ..models.layers.linear import PrunableLinear
from ..parallel.process_groups import World, sum_over, sum_over_model
from .pruning_units import PruningRule, Units, single_weights, units_of
from .technique import Event, Technique, TechniqueBuilder, TechniqueContext

if TYPE_CHECKING:
    from ..config import Config

# Kinds of units that a mode prunes, each ranked on its own.
KINDS = {"structured": ("heads", "columns")}

# Nonnegative float32 values order as their 31 bits do. (shift, number of values) of three digits: 11, 10 and 10 bits.
DIGITS = ((20, 2048), (10, 1024), (0, 1024))


@dataclass(frozen=True, kw_only=True)
class CubicSchedule:
    """Sparsity over steps: ``final + (initial - final) (1 - (t - start) / (end - start))^3``.

    Attributes:
        start: step of the first pruning.
        end: step of the last pruning, which reaches exactly ``final``.
        every: steps between prunings.
        initial: fraction of pruned weights at ``start``.
        final: fraction of pruned weights at ``end``.
    """

    start: int
    end: int
    every: int
    initial: float
    final: float

    def is_due(self, step: int) -> bool:
        """Whether weights are pruned after this step."""
        return self.start <= step <= self.end and ((step - self.start) % self.every == 0 or step == self.end)

    def at(self, step: int) -> float:
        """The sparsity to reach at ``step``: 0 to 0.9 over 40 steps is 0.52, 0.79, 0.89, 0.9 at 10, 20, 30, 40."""
        if step >= self.end:
            return self.final
        remaining = 1.0 - max(0, step - self.start) / (self.end - self.start)
        return self.final + (self.initial - self.final) * remaining**3

    def last_until(self, step: int) -> int | None:
        """The last step up to ``step`` after which weights were pruned; None before the first pruning."""
        if step < self.start:
            return None
        return self.end if step >= self.end else step - (step - self.start) % self.every

    def next_after(self, step: int) -> int | None:
        """The next step after which weights are pruned; None after the last pruning."""
        if step >= self.end:
            return None
        if step < self.start:
            return self.start
        return min(self.end, step + self.every - (step - self.start) % self.every)


def kth_magnitude_bits(
    weights: Sequence[torch.Tensor], rank: int, total: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    """The bits of the ``rank``-th smallest magnitude over all workers.

    Radix selection: the histogram of one digit at a time is summed over the workers, 4,096 counts in all whatever the
    size of the model. The result is exact and does not depend on which worker holds which weight.

    Args:
        weights: float32 tensors of this worker, ``[...]``, of any shape.
        rank: counts from 1.
        total: sums an int64 tensor ``[values]`` over all workers.

    Returns:
        The 31 bits of the magnitude as an integer.
    """
    prefix, remaining = 0, rank
    for shift, size in DIGITS:
        counts = torch.zeros(size, dtype=torch.int64)
        for weight in weights:
            # Without the sign bit: the magnitude. No arithmetic touches the values, so none of them is rounded.
            bits = weight.detach().reshape(-1).view(torch.int32) & 0x7FFFFFFF
            # After the first round only values with the digits that were found so far are counted.
            if shift != DIGITS[0][0]:
                above = shift + size.bit_length() - 1
                bits = bits[(bits >> above) == (prefix >> above)]
            digit = (bits >> shift) & (size - 1)
            counts += torch.bincount(digit, minlength=size).cpu()
        running = total(counts).cumsum(0)
        digit_found = int(torch.searchsorted(running, remaining))
        remaining -= int(running[digit_found - 1]) if digit_found else 0
        prefix |= digit_found << shift
    return prefix


class ItemUnits(NamedTuple):
    """Units of one item on this process.

    Attributes:
        item: name of the item.
        names: layer -> global name of its weight.
        units: what is pruned.
        is_counted: whether this process counts them; replicas hold the same units.
    """

    item: str
    names: Mapping[PrunableLinear, str]
    units: Units
    is_counted: bool


class GradualPruning(Technique):
    """Prunes after the steps of a schedule; frozen items keep their weights.

    Args:
        schedule: when, and to which sparsity.
        rule: what is pruned.
        context: what the technique works on.

    Attributes:
        sparsity: fraction of pruned weights after the last pruning, over the whole model.
    """

    def __init__(self, schedule: CubicSchedule, rule: PruningRule, context: TechniqueContext) -> None:
        self.schedule, self.rule = schedule, rule
        self.store, self._world, self._frozen = context.store, context.world, context.frozen_items
        self.sparsity = schedule.initial

    def set_world(self, world: World) -> None:
        """Continue on the processes of ``world``."""
        self._world = world

    def _units(self) -> list[ItemUnits]:
        """The units of this process."""
        frozen = set(self._frozen())
        found: list[ItemUnits] = []
        for item, module in self.store.modules.items():
            if item in frozen:
                continue
            names = {layer: name for name, layer in masks_of(item, module).items()}
            if self.store.sharding.fsdp is not None:
                own = self.store.local_parameters(item)
                of_item = [single_weights(layer, own[name]) for layer, name in names.items()]
            else:
                of_item = list(units_of(module, self.rule))
            found += [
                ItemUnits(item, names, units, self.store.sharding.is_counted(names[units.layers[0]]))
                for units in of_item
            ]
        return found

    def _total(self, counts: torch.Tensor) -> torch.Tensor:
        group = self._world.groups.expert if self.store.sharding.fsdp is None else self._world.groups.data
        return sum_over(group, sum_over_model(self._world, counts))

    def after_step(self, step: int) -> Event | None:
        """Prune to the schedule's sparsity where that is due after ``step``."""
        if not self.schedule.is_due(step):
            return None
        target = self.schedule.at(step)
        units = self._units()
        thresholds = self._thresholds(units, self.rule.share(target))
        counts = torch.zeros(2, dtype=torch.int64)
        for each, threshold in zip(units, thresholds, strict=True):
            scores = each.units.scores
            # Compared as bits, like the threshold. Equal scores are pruned together: sparsity may exceed the target.
            keep = scores.view(torch.int32) > threshold
            # Also where the global threshold is above every score of a sublayer.
            if each.units.keeps_strongest and not bool(keep.any()):
                keep[scores.argmax()] = True
            for layer, mask in each.units.prune(keep):
                if each.is_counted:
                    counts += torch.tensor([mask.numel() - int(mask.sum()), mask.numel()])
                if target > 0:
                    name = each.names[layer]
                    self.store.prune(each.item, name, layer, self.store.sharding.gather_rows(name, mask, layer.outputs))
        pruned, count = self._total(counts).tolist()
        self.sparsity = pruned / count if count and target > 0 else 0.0
        return Event(
            kind="pruned",
            step=step,
            message=f"pruned to sparsity {self.sparsity:.3f} of {count:,} weights",
            detail={"target_sparsity": target, "sparsity": self.sparsity, "weights": count, "mode": self.rule.mode},
            next_expected_step=self.schedule.next_after(step),
        )

    def _thresholds(self, units: Sequence[ItemUnits], share: float) -> list[int]:
        """For each of ``units`` the bits of the highest score that is pruned; -1 where none is."""
        if self.rule.scope == "layer":
            ranks = [round(share * each.units.scores.numel()) for each in units]
            return [
                kth_magnitude_bits([each.units.scores], rank, lambda counts: counts) if rank else -1
                for each, rank in zip(units, ranks, strict=True)
            ]
        # A worker may hold no unit of a kind, and must take part in the sums all the same.
        found: dict[str, int] = {}
        for kind in KINDS.get(self.rule.mode, ("weights",)):
            scores = [each.units.scores for each in units if each.is_counted and each.units.kind == kind]
            count = int(self._total(torch.tensor([sum(each.numel() for each in scores)], dtype=torch.int64)))
            rank = round(share * count)
            found[kind] = kth_magnitude_bits(scores, rank, self._total) if rank else -1
        return [found[each.units.kind] for each in units]

    def resume(self, step: int) -> None:
        """Restore the sparsity after ``step``; the masks are stored with the items."""
        if (last := self.schedule.last_until(step)) is not None:
            self.sparsity = self.schedule.at(last)


def _build(config: Config) -> TechniqueBuilder | None:
    options = config.pruning
    if not options.sparsify:
        return None
    schedule = CubicSchedule(
        start=options.pruning_start_iter,
        end=options.pruning_end_iter,
        every=options.pruning_freq,
        initial=options.initial_sparsity,
        final=options.final_sparsity,
    )
    rule = PruningRule(mode=options.pruning_mode, scope=options.pruning_scope, block_size=options.pruning_block_size)
    return partial(GradualPruning, schedule, rule)


TECHNIQUE = TechniqueSpec(build=_build)
