"""Tensor parallelism: the collectives of a region.

A region (Megatron's "tensor model parallel region") starts before a column-parallel product and ends after a
row-parallel one (Shoeybi et al. 2019, arXiv:1909.08053, section 3)::

                 forward                       backward
    enter        identity  / all-gather        all-reduce / reduce-scatter
    (local)      column-parallel product, activation, row-parallel product
    leave        all-reduce / reduce-scatter   identity   / all-gather

The second operations are those of sequence parallelism, where activations outside of regions are sharded along the
tokens (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2). Slices are plain tensors, not DTensors: masks, the CSR
product, fused AdamW and migration work on plain storage, and DTensor's dispatch costs more than a small product on CPU.

Shapes in names: B samples, T tokens, D width, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .async_tensor_parallel import gather_product, product_scatter
from .collectives import (
    all_gather_rows,
    all_gather_samples,
    reduce_scatter_rows,
    reduce_scatter_samples,
    start_gather_rows,
)
from .process_groups import World
from .random_stream import active_stream
from .region_seeds import region_seeds, seed_region

TOKENS_DIM = 1
SAMPLE_BYTES = 1 << 20
"""Size of a sample from which gloo exchanges samples without transpositions faster (measured with 2 and 4 ranks)."""


class PendingGather(NamedTuple):
    """A gather that runs while other work does.

    Attributes:
        result: Tensor that the gather writes.
        work: Handle of the collective; None where there was none.
    """

    result: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        """Return the result; on CUDA the stream waits, and the host does not."""
        if self.work is not None:
            self.work.wait()
        return self.result


class TensorRegion:
    """The collectives of the tensor-parallel ranks.

    Between :meth:`enter` and :meth:`leave` random numbers differ by rank. Outside they are the same on all ranks,
    except with sequence parallelism, where each rank has other tokens.

    Args:
        group: Tensor-parallel ranks.
        rank: Rank of this process in the group.
        size: Number of ranks.
        device: Device of this process.
        sequence: Sequence parallelism: activations outside of regions are sharded along the tokens.
        overlaps: With ``sequence``: linear layers overlap their products with the collectives at their ends.
    """

    overlaps = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        device: torch.device,
        *,
        sequence: bool,
        overlaps: bool = False,
    ) -> None:
        self.group, self.rank, self.size, self.sequence = group, rank, size, sequence
        self._device, self.overlaps = device, overlaps and sequence

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Enter a region: return the input of a column-parallel product, ``[B, T, ...]`` with all tokens.

        Args:
            x: ``[B, T, ...]``, equal on all ranks; with sequence parallelism this rank's tokens,
                ``[B, T / size, ...]``.
        """
        x = self._seed(x, inside=True)
        entered: torch.Tensor = _EnterRegion.apply(x, self)  # type: ignore[no-untyped-call]
        return entered

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Leave a region: return the sum of the ranks' products.

        Args:
            partial: Product of this rank's slice, ``[B, T, ...]``; not changed.

        Returns:
            ``[B, T, ...]``, equal on all ranks; with sequence parallelism this rank's tokens, ``[B, T / size, ...]``.
        """
        left: torch.Tensor = _LeaveRegion.apply(partial, self)  # type: ignore[no-untyped-call]
        return self._seed(left, inside=False)

    def enter_product(self, x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Enter a region with a column-parallel product, overlapped with the gather; not in a compiled graph.

        Args:
            x: This rank's tokens, ``[B, T / size, I]``.
            weight_OI: This rank's slice of the weight, ``[O, I]``.

        Returns:
            The product, ``[B, T, O]``.
        """
        return gather_product(self._seed(x, inside=True), weight_OI, self.group)

    def leave_product(self, x_BTI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Leave a region with a row-parallel product, overlapped with the reduction; not in a compiled graph.

        Args:
            x_BTI: Input of this rank's slice, ``[B, T, I]``.
            weight_OI: This rank's slice of the weight, ``[O, I]``.

        Returns:
            This rank's tokens of the summed products, ``[B, T / size, O]``.
        """
        return self._seed(product_scatter(x_BTI, weight_OI, self.group), inside=False)

    def local_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """With sequence parallelism: return this rank's tokens of ``x`` ``[..., T, D]``, as a view; else ``x``."""
        if not self.sequence:
            return x
        part = x.shape[-2] // self.size
        return x.narrow(-2, self.rank * part, part)

    def without_sequence_parallelism(self) -> TensorRegion:
        """Return a region of the same ranks for a module that works on all tokens."""
        return TensorRegion(self.group, self.rank, self.size, self._device, sequence=False)

    def gather_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the tokens of all ranks, for work that all ranks then do identically.

        Args:
            x: This rank's tokens, ``[B, T / size, D]``.

        Returns:
            ``[B, T, D]``. Its gradient is equal on all ranks, so that each keeps its own part without a reduction.
        """
        whole: torch.Tensor = _GatherTokens.apply(x, self)  # type: ignore[no-untyped-call]
        return whole

    def scatter_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of activations that are identical on all ranks.

        Args:
            x: All tokens, ``[B, T, D]``.

        Returns:
            ``[B, T / size, D]``.
        """
        cut: torch.Tensor = _ScatterTokens.apply(x, self)  # type: ignore[no-untyped-call]
        return cut

    def gather_vocabulary(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' columns of ``x``, for work that all ranks then do identically.

        Args:
            x: This rank's columns, ``[..., V]``.

        Returns:
            ``[..., size * V]``.
        """
        whole: torch.Tensor = _GatherColumns.apply(x, self)  # type: ignore[no-untyped-call]
        return whole

    def seed_inside(self) -> None:
        """Draw random numbers by rank, until :meth:`leave`."""
        if self._set_scope(inside=True):
            region_seeds(self.rank, self.sequence, self._device).enter()

    def _set_scope(self, *, inside: bool) -> bool:
        """Set whose random numbers the item draws; return whether it also draws from the default generator."""
        stream = active_stream()
        if stream is None:
            return True
        stream.scope = 1 + self.rank if inside or self.sequence else 0
        return stream.seeds_generator

    def _seed(self, x: torch.Tensor, *, inside: bool) -> torch.Tensor:
        """Seed what draws random numbers of this region, or behind it; return ``x``."""
        if torch.compiler.is_compiling():
            # In a graph only data orders operations: what draws from the generator must depend on the seeding.
            return seed_region(x, self.rank, self.sequence, inside) if self._set_scope(inside=inside) else x
        if inside:
            self.seed_inside()
        else:
            self._seed_outside()
        return x

    def _seed_outside(self) -> None:
        if self._set_scope(inside=False):
            region_seeds(self.rank, self.sequence, self._device).leave()

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce the ranks' tensors in place and return the result; ``x`` is contiguous, of any shape."""
        dist.all_reduce(x, op=op, group=self.group)
        return x

    def start_gather(self, x: torch.Tensor) -> PendingGather:
        """Start to stack the ranks' tensors ``x`` ``[...]``, contiguous: ``[size, ...]`` once it is waited for."""
        whole = x.new_empty((self.size, *x.shape))
        return PendingGather(whole, start_gather_rows(whole.view(-1), x.view(-1), self.group))

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tokens ``x``: ``[B, T / size, ...]`` becomes ``[B, T, ...]``."""
        if _is_by_sample(x, x.nbytes * self.size):
            local = x.contiguous()
            gathered = local.new_empty((local.shape[0], local.shape[1] * self.size, *local.shape[2:]))
            all_gather_samples(gathered, local, self.group)
            return gathered
        # A collective concatenates along the first dimension, hence the transposition; without effect on one sample.
        own = x.transpose(0, TOKENS_DIM).contiguous()
        whole = own.new_empty((own.shape[0] * self.size, *own.shape[1:]))
        all_gather_rows(whole, own, self.group)
        return whole.transpose(0, TOKENS_DIM).contiguous()

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' columns ``x``: ``[..., V / size]`` becomes ``[..., V]``."""
        return self.gather_slices(x, -1)

    def gather_slices(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate the ranks' ``x`` ``[..., N / size, ...]``, of equal shapes, along ``dim``: ``[..., N, ...]``."""
        local = x.movedim(dim, 0).contiguous()
        whole = local.new_empty((local.shape[0] * self.size, *local.shape[1:]))
        all_gather_rows(whole, local, self.group)
        return whole.movedim(0, dim)

    def scatter_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' ``x`` ``[B, T, ...]`` and return this rank's tokens of the sum, ``[B, T / size, ...]``."""
        if _is_by_sample(x, x.nbytes):
            local = x.contiguous()
            scattered = local.new_empty((local.shape[0], local.shape[1] // self.size, *local.shape[2:]))
            reduce_scatter_samples(scattered, local, self.group)
            return scattered
        whole = x.transpose(0, TOKENS_DIM).contiguous()
        own = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        reduce_scatter_rows(own, whole, self.group)
        return own.transpose(0, TOKENS_DIM).contiguous()


def _is_by_sample(x: torch.Tensor, whole_bytes: int) -> bool:
    """Whether the tokens of each sample are exchanged in place; the bits are the same.

    Args:
        x: ``[B, ...]``.
        whole_bytes: Size of the tokens of all ranks.
    """
    # A compiler fuses the transpositions. gloo exchanges each sample by itself, and takes longer over small ones.
    if len(x) == 1 or torch.compiler.is_compiling():
        return False
    return x.device.type != "cpu" or whole_bytes >= len(x) * SAMPLE_BYTES


def tensor_region(world: World, *, sequence: bool, overlaps: bool = False) -> TensorRegion | None:
    """Return the region of this process; None without tensor parallelism. See :class:`TensorRegion`."""
    group = world.groups.tensor
    if group is None:
        return None
    return TensorRegion(group, world.tensor_rank, world.dims.tensor, world.device, sequence=sequence, overlaps=overlaps)


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: TensorRegion) -> torch.Tensor:
        ctx.region = region
        return region.gather_tokens(x) if region.sequence else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        region: TensorRegion = ctx.region
        if region.sequence:
            return region.scatter_tokens(grads[0]), None
        return region.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, region: TensorRegion) -> torch.Tensor:
        ctx.region = region
        if region.sequence:
            return region.scatter_tokens(partial)
        # The all-reduce is in place: a copy, so that it does not change a tensor that autograd may have saved.
        return region.all_reduce(partial.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        region: TensorRegion = ctx.region
        return (region.gather_tokens(grads[0]) if region.sequence else grads[0]), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: TensorRegion) -> torch.Tensor:
        # Unlike at the start of a region, the ranks' gradients are the same, and must not be summed.
        ctx.region = region
        return region.gather_tokens(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.region.local_tokens(grads[0]).contiguous(), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: TensorRegion) -> torch.Tensor:
        ctx.region = region
        return region.local_tokens(x).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.region.gather_tokens(grads[0]), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: TensorRegion) -> torch.Tensor:
        ctx.region = region
        return region.gather_columns(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        region: TensorRegion = ctx.region
        part = grads[0].shape[-1] // region.size
        return grads[0].narrow(-1, region.rank * part, part).contiguous(), None
