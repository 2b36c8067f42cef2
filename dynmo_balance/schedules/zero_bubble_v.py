"""ZB-V: two stages per worker in a V, so that the last stage is on the worker of the first (Qi et al. 2023, section 6).

Worker ``p`` of ``P`` executes stage ``p`` on the way down and ``2 P - 1 - p`` on the way up. If forward, input
gradient and weight gradient are equally long, no worker waits between its first and last operation.
"""

from __future__ import annotations

from .._common.errors import UsageError
from .operations import Kind, Operation, Order


class _WorkerOrder:
    """The operations of one worker under construction; ``way`` is 0 on the way down and 1 on the way up."""

    def __init__(self, worker: int, workers: int) -> None:
        self.operations: list[Operation] = []
        self.done: dict[tuple[int, Kind], int] = {}
        self.stages = (worker, 2 * workers - 1 - worker)

    def count(self, way: int, kind: Kind) -> int:
        return self.done.get((way, kind), 0)

    def do(self, way: int, *kinds: Kind) -> None:
        """Append the next microbatch of each kind."""
        for kind in kinds:
            at = self.count(way, kind)
            self.operations.append(Operation(self.stages[way], kind, at))
            self.done[way, kind] = at + 1


F, B, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def _warm_up(turn: _WorkerOrder, worker: int, workers: int) -> None:
    for _ in range(2 * (workers - worker) - 1):
        turn.do(0, F)
    for _ in range(worker):
        turn.do(1, F)
        turn.do(0, F)
    for _ in range(workers - worker):
        turn.do(1, F, B, W)


def _cool_down(turn: _WorkerOrder, worker: int, workers: int) -> None:
    """Input gradients first, because other workers wait for them; the remaining weight gradients fill the end."""
    for _ in range(worker):
        turn.do(0, B)
        turn.do(1, B)
    for _ in range(workers - worker):
        turn.do(0, B, W)
    for way in (1, 0):
        while turn.count(way, W) < turn.count(way, B):
            turn.do(way, W)


def order(workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations.

    It is that of at least ``2 P - 1`` microbatches, without those that do not exist.

    Raises:
        UsageError: there are not two stages per worker.
    """
    if virtual_stages != 2:
        raise UsageError(f"zb-v needs 2 stages per worker, got {virtual_stages}; use --virtual-stages 2")
    planned = max(2 * workers - 1, microbatches)
    result = []
    for worker in range(workers):
        turn = _WorkerOrder(worker, workers)
        _warm_up(turn, worker, workers)
        while turn.count(1, F) < turn.count(0, F) or turn.count(0, F) < planned:
            if turn.count(0, F) < planned:
                turn.do(0, F)
            turn.do(0, B, W)
            turn.do(1, F, B, W)
        _cool_down(turn, worker, workers)
        result.append(tuple(operation for operation in turn.operations if operation.microbatch < microbatches))
    return tuple(result)
