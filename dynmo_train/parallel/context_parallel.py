"""Context parallelism: each rank has two chunks of every sample, and gathers the keys and values of the others.

A sample is cut into ``2 * size`` chunks. Rank i has chunks i and ``2 * size - 1 - i`` (Grattafiori et al. 2024,
arXiv:2407.21783, section 3.3.2), so that under a causal mask all ranks compute the same number of scores; 2 ranks::

    chunk        0  1  2  3      queries of a chunk attend to all chunks up to it
    rank         0  1  1  0      rank 0: 1 + 4 chunks of keys; rank 1: 2 + 3

Between layers nothing is exchanged. Within one, keys and values are gathered while other work runs, and their gradients
are exchanged in the same way::

    start 1, start 2, wait 1, attend 1 | gather 2, wait 2, attend 2        1, 2: halves of the heads
    backward of attend 2, send 2, backward of attend 1 | exchange 2, send 1, add 2, add 1

The device alone waits for a collective, never the host. The parameters are those of replicas: their gradients are
reduced over context and data ranks together.

Shapes in names: B samples, T tokens of this rank, S tokens of all ranks, G key-value groups, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .collectives import start_gather_rows
from .process_groups import World


def cut_chunks(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return the two chunks of a rank, next to each other.

    Args:
        x: Tensor of any shape; the length of ``dim`` is a multiple of ``2 * size``.
        dim: Dimension of the tokens.
        rank: Context-parallel rank.
        size: Number of context-parallel ranks.
    """
    chunk = x.shape[dim] // (2 * size)
    return torch.cat([x.narrow(dim, rank * chunk, chunk), x.narrow(dim, (2 * size - 1 - rank) * chunk, chunk)], dim)


class ContextRegion:
    """The ranks that share the tokens of a sample.

    Args:
        group: Context-parallel ranks; None computes shapes without communication.
        rank: Rank of this process in the group.
        size: Number of ranks.
        weighs_steps: Whether loss masks are weights in the mean of the step; else in that of their microbatch.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, *, weighs_steps: bool = False) -> None:
        self.group, self.rank, self.size, self.weighs_steps = group, rank, size, weighs_steps

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's chunks of ``x``, of any shape, along the dimension ``dim`` of the tokens."""
        return cut_chunks(x, dim, self.rank, self.size)

    def positions(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Return the places in the sample of this rank's tokens, int64 ``[T]``.

        Args:
            tokens: T.
            device: Of the result.
        """
        return self.cut(torch.arange(tokens * self.size, device=device), 0)

    def keys_of_chunks(self, tokens: int) -> tuple[int, int]:
        """Return how many keys the queries of each of this rank's chunks may attend to, of ``tokens`` T here."""
        chunk = tokens // 2
        return (self.rank + 1) * chunk, (2 * self.size - self.rank) * chunk

    def gather_tokens(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Return the values of all tokens in their order, ``[B, S]``, of those of this rank ``x_BT``; no gradient."""
        parts = x_BT.new_empty((self.size, *x_BT.shape))
        if self.group is None:
            parts[:] = x_BT
        else:
            start_gather_rows(parts.flatten(0, 1), x_BT.contiguous(), self.group).wait()
        first, second = parts.chunk(2, dim=2)
        return torch.cat([first, second.flip(0)]).transpose(0, 1).flatten(1)

    def start_gather(self, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor) -> StartedGather:
        """Start to gather the keys and values of all tokens.

        Args:
            k_BGTK: Keys of this rank, ``[B, G, T, K]``.
            v_BGTK: Values of this rank, ``[B, G, T, K]``.
        """
        return StartedGather(torch.stack([k_BGTK, v_BGTK]), self)

    def start_sum(self, x: torch.Tensor) -> StartedSum:
        """Start to add ``x`` of all ranks, of any shape, which has no gradient."""
        return StartedSum(x.detach().clone(), self.group)


class _Pending:
    """A collective on the device, and the tensors that it reads, which must live until it has ended."""

    def __init__(self) -> None:
        self._work: dist.Work | None = None
        self._read: torch.Tensor | None = None

    def start(self, work: dist.Work | None, read: torch.Tensor) -> None:
        self._work, self._read = work, read

    def wait(self) -> None:
        """Make the device wait, and on gloo the host."""
        if self._work is not None:
            self._work.wait()
        self._work = self._read = None


class StartedGather:
    """Keys and values that are on their way.

    Args:
        local: Of this rank, ``[2, B, G, T, K]``.
        region: Ranks that share the tokens.
    """

    def __init__(self, local: torch.Tensor, region: ContextRegion) -> None:
        self._region, self._pending = region, _Pending()
        self._parts: torch.Tensor = _StartGather.apply(local, region, self._pending)  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all tokens, in their order: ``[B, G, S, K]`` each."""
        gathered: torch.Tensor = _FinishGather.apply(self._parts, self._region, self._pending)  # type: ignore[no-untyped-call]
        keys, values = gathered.unbind()
        return keys, values


class _StartGather(torch.autograd.Function):
    """``[2, B, G, T, K]`` to that of all ranks, ``[size, 2, B, G, T, K]``; the gradient is summed in their order."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, region: ContextRegion, pending: _Pending) -> torch.Tensor:
        ctx.pending = pending
        local = local.contiguous()
        parts = local.new_empty((region.size, *local.shape))
        if region.group is None:
            parts[:] = local
        else:
            pending.start(start_gather_rows(parts.flatten(0, 1), local, region.group), local)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        # The gradients are those that :class:`_FinishGather` receives, complete only now.
        ctx.pending.wait()
        return grads[0].sum(0, dtype=torch.float32).to(grads[0].dtype), None, None


class _FinishGather(torch.autograd.Function):
    """``[size, 2, B, G, T, K]`` by rank to ``[2, B, G, S, K]`` in the order of the tokens."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, region: ContextRegion, pending: _Pending) -> torch.Tensor:
        ctx.region, ctx.pending = region, pending
        pending.wait()
        chunk = parts.shape[4] // 2
        # First halves ascend with the rank, second halves descend.
        first, second = parts[:, :, :, :, :chunk], parts[:, :, :, :, chunk:].flip(0)
        return torch.cat([first, second]).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        region: ContextRegion = ctx.region
        sent = torch.stack([cut_chunks(grads[0], 3, rank, region.size) for rank in range(region.size)])
        if region.group is None:
            return sent, None, None
        # Not a reduce-scatter, which adds in an order of its own, and in bf16 rounds every partial sum.
        received = torch.empty_like(sent)
        ctx.pending.start(dist.all_to_all_single(received, sent, group=region.group, async_op=True), sent)
        return received, None, None


class StartedSum:
    """A sum over the ranks that is on its way.

    Args:
        x: Of this rank, any shape; it is overwritten.
        group: Context-parallel ranks; None adds nothing.
    """

    def __init__(self, x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self._x = x
        self._work = None if group is None else dist.all_reduce(x, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the sum, which the device alone waits for."""
        if self._work is not None:
            self._work.wait()
        return self._x


def context_region(world: World, *, weighs_steps: bool = False) -> ContextRegion | None:
    """Return the context-parallel ranks of this process; None where there is one.

    Args:
        world: Processes of the run.
        weighs_steps: As of :class:`ContextRegion`.
    """
    size = world.dims.context
    if size == 1:
        return None
    return ContextRegion(world.groups.context, world.context_rank, size, weighs_steps=weighs_steps)
