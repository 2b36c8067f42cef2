"""Compressed backpropagation with lazy error propagation (Optimus-CC, arXiv:2301.09830, sections 4 and 5).

The gradient that a stage sends back travels as low-rank factors::

    sender    gradient + error -> factorize -> factors [R, N], [R, D] -> send
                        ^                         |
                        +---- error = input - product (error feedback, added to the next microbatch)
    receiver  factors -> product -> gradient

A boundary is named by the item behind it. Its two memories, the error and the factor that warm-starts the next
iteration, belong to that item: they move with it and are saved with it. A boundary that a new partition creates starts
without memories.
"""

from __future__ import annotations

import torch

from ...parallel.device_clock import Clock
from ..item_state import memory_name
from ..item_store import ItemStore
from .lowrank import FactorShape, factorize, initial_factor, reconstruct, subtract_product
from .settings import CompressionSettings
from .stats import BoundaryStats

ERROR, FACTOR = "error", "factor"


class BoundaryCodec:
    """Compresses and decompresses the gradients that cross the boundaries of this pipeline rank.

    Errors are stored without the loss scale, so that a change of the scale does not change them.

    Args:
        settings: Settings with a ``boundary_rank``.
        store: Stores the memories.
        seed: Seed of the run.
        clock: Clock for the statistics.

    Attributes:
        stats: Item behind a boundary -> statistics of the current step.

    Raises:
        ValueError: ``settings.boundary_rank`` is None.
    """

    def __init__(self, settings: CompressionSettings, store: ItemStore, seed: int, clock: Clock) -> None:
        if settings.boundary_rank is None:
            raise ValueError("compression of boundaries needs a rank")
        self.settings, self._rank = settings, settings.boundary_rank
        self.store, self._seed, self._clock = store, seed, clock
        self._loss_scale = 1.0
        self.stats: dict[str, BoundaryStats] = {}
        # (item, value) -> error and activation of the previous microbatch, for the statistics.
        self._previous: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin_step(self, loss_scale: float) -> None:
        """Start a step, whose gradients are multiplied by ``loss_scale``."""
        self._loss_scale = loss_scale
        self.stats = {}
        self._previous = {}
        # Lazy error propagation: the error of a step's last microbatch is dropped, since the weights change after it.
        if self.settings.feedback_within_step:
            for item, memories in self.store.memories.items():
                for name in self._names_of(item):
                    if name.endswith(f".{ERROR}"):
                        memories[name].zero_()

    def keep_only(self, items: set[str]) -> None:
        """Drop the memories of boundaries that are not before one of these items."""
        for item in self.store.memories:
            if item not in items:
                self._drop(item)

    def drop_nonfinite(self) -> None:
        """After a step with gradients that are not finite: drop the memories that these have spoilt."""
        for item, memories in self.store.memories.items():
            if not all(bool(memories[name].isfinite().all()) for name in self._names_of(item)):
                self._drop(item)

    def _names_of(self, item: str) -> list[str]:
        prefix = memory_name(item, "boundary", "")
        return [name for name in self.store.memories[item] if name.startswith(prefix)]

    def _drop(self, item: str) -> None:
        for name in self._names_of(item):
            del self.store.memories[item][name]

    def empty(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Allocate the factors of a gradient of ``shape``, flat float32 ``[(N + D) * R]``."""
        return torch.empty(FactorShape.of(shape, self._rank).numel, device=device)

    def encode(
        self, item: str, value: str, gradient: torch.Tensor, activation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compress the gradient that crosses the boundary before ``item``.

        Args:
            item: Item behind the boundary.
            value: Name of the value that crosses it.
            gradient: ``[..., D]``, any float dtype; not changed.
            activation: What crossed the boundary in the forward, in the gradient's shape, for the statistics.

        Returns:
            Both factors in one tensor, flat float32 ``[(N + D) * R]``.
        """
        begin = self._clock.stamp()
        shape = FactorShape.of(gradient.shape, self._rank)
        factor = self._memory(item, value, FACTOR, (shape.rank, shape.columns))
        if factor is None:
            initial = initial_factor(shape, gradient.device, self._seed, "boundary", item, value)
            factor = self._set_memory(item, value, FACTOR, initial)
        flat = torch.empty(shape.numel, device=gradient.device)
        left_RN, right_RD = shape.split(flat)
        matrix_ND = self._add_error(item, value, gradient, shape)
        factorize(matrix_ND, factor, left_RN, right_RD)
        # In place: the memory is a tensor that migration and checkpoints refer to.
        factor.copy_(right_RD)
        if self.settings.feedback:
            subtract_product(matrix_ND, left_RN, right_RD)
        stats = self.stats.setdefault(item, BoundaryStats())
        if self.settings.checks:
            stats.add_sent(gradient, flat, (begin, self._clock.stamp()))
        if self.settings.check_error and activation is not None:
            if not self.settings.feedback:
                matrix_ND = matrix_ND.clone()
                subtract_product(matrix_ND, left_RN, right_RD)
            stats.add_error(matrix_ND, activation)
            self._measure_change(item, value, matrix_ND, activation)
        # The matrix is the memory of the error itself: it is stored without the loss scale.
        if self.settings.feedback and self._loss_scale != 1.0:
            matrix_ND.mul_(1.0 / self._loss_scale)
        return flat

    def _measure_change(self, item: str, value: str, error_ND: torch.Tensor, activation: torch.Tensor) -> None:
        """Compare the error of the previous microbatch with the change of the activations since then."""
        if not self.settings.feedback:
            return
        previous = self._previous.get((item, value))
        if previous is not None:
            self.stats[item].add_change(previous[0], activation.detach().float() - previous[1])
        self._previous[item, value] = (error_ND.clone(), activation.detach().float().clone())

    def _add_error(self, item: str, value: str, gradient: torch.Tensor, shape: FactorShape) -> torch.Tensor:
        """Return gradient plus error as a float32 matrix ``[N, D]``; with feedback, in the memory of the error."""
        if not self.settings.feedback:
            return gradient.reshape(shape.rows, shape.columns).float()
        error = self._memory(item, value, ERROR, tuple(gradient.shape))
        if error is None:
            error = self._set_memory(item, value, ERROR, torch.zeros(gradient.shape, device=gradient.device))
        if self._loss_scale != 1.0:
            error.mul_(self._loss_scale)
        return error.add_(gradient).view(shape.rows, shape.columns)

    def _memory(self, item: str, value: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return a memory; None where there is none of this shape."""
        memory = self.store.memories.get(item, {}).get(memory_name(item, "boundary", value, kind))
        # The first dimension, of size 1, is this process's place in the tensor of all processes in a checkpoint.
        return None if memory is None or memory.shape[1:] != shape else memory[0]

    def _set_memory(self, item: str, value: str, kind: str, memory: torch.Tensor) -> torch.Tensor:
        self.store.memories.setdefault(item, {})[memory_name(item, "boundary", value, kind)] = memory[None]
        return memory

    def decode(self, flat: torch.Tensor, out: torch.Tensor, item: str) -> None:
        """Decompress a gradient.

        Args:
            flat: Both factors, flat float32 ``[(N + D) * R]``, as :meth:`encode` returns them.
            out: Receives the gradient, ``[..., D]`` of any float dtype, contiguous.
            item: Item behind the boundary, for the statistics.
        """
        begin = self._clock.stamp()
        shape = FactorShape.of(out.shape, self._rank)
        reconstruct(*shape.split(flat), out.view(shape.rows, shape.columns))
        if self.settings.checks:
            self.stats.setdefault(item, BoundaryStats()).add_received(out, (begin, self._clock.stamp()))
