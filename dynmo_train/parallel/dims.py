"""The parallel dimensions of a run: pipeline, tensor, context, data and expert. Pure values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The rank of a process along each axis."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the axes. Ranks count along the tensor axis first, then data, then pipeline, as in Megatron.

    Attributes:
        pipeline: Number of pipeline ranks.
        tensor: Number of ranks that share each matrix product.
        data: Number of data-parallel ranks over which gradients are reduced: replicas times ``context``.
        context: Number of neighboring data-parallel ranks that share the tokens of a replica's samples; divides
            ``data``.
        expert: Number of neighboring data-parallel ranks that share the experts of a layer; divides ``data``.
        hsdp: Number of replicas of ZeRO's shards: each parameter is sharded over ``data / hsdp`` neighboring ranks, a
            multiple of ``expert``.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    hsdp: int = 1

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.tensor * self.data

    @property
    def replicas(self) -> int:
        """Number of replicas, each of which reads samples of its own."""
        return self.data // self.context

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank. Of 2 x 2 x 2, rank 5 is tensor 1, data 0, pipeline 1."""
        return Coordinates(
            pipeline=rank // (self.tensor * self.data),
            data=rank // self.tensor % self.data,
            tensor=rank % self.tensor,
        )

    def rank_of(self, *, pipeline: int, data: int, tensor: int) -> int:
        """Return the rank at coordinates ``pipeline``, ``data`` and ``tensor``, each from 0."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def ranks(
        self, *, pipeline: int | None = None, data: int | None = None, tensor: int | None = None
    ) -> tuple[int, ...]:
        """Return the ranks at coordinates ``pipeline``, ``data`` and ``tensor``, in order; None is the whole axis."""
        return tuple(
            self.rank_of(pipeline=p, data=d, tensor=t)
            for p in _along(self.pipeline, pipeline)
            for d in _along(self.data, data)
            for t in _along(self.tensor, tensor)
        )

    def context_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share the samples of ``rank``: ``context`` neighbors on its data axis."""
        return self._neighbors(rank, self.context)

    def expert_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share the experts of ``rank``: ``expert`` neighbors on its data axis."""
        return self._neighbors(rank, self.expert)

    def shard_ranks(self, rank: int, *, expert_local: bool = False) -> tuple[int, ...]:
        """Return the ranks over which ZeRO shards a parameter of ``rank``, in order of the rows.

        Args:
            rank: Rank of the run.
            expert_local: Whether the parameter belongs to an expert, which fewer ranks have.
        """
        ranks = self._ranks_with_parameter(rank, expert_local=expert_local)
        size = len(ranks) // self.hsdp
        first = ranks.index(rank) // size * size
        return ranks[first : first + size]

    def shard_copies(self, rank: int, *, expert_local: bool = False) -> tuple[int, ...]:
        """Return the ranks that have the same rows of a parameter as ``rank``; arguments as :meth:`shard_ranks`."""
        ranks = self._ranks_with_parameter(rank, expert_local=expert_local)
        size = len(ranks) // self.hsdp
        return ranks[ranks.index(rank) % size :: size]

    def _ranks_with_parameter(self, rank: int, *, expert_local: bool) -> tuple[int, ...]:
        own = self.coordinates(rank)
        ranks = self.ranks(pipeline=own.pipeline, tensor=own.tensor)
        return ranks[own.data % self.expert :: self.expert] if expert_local else ranks

    def _neighbors(self, rank: int, size: int) -> tuple[int, ...]:
        own = self.coordinates(rank)
        first = own.data // size * size
        places = range(first, first + size)
        return tuple(self.rank_of(pipeline=own.pipeline, data=d, tensor=own.tensor) for d in places)


def _along(size: int, chosen: int | None) -> Iterator[int]:
    return iter(range(size) if chosen is None else (chosen,))
