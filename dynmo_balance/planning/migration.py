"""Migrations between partitions: which items move, the bytes on each link, and the pause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..formats.plan import Migration, Move, Stage
from ..partition.problem import Chain

BASE_PAUSE_NS = 50_000_000
"""Pause apart from transfers (announce, verify, rebuild the schedule), until the run has measured it."""


def migration(
    chain: Chain, owner: Mapping[str, int], stages: Sequence[Stage], bandwidth: int | None, base_pause_ns: int
) -> Migration:
    """The moves that lead from the current owners to the new stages.

    Transfers on different links overlap. So the predicted pause is ``base_pause_ns`` plus the largest number of bytes
    from one worker to another over the bandwidth; it is 0 if nothing moves.

    Args:
        chain: the items.
        owner: the worker of each item now.
        stages: the new stages.
        bandwidth: bytes per second; None is unlimited.
        base_pause_ns: pause in ns apart from transfers.
    """
    # Items that the current plan does not have are not moved: without an active plan there is no migration.
    size = dict(zip(chain.names, chain.move_bytes, strict=True))
    moves = tuple(
        Move(item=item, from_worker=owner[item], to_worker=stage.worker, bytes=size[item])
        for stage in stages
        for item in stage.items
        if owner.get(item, stage.worker) != stage.worker
    )
    links: Counter[tuple[int, int]] = Counter()
    for move in moves:
        # By direction: both directions of a link transfer at the same time.
        links[move.from_worker, move.to_worker] += move.bytes
    largest = max(links.values(), default=0)
    transfer = largest * 1_000_000_000 // bandwidth if bandwidth else 0
    return Migration(
        moves=moves,
        bytes=sum(move.bytes for move in moves),
        max_link_bytes=largest,
        pause_ns=base_pause_ns + transfer if moves else 0,
    )
