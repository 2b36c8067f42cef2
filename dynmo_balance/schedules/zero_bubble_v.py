"""ZB-V: two stages per worker in a V, so that the last stage is on the worker of the first (Qi et al. 2023, section 6).

Worker ``p`` of ``P`` executes stage ``p`` on the way down and ``2 P - 1 - p`` on the way up. If forward, input
gradient and weight gradient are equally long, no worker waits between its first and last operation.
"""

from __future__ import annotations

from .._common.errors import UsageError
from .operations import Kind, Operation, Order


class _WorkerOrder:
    """The operations of one worker under construction; ``chunk`` is 0 for its stage on the way down, 1 on the way up.

    A kind always continues with the next microbatch of its chunk, so an operation needs no microbatch number.
    """

    def __init__(self, worker: int, workers: int) -> None:
        self.operations: list[Operation] = []
        self.done: dict[tuple[int, Kind], int] = {}
        self.stages = (worker, 2 * workers - 1 - worker)

    def count(self, chunk: int, kind: Kind) -> int:
        """The number of microbatches of ``chunk`` that operations of this kind have executed."""
        return self.done.get((chunk, kind), 0)

    def append(self, chunk: int, *kinds: Kind) -> None:
        """Append the next microbatch of each kind, on the stage of ``chunk``."""
        for kind in kinds:
            at = self.count(chunk, kind)
            self.operations.append(Operation(self.stages[chunk], kind, at))
            self.done[chunk, kind] = at + 1


F, B, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def _warm_up(one: _WorkerOrder, worker: int, workers: int) -> None:
    """Forward passes until the first microbatch has come up to this worker, then whole turns on the way up."""
    for _ in range(2 * (workers - worker) - 1):
        one.append(0, F)
    for _ in range(worker):
        one.append(1, F)
        one.append(0, F)
    for _ in range(workers - worker):
        one.append(1, F, B, W)


def _cool_down(one: _WorkerOrder, worker: int, workers: int) -> None:
    """Input gradients first, because other workers wait for them; the remaining weight gradients fill the end."""
    for _ in range(worker):
        one.append(0, B)
        one.append(1, B)
    for _ in range(workers - worker):
        one.append(0, B, W)
    for chunk in (1, 0):
        while one.count(chunk, W) < one.count(chunk, B):
            one.append(chunk, W)


def order(workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations.

    The order equals that of ``ScheduleZBVZeroBubble`` of torch, which executes the plan; a test compares them.

    Args:
        workers: ``P``.
        virtual_stages: must be 2.
        microbatches: of one step.

    Raises:
        UsageError: there are not two stages per worker.
    """
    if virtual_stages != 2:
        raise UsageError(f"zb-v needs 2 stages per worker, got {virtual_stages}; use --virtual-stages 2")
    # The warm-up of the first worker alone has ``2 P - 1`` microbatches. A shorter step has the same order without the
    # microbatches that do not exist, as in torch.
    planned = max(2 * workers - 1, microbatches)
    result = []
    for worker in range(workers):
        one = _WorkerOrder(worker, workers)
        _warm_up(one, worker, workers)
        while one.count(1, F) < one.count(0, F) or one.count(0, F) < planned:
            if one.count(0, F) < planned:
                one.append(0, F)
            one.append(0, B, W)
            one.append(1, F, B, W)
        _cool_down(one, worker, workers)
        result.append(tuple(operation for operation in one.operations if operation.microbatch < microbatches))
    return tuple(result)
