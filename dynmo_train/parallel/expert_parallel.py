"""Expert parallelism: the experts of a layer are sharded over neighboring replicas; tokens travel to them and back.

All-to-all of the tokens of a microbatch (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2)::

    rows by expert -> all-to-all -> local experts -> all-to-all -> rows by expert
    send .............. in flight .......... receive

The caller computes what does not depend on the rows (shared experts) between :meth:`TokenDispatcher.send` and
:meth:`TokenDispatcher.run`, while they are in flight; in the backward, their gradients are in flight meanwhile.

torch's all-to-all needs the number of rows of each rank on the host. Two cases:

* Every rank has the same, fixed number of rows per expert (padded capacity): equal parts, and nothing is read.
* Otherwise the ranks exchange their counts, and the host reads them: the one time per layer that it waits for the
  device. The copy to the host runs in the background of the work that is enqueued between
  :meth:`TokenDispatcher.exchange_counts` and :meth:`TokenDispatcher.send`.

Every rank has E/P experts of a layer, at first a block of neighboring ones; :meth:`TokenDispatcher.place` assigns
others (:mod:`.expert_replicas` has other numbers, and replicas). Rows are sent by rank, then by expert. An expert gets
its rows in the order of their source wherever it is, so that its results and gradients have the same bits on every
rank.

Shapes in names: R rows of this process, D width, E experts of all processes, P processes, L experts of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .expert_chunks import Hosts
from .host_copy import HostCopy


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


@dataclass(frozen=True, kw_only=True)
class ReceivedCounts:
    """How many rows arrive.

    Attributes:
        by_rank_PL: From each rank for each local expert, int32 ``[P, L]`` on the CPU.
        by_expert_L: For each local expert, int32 ``[L]`` on the device.
    """

    by_rank_PL: torch.Tensor
    by_expert_L: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """Rows on their way to the processes of their experts.

    Attributes:
        num_rows: Number of rows R before they were sent, including those that belong to no expert.
        groups: Rows of each of all experts.
        exchange: The exchange in flight.
        received: How many rows arrive; None where all ranks exchange equal parts.
    """

    num_rows: int
    groups: RowGroups
    exchange: RowExchange
    received: ReceivedCounts | None = None


class TokenDispatcher:
    """Sends tokens to the processes that have their experts.

    Args:
        group: Processes that share the experts of a layer.
        rank: Rank of this process in the group; at first it has the ``rank``-th block of the experts.
        size: Number of processes in the group.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._placed: dict[str, tuple[Hosts, ...]] = {}

    def hosts_of(self, item: str, num_experts: int) -> tuple[Hosts, ...]:
        """Return the ranks that have each expert of an item, its owner first.

        Args:
            item: Name of the item.
            num_experts: Its number of experts, a multiple of the group's size.
        """
        part = num_experts // self.size
        return self._placed.get(item) or tuple((expert // part,) for expert in range(num_experts))

    def place(self, item: str, hosts: Sequence[Hosts]) -> None:
        """Assign the experts of an item to ranks; items that are built from now on follow it.

        Args:
            item: Name of the item.
            hosts: Ranks that have each expert, its owner first.

        Raises:
            ValueError: The placement is not one of this dispatcher; see :meth:`problem_of`.
        """
        if (problem := self.problem_of(item, hosts)) is not None:
            raise ValueError(problem)
        self._placed[item] = tuple(hosts)

    def problem_of(self, item: str, ranks: Sequence[Sequence[int]]) -> str | None:
        """Return what is wrong with a placement; None if nothing is.

        Args:
            item: Name of the item.
            ranks: Ranks that would have each expert.
        """
        if any(len(placed) != 1 for placed in ranks):
            return f"{item}: has replicas of experts; requires --moe-expert-slots"
        counts = [sum(placed[0] == rank for placed in ranks) for rank in range(self.size)]
        if sum(counts) != len(ranks) or len(set(counts)) > 1:
            slots = "or --moe-expert-slots for other numbers"
            return f"{item}: the {self.size} ranks have {counts} experts; must have the same number, {slots}"
        return None

    def exchange_counts(self, groups: RowGroups) -> CountExchange | None:
        """Start to exchange the numbers of rows; None where all ranks have the same. A collective.

        Args:
            groups: Rows of each of all experts.
        """
        if groups.is_fixed:
            return None
        sent_PL = groups.counts_E().view(self.size, -1)
        received_PL = torch.empty_like(sent_PL)
        dist.all_to_all_single(received_PL, sent_PL, group=self.group)
        return CountExchange(sent_PL, received_PL)

    def send(self, rows_RD: torch.Tensor, groups: RowGroups, counts: CountExchange | None) -> SentRows:
        """Start to send each row to the process of its expert. A collective.

        Args:
            rows_RD: Rows by expert, ``[R, D]``.
            groups: Rows of each of all experts.
            counts: Result of :meth:`exchange_counts`.
        """
        if counts is None:
            exchange = self._start(rows_RD, None, None)
            return SentRows(num_rows=len(rows_RD), groups=groups, exchange=exchange)
        sent_PL, received_PL = counts.read()
        sent_counts, received_counts = sent_PL.sum(1).tolist(), received_PL.sum(1).tolist()
        exchange = self._start(rows_RD[: sum(sent_counts)], sent_counts, received_counts)
        received = ReceivedCounts(by_rank_PL=received_PL, by_expert_L=counts.received_L)
        return SentRows(num_rows=len(rows_RD), groups=groups, exchange=exchange, received=received)

    def run(self, sent: SentRows, apply: Apply) -> torch.Tensor:
        """Wait for the rows, apply the experts to them, and return the results to the processes of their tokens.

        Args:
            sent: Result of :meth:`send`.
            apply: Applies the local experts to rows by expert.

        Returns:
            The results in the order of the rows that were sent, ``[R, D]``; zero for rows that belong to no expert.
        """
        if sent.received is None:
            return self._run_fixed(sent.exchange.wait(), sent.groups.host_counts()[0], apply)
        received_PL = sent.received.by_rank_PL
        # Rows arrive by source, then expert; experts need them by expert, then source.
        experts = range(received_PL.shape[1])
        by_source = sent.exchange.wait().split(received_PL.reshape(-1).tolist())
        by_expert = torch.cat([by_source[source * len(experts) + e] for e in experts for source in range(self.size)])
        ends_L = sent.received.by_expert_L.cumsum(0).to(torch.int32)
        local = RowGroups(ends_E=ends_L, counts=tuple(received_PL.sum(0).tolist()))
        done = apply(by_expert, local).split(received_PL.t().reshape(-1).tolist())
        # The inverse order, so that the second exchange returns each row to its source, by expert as before.
        back = torch.cat([done[e * self.size + source] for source in range(self.size) for e in experts])
        results = self._start(back, sent.exchange.received_counts, sent.exchange.sent_counts).wait()
        unused = sent.num_rows - len(results)
        return torch.cat([results, results.new_zeros(unused, results.shape[1])]) if unused else results

    def _run_fixed(self, arrived: torch.Tensor, count: int, apply: Apply) -> torch.Tensor:
        """Apply the experts to ``count`` rows of each expert from every rank, and return them."""
        width = arrived.shape[1]
        by_expert = arrived.view(self.size, -1, count, width).transpose(0, 1)
        experts = by_expert.shape[0]
        groups = equal_groups(experts, self.size * count, arrived.device)
        done = apply(by_expert.reshape(-1, width), groups)
        back = done.view(experts, self.size, count, width).transpose(0, 1).reshape(-1, width)
        return self._start(back, None, None).wait()

    def _start(
        self, rows: torch.Tensor, sent_counts: list[int] | None, received_counts: list[int] | None
    ) -> RowExchange:
        return RowExchange(rows, sent_counts, received_counts, self.group)


class RowExchange:
    """An all-to-all of rows in flight, with a backward that is in flight as long.

    Autograd runs the backward of what was computed between start and :meth:`wait` while the gradients travel: it
    visits nodes in the reverse order of their creation.

    Args:
        rows: Rows by destination, ``[R, D]``.
        sent_counts: Rows for each rank; None is equal parts.
        received_counts: Rows from each rank; None is equal parts.
        group: Processes that exchange.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        sent_counts: list[int] | None,
        received_counts: list[int] | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.sent_counts, self.received_counts = sent_counts, received_counts
        self._group = group
        self._work: dist.Work | None = None
        self._in_use: torch.Tensor | None = None
        self._arriving, self._rows = _Start.apply(rows, self)  # type: ignore[no-untyped-call]

    def start(self, rows: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
        """Start the exchange of ``rows``, or with ``backward`` of their gradients; returns what will arrive."""
        sent, received = self.sent_counts, self.received_counts
        if backward:
            sent, received = received, sent
        # Kept until the exchange has ended, which reads it.
        self._in_use = rows.contiguous()
        arriving = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
        self._work = dist.all_to_all_single(arriving, self._in_use, received, sent, group=self._group, async_op=True)
        return arriving

    def end(self) -> None:
        """Wait for the exchange: the host on CPU, else the current stream."""
        if self._work is not None:
            self._work.wait()
        self._work = self._in_use = None

    def wait(self) -> torch.Tensor:
        """Wait for the rows from all ranks and return them, by source."""
        arrived: torch.Tensor = _End.apply(self._arriving, self._rows, self)  # type: ignore[no-untyped-call]
        return arrived


class _Start(torch.autograd.Function):
    """Returns what will arrive, and a stand-in for the rows, through which their gradient comes back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: RowExchange) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        # Without memory: autograd checks the shape of a gradient against the output that it belongs to.
        return exchange.start(rows), rows.new_empty(1).expand(rows.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.exchange.end()
        return grads[1], None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: torch.Tensor, _rows: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.end()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, ctx.exchange.start(grads[0], backward=True), None
