"""Expert parallelism: the experts of a layer are sharded over neighboring replicas; tokens travel to them and back.

All-to-all of the tokens of a microbatch (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2), without padding::

    rows by expert -> all-to-all -> local experts -> all-to-all -> rows by expert

Shapes in names: M rows of this process, R rows that it receives, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .process_groups import World

Apply = Callable[[torch.Tensor, list[int]], torch.Tensor]


class TokenDispatcher:
    """Sends tokens to the processes that have their experts.

    Args:
        group: Processes that share the experts of a layer.
        rank: Rank of this process in the group; it has the ``rank``-th block of the experts.
        size: Number of processes in the group.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def local_experts(self, num_experts: int) -> range:
        """Return the indices of this process's experts of ``num_experts``, a multiple of the group's size."""
        part = num_experts // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def run(self, sorted_MD: torch.Tensor, counts: list[int], apply: Apply) -> torch.Tensor:
        """Send each row to the process of its expert, apply the experts there, and return the results.

        Args:
            sorted_MD: Rows sorted by expert, ``[M, D]``.
            counts: Number of rows of each of all experts.
            apply: Applies the local experts to rows ``[R, D]`` sorted by expert, with the number of rows of each.

        Returns:
            The results in the order of ``sorted_MD``, ``[M, D]``.
        """
        # On the CPU: the sizes of the exchange of tokens have to be known on the host, without waiting for the device.
        sent = torch.tensor(counts, dtype=torch.int64).view(self.size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        sent_counts, received_counts = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived_RD = self._exchange(sorted_MD, sent_counts, received_counts)
        # Rows arrive by source, then expert; experts need them by expert, then source.
        experts = range(received.shape[1])
        by_source = arrived_RD.split(received.reshape(-1).tolist())
        by_expert_RD = torch.cat([by_source[source * len(experts) + e] for e in experts for source in range(self.size)])
        done = apply(by_expert_RD, received.sum(0).tolist()).split(received.t().reshape(-1).tolist())
        # The inverse order, so that the second exchange returns each row to its source, sorted by expert as before.
        back_RD = torch.cat([done[e * self.size + source] for source in range(self.size) for e in experts])
        return self._exchange(back_RD, received_counts, sent_counts)

    def _exchange(self, rows: torch.Tensor, sent_counts: list[int], received_counts: list[int]) -> torch.Tensor:
        exchanged: torch.Tensor = _AllToAll.apply(rows, sent_counts, received_counts, self._group)  # type: ignore[no-untyped-call]
        return exchanged


def token_dispatcher(world: World) -> TokenDispatcher | None:
    """Return the dispatcher of this process; None where each replica has all experts."""
    group = world.groups.expert
    if group is None:
        return None
    return TokenDispatcher(group, world.data_rank % world.dims.expert, world.dims.expert)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent_counts: list[int], received_counts: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent_counts, ctx.received_counts, ctx.group = sent_counts, received_counts, group
        return _all_to_all(rows, sent_counts, received_counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_to_all(grads[0], ctx.received_counts, ctx.sent_counts, ctx.group), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent_counts: list[int], received_counts: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    exchanged = rows.new_empty((sum(received_counts), *rows.shape[1:]))
    dist.all_to_all_single(exchanged, rows.contiguous(), received_counts, sent_counts, group=group)
    return exchanged
