"""Compressed backpropagation and lazy error propagation (Optimus-CC, arXiv:2301.09830, sections 4 and 5).

What a stage sends back goes as low-rank factors. What they do not say of one microbatch is added to the next one that
crosses the same boundary. A boundary is named by the item behind it: its memories (the lost part, and the factor that
the next iteration starts from) are kept with that item, move with it and are in its checkpoints. A boundary that was
not there before begins without memory.
"""

from __future__ import annotations

import torch

from ...parallel.device_clock import Clock
from ..item_store import ItemStore, memory_name
from .lowrank import FactorShape, factorize, first_factor, reconstruct, subtract_product
from .settings import CompressionSettings
from .stats import BoundaryStats

ERROR, FACTOR = "error", "factor"


class BoundaryCodec:
    """Packs and unpacks the gradients that cross the boundaries of one worker.

    The lost part is kept in units of the gradient without the loss scale.

    Args:
        settings: with a ``boundary_rank``.
        held: keeps the memories.
        seed: of the run.
    """

    def __init__(self, settings: CompressionSettings, store: ItemStore, seed: int, clock: Clock) -> None:
        if settings.boundary_rank is None:
            raise ValueError("no rank is given for boundaries")
        self.settings, self._rank = settings, settings.boundary_rank
        self._store, self._seed, self._clock = store, seed, clock
        self._scale = 1.0
        self.stats: dict[str, BoundaryStats] = {}
        # Of the microbatch before, where it is measured: what it lost, and its activation
        self._before: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, scale: float) -> None:
        """Before a step, whose gradients are multiplied by ``scale``."""
        self._scale = scale
        self.stats = {}
        self._before = {}
        if self.settings.feedback_within_step:
            self._forget_errors()

    def _forget_errors(self) -> None:
        """Begin without what the last step's microbatches have lost."""
        for item, kept in self._store.memories.items():
            for name in kept:
                if self._is_ours(item, name) and name.endswith(f".{ERROR}"):
                    kept[name].zero_()

    def keep_only(self, items: set[str]) -> None:
        """Forget the boundaries that are not before one of these items."""
        for item, kept in self._store.memories.items():
            if item not in items:
                for name in [name for name in kept if self._is_ours(item, name)]:
                    del kept[name]

    @staticmethod
    def _is_ours(item: str, name: str) -> bool:
        return name.startswith(memory_name(item, "boundary", ""))

    def drop_nonfinite(self) -> None:
        """Behind a step whose gradients were not all finite: forget what that has spoilt."""
        for item, kept in self._store.memories.items():
            names = [name for name in kept if self._is_ours(item, name)]
            if not all(bool(kept[name].isfinite().all()) for name in names):
                for name in names:
                    del kept[name]

    def empty(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Room for the factors of a gradient of ``shape``."""
        return torch.empty(FactorShape.of(shape, self._rank).numbers, device=device)

    def encode(
        self, item: str, value: str, gradient: torch.Tensor, activation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The factors of the gradient that crosses the boundary before ``item``, in one flat float32 tensor.

        Args:
            value: name of what crosses.
            gradient: ``[..., D]``; left as it is.
            activation: what crossed the boundary the other way, for the figures.
        """
        begin = self._clock.stamp()
        shape = FactorShape.of(gradient.shape, self._rank)
        factor = self._kept(item, value, FACTOR, (shape.rank, shape.columns))
        if factor is None:
            fresh = first_factor(shape, gradient.device, self._seed, "boundary", item, value)
            factor = self._keep(item, value, FACTOR, fresh)
        flat = torch.empty(shape.numbers, device=gradient.device)
        left_RN, right_RD = shape.halves(flat)
        matrix_ND = self._owed(item, value, gradient, shape)
        factorize(matrix_ND, factor, left_RN, right_RD)
        factor.copy_(right_RD)
        if self.settings.feedback:
            subtract_product(matrix_ND, left_RN, right_RD)
        stats = self.stats.setdefault(item, BoundaryStats())
        if self.settings.checks:
            stats.sent(gradient, flat, (begin, self._clock.stamp()))
        if self.settings.check_error and activation is not None:
            if not self.settings.feedback:
                matrix_ND = matrix_ND.clone()
                subtract_product(matrix_ND, left_RN, right_RD)
            stats.lost(matrix_ND, activation)
            self._change(item, value, matrix_ND, activation)
        if self.settings.feedback and self._scale != 1.0:
            matrix_ND.mul_(1.0 / self._scale)
        return flat

    def _change(self, item: str, value: str, error_ND: torch.Tensor, activation: torch.Tensor) -> None:
        """Measure what the microbatch before lost beside the change of the activations since then."""
        if not self.settings.feedback:
            return
        before = self._before.get((item, value))
        if before is not None:
            self.stats[item].changed(before[0], activation.detach().float() - before[1])
        self._before[item, value] = (error_ND.clone(), activation.detach().float().clone())

    def _owed(self, item: str, value: str, gradient: torch.Tensor, shape: FactorShape) -> torch.Tensor:
        """The gradient and what was lost before, as a float32 matrix; with feedback, in the memory's own place."""
        if not self.settings.feedback:
            return gradient.reshape(shape.rows, shape.columns).float()
        error = self._kept(item, value, ERROR, tuple(gradient.shape))
        if error is None:
            error = self._keep(item, value, ERROR, torch.zeros(gradient.shape, device=gradient.device))
        if self._scale != 1.0:
            error.mul_(self._scale)
        return error.add_(gradient).view(shape.rows, shape.columns)

    def _kept(self, item: str, value: str, what: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A memory; None where there is none of this shape."""
        kept = self._store.memories.get(item, {}).get(memory_name(item, "boundary", value, what))
        return None if kept is None or kept.shape[1:] != shape else kept[0]

    def _keep(self, item: str, value: str, what: str, memory: torch.Tensor) -> torch.Tensor:
        self._store.memories.setdefault(item, {})[memory_name(item, "boundary", value, what)] = memory[None]
        return memory

    def decode(self, flat: torch.Tensor, out: torch.Tensor, item: str) -> None:
        """Write the gradient that the factors say to ``out``; ``item`` is the last one before the boundary."""
        begin = self._clock.stamp()
        shape = FactorShape.of(out.shape, self._rank)
        reconstruct(*shape.halves(flat), out.view(shape.rows, shape.columns))
        if self.settings.checks:
            self.stats.setdefault(item, BoundaryStats()).received(out, (begin, self._clock.stamp()))
