"""Gradual pruning by global magnitude: the exact k-th magnitude over all workers, without gathering a weight.

Schedule: Zhu and Gupta, arXiv 1710.01878, equation 1. Pruned are the matrices of attention and MLP items that train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..models.items import masks_of
from ..models.linear import PrunableLinear
from ..optim.items import HeldItems
from ..parallel.world import World, sum_over, sum_over_model
from .technique import Event

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


class GradualPruning:
    """Prunes the held weights after the steps of the schedule; frozen items are left alone."""

    def __init__(
        self, schedule: CubicSchedule, held: HeldItems, frozen: Callable[[], Sequence[str]], world: World
    ) -> None:
        self.schedule, self.held, self._frozen, self._world = schedule, held, frozen, world
        self.sparsity = schedule.initial

    def _layers(self) -> dict[str, tuple[str, PrunableLinear]]:
        """Name of a weight -> its item and its layer."""
        left_alone = set(self._frozen())
        return {
            name: (item, layer)
            for item, module in self.held.modules.items()
            if item not in left_alone
            for name, layer in masks_of(item, module).items()
        }

    def _total(self, counts: torch.Tensor) -> torch.Tensor:
        summed = sum_over_model(self._world, counts)
        return summed if self.held.shards is None else sum_over(self._world.groups.data, summed)

    def after_step(self, step: int) -> Event | None:
        """Prune to the schedule's sparsity where it is due."""
        if not self.schedule.is_due(step):
            return None
        target = self.schedule.at(step)
        layers = self._layers()
        weights = [self.held.own_parameters(item)[name] for name, (item, _) in layers.items() if self.held.counts(name)]
        count = int(self._total(torch.tensor([sum(w.numel() for w in weights)], dtype=torch.int64)))
        rank = round(target * count)
        pruned = torch.zeros(1, dtype=torch.int64)
        if rank > 0:
            threshold = kth_magnitude_bits(weights, rank, self._total)
            for name, (item, layer) in layers.items():
                bits = self.held.own_parameters(item)[name].detach().view(torch.int32) & 0x7FFFFFFF
                kept = bits > threshold
                pruned += int(kept.numel() - kept.sum()) if self.held.counts(name) else 0
                if self.held.shards is not None:
                    kept = self.held.shards.whole(kept, layer.outputs)
                self.held.prune(item, name, layer, kept)
        self.sparsity = int(self._total(pruned)) / count if count else 0.0
        return Event(
            kind="pruned",
            step=step,
            message=f"pruned to sparsity {self.sparsity:.3f} of {count:,} weights",
            detail={"target_sparsity": target, "sparsity": self.sparsity, "weights": count},
            next_expected_step=self.schedule.next_after(step),
        )

    def resume(self, step: int) -> None:
        """Masks come with the items; only the figure for the log is taken up."""
        if step >= self.schedule.start:
            self.sparsity = self.schedule.at(step)
