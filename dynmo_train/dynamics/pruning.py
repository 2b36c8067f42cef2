"""Gradual pruning of the weakest, over the whole model or layer by layer.

Over the model that is the exact k-th magnitude over all workers, without gathering a weight. Schedule: Zhu and Gupta,
arXiv 1710.01878, equation 1. Pruned are the matrices of attention and MLP items that train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..models.layer_list import masks_of
from ..models.linear import PrunableLinear
from ..optim.item_store import ItemStore
from ..parallel.process_groups import World, sum_over, sum_over_model
from .pruning_units import PruningRule, Units, single_weights, units_of
from .technique import Event

KINDS = {"unstructured": ("weights",), "2:4": ("weights",), "block": ("weights",), "structured": ("heads", "columns")}

# A float32 magnitude has 31 bits; ordering floats >= 0 is ordering their bits. Three digits of 11, 10 and 10 bits.
DIGITS = ((20, 2048), (10, 1024), (0, 1024))


@dataclass(frozen=True, kw_only=True)
class CubicSchedule:
    """Sparsity over steps: ``final + (initial - final) (1 - (t - start) / (end - start))^3``.

    Attributes:
        start, end: steps of the first and the last pruning.
        every: steps between prunings; the last one is always at ``end``, with exactly ``final``.
        initial, final: fractions of pruned weights.
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
        left = 1.0 - max(0, step - self.start) / (self.end - self.start)
        return self.final + (self.initial - self.final) * left**3

    def last_until(self, step: int) -> int | None:
        """The last step up to ``step`` after which weights were pruned, None where there was none."""
        if step < self.start:
            return None
        return self.end if step >= self.end else step - (step - self.start) % self.every

    def next_after(self, step: int) -> int | None:
        """The next step at which weights are pruned, None when there is none."""
        if step >= self.end:
            return None
        if step < self.start:
            return self.start
        return min(self.end, step + self.every - (step - self.start) % self.every)


def kth_magnitude_bits(
    weights: Sequence[torch.Tensor], rank: int, total: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    """The bits of the ``rank``-th smallest magnitude (from 1) over all workers' float32 ``weights``.

    Selection by digits: histograms of one digit at a time are summed over the workers, 4,096 counts in all, whatever
    the size of the model. Exact, and independent of which worker holds which weight.

    Args:
        total: sums an int64 tensor over all workers.
    """
    prefix = 0
    left = rank
    for shift, size in DIGITS:
        counts = torch.zeros(size, dtype=torch.int64)
        for weight in weights:
            bits = weight.detach().reshape(-1).view(torch.int32) & 0x7FFFFFFF
            if shift != DIGITS[0][0]:
                above = shift + size.bit_length() - 1
                bits = bits[(bits >> above) == (prefix >> above)]
            digit = (bits >> shift) & (size - 1)
            counts += torch.bincount(digit, minlength=size).cpu()
        running = total(counts).cumsum(0)
        digit_found = int(torch.searchsorted(running, left))
        left -= int(running[digit_found - 1]) if digit_found else 0
        prefix |= digit_found << shift
    return prefix


class OwnUnits(NamedTuple):
    """Units of an item on this process; ``counted`` where it counts them (replicas may have the same ones)."""

    item: str
    names: Mapping[PrunableLinear, str]
    units: Units
    counted: bool


class GradualPruning:
    """Prunes the held weights after the steps of the schedule; frozen items are left alone."""

    def __init__(
        self,
        schedule: CubicSchedule,
        store: ItemStore,
        frozen: Callable[[], Sequence[str]],
        world: World,
        rule: PruningRule,
    ) -> None:
        self.schedule, self.store, self._frozen, self._world, self.rule = schedule, store, frozen, world, rule
        self.sparsity = schedule.initial

    def set_world(self, world: World) -> None:
        """Go on among the processes of ``world``: some have left."""
        self._world = world

    def _units(self) -> list[OwnUnits]:
        """The units of this process."""
        left_alone = set(self._frozen())
        found: list[OwnUnits] = []
        for item, module in self.store.modules.items():
            if item in left_alone:
                continue
            names = {layer: name for name, layer in masks_of(item, module).items()}
            if self.store.fsdp is not None:
                own = self.store.own_parameters(item)
                of_item = [single_weights(layer, own[name]) for layer, name in names.items()]
            else:
                of_item = list(units_of(module, self.rule))
            found += [OwnUnits(item, names, units, self.store.counts(names[units.layers[0]])) for units in of_item]
        return found

    def _total(self, counts: torch.Tensor) -> torch.Tensor:
        groups = self._world.groups
        return sum_over(groups.expert if self.store.fsdp is None else groups.data, sum_over_model(self._world, counts))

    def after_step(self, step: int) -> Event | None:
        """Prune to the schedule's sparsity where it is due."""
        if not self.schedule.is_due(step):
            return None
        target = self.schedule.at(step)
        units = self._units()
        thresholds = self._thresholds(units, self.rule.share(target))
        counts = torch.zeros(2, dtype=torch.int64)
        for each, threshold in zip(units, thresholds, strict=True):
            scores = each.units.scores
            keep = scores.view(torch.int32) > threshold
            if each.units.last_stays and not bool(keep.any()):
                keep[scores.argmax()] = True
            for layer, mask in each.units.prune(keep):
                if each.counted:
                    counts += torch.tensor([mask.numel() - int(mask.sum()), mask.numel()])
                if target > 0:
                    name = each.names[layer]
                    self.store.prune(each.item, name, layer, self.store.gather_rows(name, mask, layer.outputs))
        pruned, count = self._total(counts).tolist()
        self.sparsity = pruned / count if count and target > 0 else 0.0
        return Event(
            kind="pruned",
            step=step,
            message=f"pruned to sparsity {self.sparsity:.3f} of {count:,} weights",
            detail={"target_sparsity": target, "sparsity": self.sparsity, "weights": count, "mode": self.rule.mode},
            next_expected_step=self.schedule.next_after(step),
        )

    def _thresholds(self, units: Sequence[OwnUnits], share: float) -> list[int]:
        """For each of ``units`` the bits of the highest score that is pruned, -1 where none is."""
        if self.rule.scope == "layer":
            ranks = [round(share * each.units.scores.numel()) for each in units]
            return [
                kth_magnitude_bits([each.units.scores], rank, lambda counts: counts) if rank else -1
                for each, rank in zip(units, ranks, strict=True)
            ]
        # Every worker goes through the same kinds: it may hold none of one.
        found: dict[str, int] = {}
        for kind in KINDS[self.rule.mode]:
            scores = [each.units.scores for each in units if each.counted and each.units.kind == kind]
            count = int(self._total(torch.tensor([sum(each.numel() for each in scores)], dtype=torch.int64)))
            rank = round(share * count)
            found[kind] = kth_magnitude_bits(scores, rank, self._total) if rank else -1
        return [found[each.units.kind] for each in units]

    def resume(self, step: int) -> None:
        """Masks come with the items; only the figure for the log is taken up."""
        if (last := self.schedule.last_until(step)) is not None:
            self.sparsity = self.schedule.at(last)
