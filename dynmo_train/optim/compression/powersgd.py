"""PowerSGD between replicas (arXiv:1905.13727): gradients of matrices are summed as low-rank factors.

Per item, in two collectives::

    M = gradient + error           each replica
    P = sum over replicas of M Q   all-reduce of the first factors, then orthonormalized
    Q = sum over replicas of M^T P all-reduce of the second factors
    gradient = P Q^T               each replica: approximates the sum of all M
    error = M - P Q^T / replicas   each replica: its share of what the sum lost

Gradients are sums here, not means. All replicas start from the same Q, and later from the Q of the previous step.
Error and Q are memories of the item: they move with it and are saved with it. A pipeline rank that does not compress
adds the error uncompressed to the next gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...models.layer_list import masks_of
from ...parallel.device_clock import Clock
from ...parallel.process_groups import World
from ..item_state import memory_name
from ..item_store import ItemStore
from .lowrank import (
    FACTOR_BYTES,
    FactorShape,
    allocate_factors,
    initial_factor,
    orthonormalize,
    reconstruct,
    subtract_product,
)
from .settings import CompressionSettings
from .stats import ReplicaStats

ERROR, FACTOR = "error", "factor"


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A parameter's gradient plus error, ``[N, D]``, and its factors, which are views of the item's flat tensors."""

    name: str
    parameter: nn.Parameter
    shape: FactorShape
    matrix_ND: torch.Tensor
    left_RN: torch.Tensor
    right_RD: torch.Tensor


class _FactorReduction:
    """The sums of one item's factors in progress; a ``Reduction``."""

    def __init__(
        self, codec: ReplicaCodec, item: str, matrices: list[_Matrix], lefts: torch.Tensor, rights: torch.Tensor
    ) -> None:
        self._codec, self._item, self._matrices, self._rights = codec, item, matrices, rights
        self._work = dist.all_reduce(lefts, group=codec.group, async_op=True)

    def advance(self) -> None:
        """The first factors are summed: orthonormalize them and start the sum of the second ones."""
        self._wait()
        with self._codec.timed(self._item, compressing=True):
            for each in self._matrices:
                orthonormalize(each.left_RN)
                torch.mm(each.left_RN, each.matrix_ND, out=each.right_RD)
        self._work = dist.all_reduce(self._rights, group=self._codec.group, async_op=True)

    def finish(self) -> None:
        """Both are summed: set the gradients to their product and store the errors."""
        self._wait()
        with self._codec.timed(self._item, compressing=False):
            for each in self._matrices:
                self._codec.apply_sum(self._item, each)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()


