"""From one partition to another: which items move, how many bytes on which link, and how long that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..formats.plan import Migration, Move, Stage
from ..partition.problem import Chain

BASE_PAUSE_NS = 50_000_000
"""What a move costs beyond its bytes (announce, verify, rebuild the schedule) until it has been measured."""


def migration(
    chain: Chain, owner: Mapping[str, int], stages: Sequence[Stage], bandwidth: int | None, base_pause_ns: int
) -> Migration:
    """The moves that make the new stages out of the old owners.

    Links work side by side, so the predicted pause is ``base_pause_ns`` plus the largest bytes of one directed pair
    of workers over the bandwidth; it is 0 where nothing moves.
    """
    size = dict(zip(chain.names, chain.move_bytes, strict=True))
    moves = tuple(
        Move(item=item, from_worker=owner[item], to_worker=stage.worker, bytes=size[item])
        for stage in stages
        for item in stage.items
        if owner.get(item, stage.worker) != stage.worker
    )
    links: Counter[tuple[int, int]] = Counter()
    for move in moves:
        links[move.from_worker, move.to_worker] += move.bytes
    largest = max(links.values(), default=0)
    transfer = largest * 1_000_000_000 // bandwidth if bandwidth else 0
    return Migration(
        moves=moves,
        bytes=sum(move.bytes for move in moves),
        max_link_bytes=largest,
        pause_ns=base_pause_ns + transfer if moves else 0,
    )
