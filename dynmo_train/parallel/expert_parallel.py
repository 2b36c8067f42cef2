"""Expert parallelism: the experts of a layer are dealt out over neighbouring replicas; rows travel to them and back.

All-to-all of the rows of a microbatch (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2), with no padding.

Shapes in names: M rows of this process, R rows that arrive, D width.
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
    """The processes that share the experts of a layer, as one of them sees it.

    Attributes:
        rank, size: of this process among them; it holds the ``rank``-th block of the experts.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def own(self, num_experts: int) -> range:
        """The numbers of the experts that this process holds."""
        part = num_experts // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def run(self, sorted_MD: torch.Tensor, counts: list[int], apply: Apply) -> torch.Tensor:
        """Send each row to the process of its expert, apply the experts there, and take the results back.

        Args:
            sorted_MD: rows in the order of their experts, of all experts.
            counts: rows for each expert.
            apply: the experts of this process, on rows in their order and the number of rows for each.
        """
        sent = torch.tensor(counts, dtype=torch.int64).view(self.size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        leaving, arriving = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived_RD = self._exchange(sorted_MD, leaving, arriving)
        # Rows come by source and expert; the experts want them by expert and source.
        experts = range(received.shape[1])
        by_source = arrived_RD.split(received.reshape(-1).tolist())
        by_expert_RD = torch.cat([by_source[source * len(experts) + e] for e in experts for source in range(self.size)])
        done = apply(by_expert_RD, received.sum(0).tolist()).split(received.t().reshape(-1).tolist())
        back_RD = torch.cat([done[e * self.size + source] for source in range(self.size) for e in experts])
        return self._exchange(back_RD, arriving, leaving)

    def _exchange(self, rows: torch.Tensor, leaving: list[int], arriving: list[int]) -> torch.Tensor:
        exchanged: torch.Tensor = _AllToAll.apply(rows, leaving, arriving, self._group)  # type: ignore[no-untyped-call]
        return exchanged


def token_dispatcher(world: World) -> TokenDispatcher | None:
    """The exchange of this process; None where each replica holds all experts."""
    group = world.groups.expert
    if group is None:
        return None
    return TokenDispatcher(group, world.data_rank % world.dims.expert, world.dims.expert)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, leaving: list[int], arriving: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.leaving, ctx.arriving, ctx.group = leaving, arriving, group
        return _all_to_all(rows, leaving, arriving, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_to_all(grads[0], ctx.arriving, ctx.leaving, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, leaving: list[int], arriving: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    exchanged = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(exchanged, rows.contiguous(), arriving, leaving, group=group)
    return exchanged