class ReplicaCodec:
    """Sums the gradients of the local items over the replicas in compressed form; a ``Compressor``.

    Args:
        settings: Settings with a ``replica_rank``.
        store: Stores the memories.
        world: Processes of the run; at least two replicas.
        seed: Seed of the run.
        clock: Clock for the statistics.

    Attributes:
        num_compressing_stages: Number of pipeline ranks, from the first one, that compress; None is all.
        stats: Item -> statistics of the current step.

    Raises:
        ValueError: There is no rank, or one replica.
    """

    def __init__(self, settings: CompressionSettings, store: ItemStore, world: World, seed: int, clock: Clock) -> None:
        if settings.replica_rank is None or world.groups.data is None:
            raise ValueError("compression between replicas needs a rank and at least two replicas")
        self.settings, self.group, self._rank = settings, world.groups.data, settings.replica_rank
        self._store, self._world, self._seed, self._clock = store, world, seed, clock
        self._step, self._loss_scale = 0, 1.0
        # With ``auto`` nothing is compressed until ``dynmo-plan`` has chosen from measured costs.
        self.num_compressing_stages = 0 if settings.choose_workers else settings.replica_workers
        self.stats: dict[str, ReplicaStats] = {}

    def set_world(self, world: World) -> None:
        """Continue among the processes of ``world``, whose replicas are the same."""
        self._world = world

    def begin_step(self, step: int, loss_scale: float) -> None:
        """Start a step, whose gradients are multiplied by ``loss_scale``."""
        self._step, self._loss_scale = step, loss_scale
        self.stats = {}

    @property
    def compresses(self) -> bool:
        """Whether this pipeline rank compresses in this step."""
        count = self.num_compressing_stages
        chosen = count is None or self._world.pipeline_rank < count
        return chosen and self._step > self.settings.replica_warmup_steps

    def shape_of(self, parameter: torch.Tensor) -> FactorShape | None:
        """Return the shape of ``parameter`` ``[N, ...]`` as N rows by the rest.

        None for a vector, and where the factors are not smaller.
        """
        if parameter.dim() < 2:
            return None
        shape = FactorShape.of((parameter.shape[0], parameter[0].numel()), self._rank)
        return shape if shape.is_smaller(FACTOR_BYTES) else None

    def start(
        self, item: str, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[_FactorReduction | None, list[nn.Parameter]]:
        """Start the compressed sums of an item's gradients; also return the parameters to be summed uncompressed.

        Raises:
            ValueError: A parameter to compress has no gradient.
        """
        shapes = {name: self.shape_of(p) for name, p in parameters.items()} if self.compresses else {}
        compressed = {name: shape for name, shape in shapes.items() if shape is not None}
        plain = [p for name, p in parameters.items() if name not in compressed]
        # After a change of the compressing pipeline ranks: what a parameter has not sent yet must not be lost.
        for name, parameter in parameters.items():
            if name not in compressed:
                self._flush_error(item, name, parameter)
        if not compressed:
            return None, plain
        device = next(iter(parameters.values())).device
        lefts, rights, views = allocate_factors(list(compressed.values()), device)
        matrices = []
        with self.timed(item, compressing=True):
            for (name, shape), (left_RN, right_RD) in zip(compressed.items(), views, strict=True):
                matrix_ND = self._add_error(item, name, parameters[name], shape)
                torch.mm(self._factor(item, name, shape, device), matrix_ND.T, out=left_RN)
                matrices.append(
                    _Matrix(
                        name=name,
                        parameter=parameters[name],
                        shape=shape,
                        matrix_ND=matrix_ND,
                        left_RN=left_RN,
                        right_RD=right_RD,
                    )
                )
        if self.settings.checks:
            num_bytes = sum(each.parameter.numel() for each in matrices) * FACTOR_BYTES
            self._stats(item).add_sent(num_bytes, sum(shape.num_bytes for shape in compressed.values()))
        return _FactorReduction(self, item, matrices, lefts, rights), plain

    @contextmanager
    def timed(self, item: str, *, compressing: bool) -> Iterator[None]:
        """Measure arithmetic of compression, or of decompression, where the run checks that."""
        begin = self._clock.stamp()
        yield
        if self.settings.checks:
            stats = self._stats(item)
            (stats.compress if compressing else stats.decompress).append((begin, self._clock.stamp()))

    def _stats(self, item: str) -> ReplicaStats:
        return self.stats.setdefault(item, ReplicaStats())

    def apply_sum(self, item: str, each: _Matrix) -> None:
        """Set a parameter's gradient to the product of its summed factors, and store error and factor."""
        gradient = each.parameter.grad
        if gradient is None:
            return
        if self.settings.feedback:
            # The product is the sum over the replicas: each subtracts its equal share, so that the errors add up to
            # what the sum lacks.
            subtract_product(each.matrix_ND, each.left_RN, each.right_RD, 1.0 / self._world.dims.data)
            if self._loss_scale != 1.0:
                each.matrix_ND.mul_(1.0 / self._loss_scale)
        # ``view`` below needs contiguous memory, so that the product is written to the gradient itself.
        if not gradient.is_contiguous():
            gradient = each.parameter.grad = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        reconstruct(each.left_RN, each.right_RD, gradient.view(each.shape.rows, each.shape.columns))
        # A copy: a view would keep the factors of the whole item alive.
        self._memories(item)[self._name(item, each.name, FACTOR)] = each.right_RD.clone()[None]

    def drop_nonfinite(self) -> None:
        """After a step with gradients that are not finite: drop the memories that these have spoilt."""
        for item, memories in self._store.memories.items():
            prefix = memory_name(item, "parameter", "")
            broken = [n for n, each in memories.items() if n.startswith(prefix) and not bool(each.isfinite().all())]
            for name in broken:
                del memories[name]

    def _name(self, item: str, parameter: str, kind: str) -> str:
        return memory_name(item, "parameter", parameter[len(item) + 1 :], kind)

    def _memories(self, item: str) -> dict[str, torch.Tensor]:
        return self._store.memories.setdefault(item, {})

    def _factor(self, item: str, parameter: str, shape: FactorShape, device: torch.device) -> torch.Tensor:
        factor = self._memories(item).get(self._name(item, parameter, FACTOR))
        # Another rank of the factors than in the checkpoint, or no factor yet: the power iteration starts anywhere.
        if factor is not None and factor.shape[1:] == (shape.rank, shape.columns):
            return factor[0]
        return initial_factor(shape, device, self._seed, "replicas", parameter)

    def _add_error(self, item: str, name: str, parameter: nn.Parameter, shape: FactorShape) -> torch.Tensor:
        """Return gradient plus error as a matrix ``[N, D]``; with feedback, in the memory of the error."""
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient")
        mask = self._mask(item, name)
        # Pruned entries must not use up the rank of the factors.
        if mask is not None:
            parameter.grad.mul_(mask)
        if not self.settings.feedback:
            return parameter.grad.reshape(shape.rows, shape.columns)
        key = self._name(item, name, ERROR)
        error = self._memories(item).get(key)
        if error is None or error.shape[1:] != parameter.shape:
            error = self._memories(item)[key] = torch.zeros_like(parameter, requires_grad=False).detach()[None]
        if self._loss_scale != 1.0:
            error.mul_(self._loss_scale)
        error[0].add_(parameter.grad)
        if mask is not None:
            error[0].mul_(mask)
        return error.view(shape.rows, shape.columns)

    def _mask(self, item: str, name: str) -> torch.Tensor | None:
        layer = masks_of(item, self._store.modules[item]).get(name)
        return None if layer is None else layer.mask

    def _flush_error(self, item: str, name: str, parameter: nn.Parameter) -> None:
        """Add the error of earlier steps to a gradient that is not compressed, and drop both memories."""
        memories = self._store.memories.get(item, {})
        error = memories.pop(self._name(item, name, ERROR), None)
        memories.pop(self._name(item, name, FACTOR), None)
        if error is not None and parameter.grad is not None and error.shape[1:] == parameter.shape:
            parameter.grad.add_(error[0], alpha=self._loss_scale)
