"""Random numbers in a tensor-parallel region: other ones on each rank inside, the same outside.

Outside each rank has other tokens with sequence parallelism; random numbers then differ there, too. A compiled graph
orders operations by their data alone, so that seeding is an operation there, of which the next one depends.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .seeding import default_generator, stable_seed


class RegionSeeds:
    """Seeds of the default generator at the ends of a region.

    Args:
        rank: Rank of this process among the tensor-parallel ranks.
        sequence: Whether outside of regions each rank has other tokens.
        device: Device of the generator.
    """

    def __init__(self, rank: int, sequence: bool, device: torch.device) -> None:
        self._rank, self._sequence = rank, sequence
        self._generator = default_generator(device)
        self._outside = self._inside = -1

    def enter(self) -> None:
        """Seed by rank, unless another product of the region has done so."""
        # ``initial_seed`` is the last seed that was set: equal to ``_inside`` where another product of this region has
        # already entered it. Seeding again would give both the same random numbers.
        now = self._generator.initial_seed()
        if now != self._inside:
            self._outside, self._inside = now, stable_seed(now, "inside", self._rank)
            self._generator.manual_seed(self._inside)

    def leave(self) -> None:
        """Seed for what follows the region: by rank only where each rank has other tokens."""
        # A new seed, not the state before the region, which would repeat the numbers drawn there. It is derived from
        # the seed before the region, because the one inside differs by rank. A sliced embedding has no enter.
        now = self._generator.initial_seed()
        before = self._outside if now == self._inside else now
        self._generator.manual_seed(stable_seed(before, "outside", self._rank if self._sequence else 0))


@functools.cache
def region_seeds(rank: int, sequence: bool, device: torch.device) -> RegionSeeds:
    """Return the seeds of this process's regions, shared by all items: a compiled item refers to them by value.

    Args:
        rank: Rank of this process among the tensor-parallel ranks.
        sequence: Whether outside of regions each rank has other tokens.
        device: Device of the generator.
    """
    return RegionSeeds(rank, sequence, device)


@torch.library.custom_op("dynmo_train::seed_region", mutates_args=())
def seed_region(x: torch.Tensor, rank: int, sequence: bool, inside: bool) -> torch.Tensor:
    """Seed the default generator within a compiled graph; return a copy of ``x``.

    Args:
        x: What enters or has left the region, of any shape.
        rank: Rank of this process in the region.
        sequence: Whether the region has sequence parallelism.
        inside: Whether the region is entered, else left.
    """
    seeds = region_seeds(rank, sequence, x.device)
    if inside:
        seeds.enter()
    else:
        seeds.leave()
    return x.clone()


@seed_region.register_fake
def _(x: torch.Tensor, rank: int, sequence: bool, inside: bool) -> torch.Tensor:
    return torch.empty_like(x)


def _seed_region_backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return grad, None, None, None


seed_region.register_autograd(_seed_region_backward)
