"""Expert parallelism: the experts of a layer are sharded over neighboring replicas; tokens travel to them and back.

All-to-all of the tokens of a microbatch (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2)::

    rows by expert -> all-to-all -> local experts -> all-to-all -> rows by expert

torch's all-to-all needs the number of rows of each rank on the host. Two cases:

* Every rank has the same, fixed number of rows per expert (padded capacity): equal parts, and nothing is read.
* Otherwise the ranks exchange their counts, and the host reads them: the one time per layer that it waits for the
  device. The copy to the host runs in the background of the work that is enqueued between
  :meth:`TokenDispatcher.exchange_counts` and :meth:`TokenDispatcher.run`.

Shapes in names: R rows of this process, D width, E experts of all processes, P processes, L experts of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .host_copy import HostCopy
from .process_groups import World


@dataclass(frozen=True, kw_only=True)
class RowGroups:
    """Which rows belong to which expert: consecutive rows, in the order of the experts.

    Attributes:
        ends_E: int32 end of each expert's rows, on the device of the rows; rows after the last belong to no expert.
        counts: Number of rows of each expert, where it is known without reading the device; None otherwise.
        is_fixed: Whether all ranks that share the experts have the same ``counts``, equal for all experts.
    """

    ends_E: torch.Tensor
    counts: tuple[int, ...] | None = None
    is_fixed: bool = False

    def counts_E(self) -> torch.Tensor:
        """Return the number of rows of each expert, int32, on the device."""
        return torch.diff(self.ends_E, prepend=self.ends_E.new_zeros(1))

    def host_counts(self) -> tuple[int, ...]:
        """Return the number of rows of each expert; waits for the device where ``counts`` is None."""
        return tuple(self.counts_E().tolist()) if self.counts is None else self.counts


def equal_groups(experts: int, count: int, device: torch.device, *, is_fixed: bool = False) -> RowGroups:
    """Return groups of ``count`` rows, at least 1, for each of ``experts`` experts.

    Args:
        experts: Number of experts.
        count: Rows of each.
        device: Device of the rows.
        is_fixed: Whether all ranks that share the experts have the same count.
    """
    ends_E = torch.arange(count, (experts + 1) * count, count, dtype=torch.int32, device=device)
    return RowGroups(ends_E=ends_E, counts=(count,) * experts, is_fixed=is_fixed)


Apply = Callable[[torch.Tensor, RowGroups], torch.Tensor]


class CountExchange:
    """The numbers of rows that each rank sends to each expert, on their way to the host.

    Args:
        sent_PL: Rows that this rank sends, int32 ``[P, L]``.
        received_PL: Rows that this rank receives, int32 ``[P, L]``.
    """

    def __init__(self, sent_PL: torch.Tensor, received_PL: torch.Tensor) -> None:
        self._counts = HostCopy(torch.stack([sent_PL, received_PL]))
        self.received_L = received_PL.sum(0)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows sent and received, ``[P, L]`` each, on the CPU; waits for the copy."""
        sent_PL, received_PL = self._counts.read()
        return sent_PL, received_PL


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

    def exchange_counts(self, groups: RowGroups) -> CountExchange | None:
        """Start to exchange the numbers of rows; None where all ranks have the same. A collective.

        Args:
            groups: Rows of each of all experts.
        """
        if groups.is_fixed:
            return None
        sent_PL = groups.counts_E().view(self.size, -1)
        received_PL = torch.empty_like(sent_PL)
        dist.all_to_all_single(received_PL, sent_PL, group=self._group)
        return CountExchange(sent_PL, received_PL)

    def run(self, rows_RD: torch.Tensor, groups: RowGroups, counts: CountExchange | None, apply: Apply) -> torch.Tensor:
        """Send each row to the process of its expert, apply the experts there, and return the results.

        Args:
            rows_RD: Rows by expert, ``[R, D]``.
            groups: Rows of each of all experts.
            counts: Result of :meth:`exchange_counts`.
            apply: Applies the local experts to rows by expert.

        Returns:
            The results in the order of ``rows_RD``, ``[R, D]``; zero for rows that belong to no expert.
        """
        if counts is None:
            return self._run_fixed(rows_RD, groups.host_counts()[0], apply)
        sent_PL, received_PL = counts.read()
        sent_counts, received_counts = sent_PL.sum(1).tolist(), received_PL.sum(1).tolist()
        used = sum(sent_counts)
        arrived = self._exchange(rows_RD[:used], sent_counts, received_counts)
        # Rows arrive by source, then expert; experts need them by expert, then source.
        experts = range(received_PL.shape[1])
        by_source = arrived.split(received_PL.reshape(-1).tolist())
        by_expert = torch.cat([by_source[source * len(experts) + e] for e in experts for source in range(self.size)])
        local = RowGroups(ends_E=counts.received_L.cumsum(0).to(torch.int32), counts=tuple(received_PL.sum(0).tolist()))
        done = apply(by_expert, local).split(received_PL.t().reshape(-1).tolist())
        # The inverse order, so that the second exchange returns each row to its source, by expert as before.
        back = torch.cat([done[e * self.size + source] for source in range(self.size) for e in experts])
        results = self._exchange(back, received_counts, sent_counts)
        unused = len(rows_RD) - used
        return torch.cat([results, results.new_zeros(unused, results.shape[1])]) if unused else results

    def _run_fixed(self, rows_RD: torch.Tensor, count: int, apply: Apply) -> torch.Tensor:
        """Exchange ``count`` rows of each expert with every rank."""
        width = rows_RD.shape[1]
        arrived = self._exchange(rows_RD, None, None)
        by_expert = arrived.view(self.size, -1, count, width).transpose(0, 1)
        experts = by_expert.shape[0]
        groups = equal_groups(experts, self.size * count, rows_RD.device)
        done = apply(by_expert.reshape(-1, width), groups)
        back = done.view(experts, self.size, count, width).transpose(0, 1).reshape(-1, width)
        return self._exchange(back, None, None)

    def _exchange(
        self, rows: torch.Tensor, sent_counts: list[int] | None, received_counts: list[int] | None
    ) -> torch.Tensor:
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
        ctx: Any,
        rows: torch.Tensor,
        sent_counts: list[int] | None,
        received_counts: list[int] | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sent_counts, ctx.received_counts, ctx.group = sent_counts, received_counts, group
        return _all_to_all(rows, sent_counts, received_counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_to_all(grads[0], ctx.received_counts, ctx.sent_counts, ctx.group), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent_counts: list[int] | None, received_counts: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    arriving = len(rows) if received_counts is None else sum(received_counts)
    exchanged = rows.new_empty((arriving, *rows.shape[1:]))
    dist.all_to_all_single(exchanged, rows.contiguous(), received_counts, sent_counts, group=group)
    return exchanged
