"""DualPipeV: two stages per worker in a V, pairs of one forward and one full backward in the steady state.

It is DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1) with half of its stages: worker ``p`` of ``P``
executes stage ``p`` on the way down and ``2 P - 1 - p`` on the way up. Only the warm-up and the cool-down split the
backward pass. torch executes the two operations of a pair one after the other, so the order has no pairs.
"""

from __future__ import annotations

from collections import deque

from .._common.errors import UsageError
from .operations import Kind, Operation, Order

F, B, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
DOWN, UP = 0, 1


class _WorkerOrder:
    """The operations of one worker under construction; each continues with the next microbatch of its stage."""

    def __init__(self, worker: int, workers: int) -> None:
        self.operations: list[Operation] = []
        self._stages = (worker, 2 * workers - 1 - worker)
        # Forwards and gradients of each stage so far; a full and a split backward pass count alike.
        self._done = {(way, kind): 0 for way in (DOWN, UP) for kind in (F, INPUT)}
        self._weights: deque[Operation] = deque()

    def append(self, way: int, kind: Kind) -> None:
        """Append the next forward, full backward or input gradient of the stage on the way down or up."""
        counted = way, F if kind is F else INPUT
        operation = Operation(self._stages[way], kind, self._done[counted])
        self._done[counted] += 1
        self.operations.append(operation)
        if kind is INPUT:
            self._weights.append(operation._replace(kind=WEIGHT))

    def append_weight(self) -> None:
        """Append the oldest weight gradient that an input gradient has left, if there is one."""
        if self._weights:
            self.operations.append(self._weights.popleft())


def _of_worker(worker: int, workers: int, microbatches: int) -> tuple[Operation, ...]:
    """The operations of one worker, in the eight phases of the schedule."""
    one = _WorkerOrder(worker, workers)
    behind = workers - worker - 1
    for _ in range(2 * behind):
        one.append(DOWN, F)
    for _ in range(worker + 1):
        one.append(DOWN, F)
        one.append(UP, F)
    # The worker below waits for these input gradients, so their weight gradients follow.
    for _ in range(behind):
        one.append(UP, INPUT)
        one.append_weight()
        one.append(UP, F)
    for _ in range(microbatches - 2 * workers + worker + 1):
        one.append(DOWN, F)
        one.append(UP, B)
        one.append(UP, F)
        one.append(DOWN, B)
    for _ in range(behind):
        one.append(UP, B)
        one.append(UP, F)
        one.append(DOWN, B)
    # No forward is left. From the middle of this phase on, weight gradients wait, to fill the end of the step.
    full = 2 * ((worker + 1) // 2) + (worker + 1) % 2
    for number in range(2 * (worker + 1)):
        one.append(DOWN if number % 2 else UP, B if number < full else INPUT)
    for _ in range(behind):
        one.append_weight()
        one.append(DOWN, INPUT)
    for _ in range(worker + 1):
        one.append_weight()
    return tuple(one.operations)


def order(workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations.

    The order equals that of ``ScheduleDualPipeV`` of torch, which executes the plan; a test compares them.

    Args:
        workers: ``P``.
        virtual_stages: must be 2.
        microbatches: of one step, at least ``2 P``.

    Raises:
        UsageError: there are not two stages per worker, or fewer microbatches than stages.
    """
    if virtual_stages != 2:
        raise UsageError(f"dualpipe-v needs 2 stages per worker, got {virtual_stages}; use --virtual-stages 2")
    if microbatches < 2 * workers:
        raise UsageError(
            f"dualpipe-v on {workers} workers needs at least {2 * workers} microbatches, one per stage; got"
            f" {microbatches}; use more --microbatches, or --schedule zb-v"
        )
    return tuple(_of_worker(worker, workers, microbatches) for worker in range(workers))
