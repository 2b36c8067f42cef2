"""PowerSGD between replicas (arXiv:1905.13727): matrices' gradients are added as low-rank factors.

All replicas start from the same factor Q; the sums of their ``M Q`` are made orthonormal, the sums of ``M^T P`` are the
new Q, and ``P Q^T`` stands for the sum of all M. Gradients are sums here, not means, so each replica lost
``M - P Q^T / replicas``, which it adds to its next gradient of the parameter. Factors travel in one bucket an item.
What a parameter is owed is kept with its item: it moves, and is saved, with it; on a worker that does not compress it
is paid in full with the next gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...models.layer_list import masks_of
from ...parallel.device_clock import Clock
from ...parallel.process_groups import World
from ..item_store import ItemStore, memory_name
from .lowrank import FACTOR_BYTES, FactorShape, buckets, first_factor, orthonormalize, reconstruct, subtract_product
from .settings import CompressionSettings
from .stats import ReplicaStats

ERROR, FACTOR = "error", "factor"


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """One parameter on its way: its gradient with what was owed, and the factors (views of the item's buckets)."""

    name: str
    parameter: nn.Parameter
    shape: FactorShape
    matrix_ND: torch.Tensor
    left_RN: torch.Tensor
    right_RD: torch.Tensor


class PackedItem:
    """The matrices of one item while their factors are added: begun, then advanced, then finished."""

    def __init__(
        self, owner: ReplicaCodec, item: str, matrices: list[_Matrix], flats: tuple[torch.Tensor, ...]
    ) -> None:
        self._owner, self._item, self._matrices = owner, item, matrices
        self._lefts, self._rights = flats
        self._work = dist.all_reduce(self._lefts, group=owner.group, async_op=True)

    def advance(self) -> None:
        """The first factors are added: make them orthonormal, and begin to add the second ones."""
        self._wait()
        with self._owner.timed(self._item, compressing=True):
            for each in self._matrices:
                orthonormalize(each.left_RN)
                torch.mm(each.left_RN, each.matrix_ND, out=each.right_RD)
        self._work = dist.all_reduce(self._rights, group=self._owner.group, async_op=True)

    def finish(self) -> None:
        """Both are added: the parameters get the sum that they say, and remember what it does not."""
        self._wait()
        with self._owner.timed(self._item, compressing=False):
            for each in self._matrices:
                self._owner.apply_sum(self._item, each)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()


class ReplicaCodec:
    """Adds the gradients of the items of one worker over its replicas.

    Args:
        settings: with a ``replica_rank``.
        seed: of the run.

    Attributes:
        workers: how many workers, from the first one on, compress; None is all.
    """

    def __init__(self, settings: CompressionSettings, store: ItemStore, world: World, seed: int, clock: Clock) -> None:
        if settings.replica_rank is None or world.groups.data is None:
            raise ValueError("a rank and two replicas are needed")
        self.settings, self.group, self._rank = settings, world.groups.data, settings.replica_rank
        self._store, self._world, self._seed, self._clock = store, world, seed, clock
        self._step, self._scale = 0, 1.0
        self.workers = 0 if settings.choose_workers else settings.replica_workers
        self.stats: dict[str, ReplicaStats] = {}

    def set_world(self, world: World) -> None:
        """Go on among the processes of ``world``; those of the replicas are the same."""
        self._world = world

    def begin(self, step: int, scale: float) -> None:
        """Before a step, whose gradients are multiplied by ``scale``."""
        self._step, self._scale = step, scale
        self.stats = {}

    @property
    def packs(self) -> bool:
        """Whether this worker compresses in this step."""
        chosen = self.workers is None or self._world.pipeline_rank < self.workers
        return chosen and self._step > self.settings.replica_warmup_steps

    def shape_of(self, parameter: torch.Tensor) -> FactorShape | None:
        """How a parameter is compressed: as its rows by the rest; None where it is a vector, or it does not pay."""
        if parameter.dim() < 2:
            return None
        shape = FactorShape.of((parameter.shape[0], parameter[0].numel()), self._rank)
        return shape if shape.pays(FACTOR_BYTES) else None

    def start(self, item: str, parameters: Mapping[str, nn.Parameter]) -> tuple[PackedItem | None, list[nn.Parameter]]:
        """Begin to add the gradients of an item's parameters; also those that are to be added as they are."""
        shapes = {name: self.shape_of(p) for name, p in parameters.items()} if self.packs else {}
        packed = {name: shape for name, shape in shapes.items() if shape is not None}
        plain = [p for name, p in parameters.items() if name not in packed]
        for name, parameter in parameters.items():
            if name not in packed:
                self._pay(item, name, parameter)
        if not packed:
            return None, plain
        device = next(iter(parameters.values())).device
        lefts, rights, views = buckets(list(packed.values()), device)
        matrices = []
        with self.timed(item, compressing=True):
            for (name, shape), (left, right) in zip(packed.items(), views, strict=True):
                matrix = self._owed(item, name, parameters[name], shape)
                torch.mm(self._factor(item, name, shape, device), matrix.T, out=left)
                matrices.append(
                    _Matrix(
                        name=name,
                        parameter=parameters[name],
                        shape=shape,
                        matrix_ND=matrix,
                        left_RN=left,
                        right_RD=right,
                    )
                )
        if self.settings.checks:
            whole = sum(each.parameter.numel() for each in matrices) * FACTOR_BYTES
            self.stats.setdefault(item, ReplicaStats()).sent(whole, sum(s.num_bytes for s in packed.values()))
        return PackedItem(self, item, matrices, (lefts, rights)), plain

    def timed(self, item: str, *, compressing: bool) -> ReplicaTimer:
        """Around arithmetic of compression, or of decompression."""
        return ReplicaTimer(self, item, compressing)

    @property
    def clock(self) -> Clock:
        """What times are taken with."""
        return self._clock

    def apply_sum(self, item: str, each: _Matrix) -> None:
        """Give a parameter its sum, and keep what this replica's part of it has lost."""
        gradient = each.parameter.grad
        if gradient is None:
            return
        if self.settings.feedback:
            subtract_product(each.matrix_ND, each.left_RN, each.right_RD, 1.0 / self._world.dims.data)
            if self._scale != 1.0:
                each.matrix_ND.mul_(1.0 / self._scale)
        if not gradient.is_contiguous():
            gradient = each.parameter.grad = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        reconstruct(each.left_RN, each.right_RD, gradient.view(each.shape.rows, each.shape.columns))
        self._memories(item)[self._name(item, each.name, FACTOR)] = each.right_RD.clone()[None]

    def drop_nonfinite(self) -> None:
        """Behind a step whose gradients were not all finite: forget what that has spoilt."""
        for item, kept in self._store.memories.items():
            prefix = memory_name(item, "parameter", "")
            broken = [n for n, each in kept.items() if n.startswith(prefix) and not bool(each.isfinite().all())]
            for name in broken:
                del kept[name]

    def _name(self, item: str, parameter: str, what: str) -> str:
        return memory_name(item, "parameter", parameter[len(item) + 1 :], what)

    def _memories(self, item: str) -> dict[str, torch.Tensor]:
        return self._store.memories.setdefault(item, {})

    def _factor(self, item: str, parameter: str, shape: FactorShape, device: torch.device) -> torch.Tensor:
        kept = self._memories(item).get(self._name(item, parameter, FACTOR))
        if kept is not None and kept.shape[1:] == (shape.rank, shape.columns):
            return kept[0]
        return first_factor(shape, device, self._seed, "replicas", parameter)

    def _owed(self, item: str, name: str, parameter: nn.Parameter, shape: FactorShape) -> torch.Tensor:
        """The gradient with what was lost before, as a matrix; with feedback, in the memory's own place."""
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient")
        mask = self._mask(item, name)
        if mask is not None:
            parameter.grad.mul_(mask)
        if not self.settings.feedback:
            return parameter.grad.reshape(shape.rows, shape.columns)
        key = self._name(item, name, ERROR)
        error = self._memories(item).get(key)
        if error is None or error.shape[1:] != parameter.shape:
            error = self._memories(item)[key] = torch.zeros_like(parameter, requires_grad=False).detach()[None]
        if self._scale != 1.0:
            error.mul_(self._scale)
        error[0].add_(parameter.grad)
        if mask is not None:
            error[0].mul_(mask)
        return error.view(shape.rows, shape.columns)

    def _mask(self, item: str, name: str) -> torch.Tensor | None:
        layer = masks_of(item, self._store.modules[item]).get(name)
        return None if layer is None else layer.mask

    def _pay(self, item: str, name: str, parameter: nn.Parameter) -> None:
        """Add what is still owed to a gradient that is not compressed."""
        kept = self._store.memories.get(item, {})
        error = kept.pop(self._name(item, name, ERROR), None)
        kept.pop(self._name(item, name, FACTOR), None)
        if error is not None and parameter.grad is not None and error.shape[1:] == parameter.shape:
            parameter.grad.add_(error[0], alpha=self._scale)


class ReplicaTimer:
    """Adds the time of its body to an item's figures, where somebody measures."""

    def __init__(self, owner: ReplicaCodec, item: str, compressing: bool) -> None:
        self._owner, self._item, self._compressing = owner, item, compressing
        self._begin = owner.clock.stamp()

    def __enter__(self) -> None:
        self._begin = self._owner.clock.stamp()

    def __exit__(self, *_: object) -> None:
        if self._owner.settings.checks:
            stats = self._owner.stats.setdefault(self._item, ReplicaStats())
            stamps = (self._begin, self._owner.clock.stamp())
            (stats.compress if self._compressing else stats.decompress).append(stamps)
