"""Which rank computes which rows of replicated experts: pure functions of the counts that all ranks know.

The rows of an expert in a microbatch have one order, by source rank and then by token, and are cut into chunks of a
fixed number of rows. A chunk is computed whole, on one rank that has the expert, so that neither the shapes of its
products nor their results depend on the placement::

    counts [sources, experts] --+-> chunks of each expert --> host_ranges: the rows of each host, in whole chunks
    hosts of each expert -------+                                 |
                                                                  v
                                        exchange_of: rows to send, rows that arrive, and their orders

``host_ranges`` balances the microbatch at hand: experts on one rank come first, then each replicated expert fills its
least loaded hosts. So a placement that was made for older tokens is used as well as its hosts allow.

Shapes in names: S source ranks, E experts, R rows, C chunks that this rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Hosts = tuple[int, ...]
"""Ranks that have an expert: its owner, which has its parameters, then those with copies, ascending."""
# Each replicated expert is distributed again, around what the others have left.
_SWEEPS = 2


def hosts_of_ranks(owners: Sequence[int], ranks: Sequence[Sequence[int]]) -> tuple[Hosts, ...]:
    """Return the hosts of each expert; an owner that still has its expert stays its owner.

    Args:
        owners: Owner of each expert now.
        ranks: Ranks that will have each expert, the preferred owner first.
    """
    hosts = []
    for owner, placed in zip(owners, ranks, strict=True):
        first = owner if owner in placed else placed[0]
        hosts.append((first, *sorted(set(placed) - {first})))
    return tuple(hosts)


def host_ranges(
    totals: Sequence[int], hosts: Sequence[Hosts], chunk_rows: int, num_ranks: int
) -> list[list[tuple[int, int]]]:
    """Return the rows of each expert that each of its hosts computes.

    Args:
        totals: Rows of each expert.
        hosts: Ranks that have each expert.
        chunk_rows: Rows of a chunk; the last one of an expert may have fewer.
        num_ranks: Number of ranks.

    Returns:
        For each expert ``(rank, end)``, by rank: the rank computes the rows before ``end`` that no earlier one has.
    """
    loads = [0] * num_ranks
    replicated = sorted((e for e, on in enumerate(hosts) if len(on) > 1), key=lambda e: (-totals[e], e))
    ranges: list[list[tuple[int, int]]] = [[(on[0], totals[e])] for e, on in enumerate(hosts)]
    for expert, on in enumerate(hosts):
        if len(on) == 1:
            loads[on[0]] += totals[expert]
    done: dict[int, list[tuple[int, int]]] = {}
    for _ in range(_SWEEPS):
        for expert in replicated:
            for rank, rows in done.get(expert, ()):
                loads[rank] -= rows
            shares = _fill(totals[expert], sorted(hosts[expert]), loads)
            ends = [_to_chunk(end, totals[expert], chunk_rows) for end in accumulate(rows for _, rows in shares)]
            ranks = [rank for rank, _ in shares]
            ranges[expert] = list(zip(ranks, ends, strict=True))
            done[expert] = [(rank, end - begin) for rank, (begin, end) in zip(ranks, pairwise([0, *ends]), strict=True)]
            for rank, rows in done[expert]:
                loads[rank] += rows
    return ranges


def _to_chunk(row: int, total: int, chunk_rows: int) -> int:
    """Return the end of a chunk nearest to ``row``."""
    nearest = (2 * row + chunk_rows) // (2 * chunk_rows) * chunk_rows
    return total if row >= total else min(total, nearest)


def _fill(rows: int, ranks: Sequence[int], loads: Sequence[int]) -> list[tuple[int, int]]:
    """Return ``(rank, rows)`` such that the largest load is the least: the lightest ranks are filled to one level."""
    order = sorted(ranks, key=lambda rank: (loads[rank], rank))
    total, filled = rows, 0
    for rank in order:
        # With one rank more the level is above its load: it takes part.
        if filled and total <= loads[rank] * filled:
            break
        total += loads[rank]
        filled += 1
    level, rest = divmod(total, filled)
    shares = dict.fromkeys(ranks, 0)
    for place, rank in enumerate(order[:filled]):
        shares[rank] = level + (place < rest) - loads[rank]
    return [(rank, shares[rank]) for rank in ranks]


@dataclass(frozen=True, kw_only=True)
class ChunkExchange:
    """The exchange of one microbatch, from the view of one rank.

    Attributes:
        to_ranks_R: Rows by expert in the order in which they are sent: by rank, then by expert.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
        to_chunks_R: Rows that have arrived, by source, in the order of the chunks.
        experts: Expert of each chunk that this rank computes.
        rows: Number of rows of each of these chunks.
    """

    to_ranks_R: Array
    sent: tuple[int, ...]
    received: tuple[int, ...]
    to_chunks_R: Array
    experts: tuple[int, ...]
    rows: tuple[int, ...]


def exchange_of(
    counts_SE: Array, ranges: Sequence[Sequence[tuple[int, int]]], chunk_rows: int, rank: int
) -> ChunkExchange:
    """Return what a rank sends and receives.

    Args:
        counts_SE: Rows of each source for each expert.
        ranges: Result of :func:`host_ranges`.
        chunk_rows: Rows of a chunk.
        rank: The rank, also as a source.
    """
    num_sources, num_experts = counts_SE.shape
    totals_E = counts_SE.sum(0)
    chunks_E = -(-totals_E // chunk_rows)
    first_E = np.cumsum(chunks_E) - chunks_E
    owners = np.concatenate(
        [
            np.repeat([host for host, _ in hosts], np.diff([0, *(-(-end // chunk_rows) for _, end in hosts)]))
            for hosts in ranges
        ]
        or [np.empty(0, np.int64)]
    ).astype(np.int64)
    begins_SE = np.cumsum(counts_SE, axis=0) - counts_SE
    # The rows of this source: their experts, their places among all rows of the expert, and so their chunks.
    expert_R = np.repeat(np.arange(num_experts), counts_SE[rank])
    within_R = np.arange(len(expert_R)) - np.repeat(np.cumsum(counts_SE[rank]) - counts_SE[rank], counts_SE[rank])
    target_R = owners[first_E[expert_R] + (begins_SE[rank][expert_R] + within_R) // chunk_rows]
    mine_C = np.flatnonzero(owners == rank)
    expert_C = np.searchsorted(first_E + chunks_E, mine_C, side="right")
    begin_C = (mine_C - first_E[expert_C]) * chunk_rows
    end_C = np.minimum(begin_C + chunk_rows, totals_E[expert_C])
    # How many rows of a source are in a chunk.
    sizes_SC = np.maximum(
        0,
        np.minimum(end_C, (begins_SE + counts_SE)[:, expert_C]) - np.maximum(begin_C, begins_SE[:, expert_C]),
    )
    return ChunkExchange(
        to_ranks_R=np.argsort(target_R, kind="stable").astype(np.int64),
        sent=tuple(np.bincount(target_R, minlength=num_sources).tolist()),
        received=tuple(sizes_SC.sum(1).tolist()),
        to_chunks_R=_transposed(sizes_SC),
        experts=tuple(expert_C.tolist()),
        rows=tuple((end_C - begin_C).tolist()),
    )


def _transposed(sizes_SC: Array) -> Array:
    """Return the places of rows that are sorted by row of ``sizes_SC``, sorted by its columns instead."""
    sizes = sizes_SC.reshape(-1)
    begins_SC = (np.cumsum(sizes) - sizes).reshape(sizes_SC.shape)
    sizes, begins = sizes_SC.T.reshape(-1), begins_SC.T.reshape(-1)
    total = int(sizes.sum())
    places: Array = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(total)
    return places
