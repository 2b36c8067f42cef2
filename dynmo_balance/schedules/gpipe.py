"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965, section 2.3)."""

from __future__ import annotations

from .operations import Kind, Operation, Order


def order(workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations; with several stages per worker it is breadth first.

    Args:
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step; all of them are in flight at the same time.
    """
    result = []
    for worker in range(workers):
        # Breadth first: a stage executes all microbatches before the worker's next stage does. The last stage of a
        # worker is the first whose gradients arrive, so the backward passes take the stages in reverse.
        stages = [worker + lap * workers for lap in range(virtual_stages)]
        forward = [Operation(s, Kind.FORWARD, m) for s in stages for m in range(microbatches)]
        backward = [Operation(s, Kind.BACKWARD, m) for s in reversed(stages) for m in range(microbatches)]
        result.append((*forward, *backward))
    return tuple(result)
