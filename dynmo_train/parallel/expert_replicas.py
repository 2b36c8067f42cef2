"""Expert parallelism with replicas: an expert may be on several ranks, and ranks may have different numbers of them.

As :mod:`.expert_parallel`, but what travels is cut into chunks (:mod:`.expert_chunks`), and every rank knows the counts
of all ranks, so that each finds by itself which rank computes which chunk::

    counts -> all-gather -> host -> plan of the exchange          one read of the device per layer, as without replicas
    rows by expert -> by rank -> all-to-all -> by chunk -> experts -> by source -> all-to-all -> by rank -> by expert

Shapes in names: R rows of this process, D width, S source ranks, E experts of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .collectives import all_gather_rows
from .expert_chunks import Array, ChunkExchange, Hosts, exchange_of, host_ranges
from .expert_parallel import RowExchange, RowGroups, TokenDispatcher
from .host_copy import HostCopy
from .process_groups import World

ApplyChunks = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]


class GatheredCounts:
    """The rows of all ranks for all experts, on their way to the host.

    Args:
        counts_SE: Rows of each source for each expert, int32 ``[S, E]``.
    """

    def __init__(self, counts_SE: torch.Tensor) -> None:
        self._counts = HostCopy(counts_SE)

    def read(self) -> Array:
        """Return the rows, ``[S, E]``; waits for the copy."""
        return self._counts.read().numpy().astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Order:
    """A permutation of rows, and its inverse; int64 ``[R]`` on the device of the rows."""

    places: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def of(cls, places: Array, device: torch.device) -> Order:
        """Return a permutation of the host on ``device``, without waiting for it."""
        both = np.empty((2, len(places)), dtype=np.int64)
        both[0] = places
        both[1, places] = np.arange(len(places))
        host = torch.from_numpy(both)
        on_device = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
        return cls(places=on_device[0], inverse=on_device[1])

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows in this order, ``[R, D]``."""
        ordered: torch.Tensor = _Permute.apply(rows, self.places, self.inverse)  # type: ignore[no-untyped-call]
        return ordered

    def undo(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in this order in their former order, ``[R, D]``."""
        ordered: torch.Tensor = _Permute.apply(rows, self.inverse, self.places)  # type: ignore[no-untyped-call]
        return ordered


@dataclass(frozen=True, kw_only=True)
class SentChunks:
    """Rows on their way to the processes that compute their chunks.

    Attributes:
        num_rows: Number of rows before they were sent, including those that belong to no expert.
        plan: Who computes what.
        exchange: The exchange in flight.
        to_ranks: The order in which they were sent.
    """

    num_rows: int
    plan: ChunkExchange
    exchange: RowExchange
    to_ranks: Order


class ReplicaDispatcher(TokenDispatcher):
    """Sends tokens to the processes that have their experts, which may be several for an expert.

    Args:
        group: Processes that share the experts of a layer.
        rank: Rank of this process in the group; at first it has the ``rank``-th block of the experts.
        size: Number of processes in the group.
        slots: Experts and copies of a layer that a rank may have.
        chunk_rows: Rows of a chunk.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, *, slots: int, chunk_rows: int) -> None:
        super().__init__(group, rank, size)
        self.slots, self.chunk_rows = slots, chunk_rows

    def problem_of(self, item: str, ranks: Sequence[Sequence[int]]) -> str | None:
        """Return what is wrong with a placement; None if nothing is."""
        counts = [0] * self.size
        for expert, placed in enumerate(ranks):
            if not placed or len(set(placed)) < len(placed) or not set(placed) <= set(range(self.size)):
                return f"{item}: expert {expert} is on ranks {list(placed)}; must be different ones of {self.size}"
            for rank in placed:
                counts[rank] += 1
        if max(counts) > self.slots:
            return f"{item}: a rank has {max(counts)} experts and copies; --moe-expert-slots is {self.slots}"
        return None

    def gather_counts(self, groups: RowGroups) -> GatheredCounts | None:
        """Start to gather the numbers of rows; None where all ranks have the same. A collective.

        Args:
            groups: Rows of each of all experts.
        """
        if groups.is_fixed:
            return None
        counts_E = groups.counts_E()
        counts_SE = counts_E.new_empty((self.size, len(counts_E)))
        all_gather_rows(counts_SE, counts_E[None], self.group)
        return GatheredCounts(counts_SE)

    def send_chunks(
        self, rows_RD: torch.Tensor, groups: RowGroups, counts: GatheredCounts | None, hosts: Sequence[Hosts]
    ) -> SentChunks:
        """Start to send each row to the process that computes its chunk. A collective.

        Args:
            rows_RD: Rows by expert, ``[R, D]``.
            groups: Rows of each of all experts.
            counts: Result of :meth:`gather_counts`.
            hosts: Ranks that have each expert.
        """
        if counts is None:
            counts_SE = np.tile(np.asarray(groups.host_counts(), dtype=np.int64), (self.size, 1))
        else:
            counts_SE = counts.read()
        ranges = host_ranges(counts_SE.sum(0).tolist(), hosts, self.chunk_rows, self.size)
        plan = exchange_of(counts_SE, ranges, self.chunk_rows, self.rank)
        to_ranks = Order.of(plan.to_ranks_R, rows_RD.device)
        rows = to_ranks.apply(rows_RD[: len(plan.to_ranks_R)])
        exchange = self._start(rows, list(plan.sent), list(plan.received))
        return SentChunks(num_rows=len(rows_RD), plan=plan, exchange=exchange, to_ranks=to_ranks)

    def run_chunks(self, sent: SentChunks, apply: ApplyChunks) -> torch.Tensor:
        """Wait for the rows, apply the experts to them, and return the results to the processes of their tokens.

        Args:
            sent: Result of :meth:`send_chunks`.
            apply: Applies experts to rows by chunk: rows ``[R, D]``, expert and number of rows of each chunk.

        Returns:
            The results in the order of the rows that were sent, ``[R, D]``; zero for rows that belong to no expert.
        """
        plan = sent.plan
        arrived = sent.exchange.wait()
        to_chunks = Order.of(plan.to_chunks_R, arrived.device)
        done = apply(to_chunks.apply(arrived), plan.experts, plan.rows)
        back = self._start(to_chunks.undo(done), list(plan.received), list(plan.sent)).wait()
        results = sent.to_ranks.undo(back)
        unused = sent.num_rows - len(results)
        return torch.cat([results, results.new_zeros(unused, results.shape[1])]) if unused else results


def token_dispatcher(world: World, *, slots: int | None = None, chunk_rows: int = 0) -> TokenDispatcher | None:
    """Return the dispatcher of this process; None where each replica has all experts.

    Args:
        world: Processes of the run.
        slots: Experts and copies of a layer that a rank may have; None: no copies, and equal numbers of experts.
        chunk_rows: With ``slots``: rows of a chunk.
    """
    group = world.groups.expert
    if group is None:
        return None
    rank, size = world.data_rank % world.dims.expert, world.dims.expert
    if slots is None:
        return TokenDispatcher(group, rank, size)
    return ReplicaDispatcher(group, rank, size, slots=slots, chunk_rows=chunk_rows)


class _Permute(torch.autograd.Function):
    """A gather in both directions: the backward of an indexing would be a sum, which CUDA adds in no fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None
