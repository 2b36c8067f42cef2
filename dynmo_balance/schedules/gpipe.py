"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965, section 2.3)."""

from __future__ import annotations

import numpy as np

from .order_arrays import BACKWARD, FORWARD, OrderArrays


def arrays(workers: int, virtual_stages: int, microbatches: int) -> OrderArrays:
    """The order of operations; with several stages per worker it is breadth first.

    Args:
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step; all of them are in flight at the same time.
    """
    # Breadth first: a stage executes all microbatches before the worker's next stage does. The last stage of a
    # worker is the first whose gradients arrive, so the backward passes take the stages in reverse.
    laps = np.arange(virtual_stages, dtype=np.int32) * workers
    stages = (np.arange(workers, dtype=np.int32)[:, None] + np.concatenate([laps, laps[::-1]])).repeat(microbatches)
    total = virtual_stages * microbatches
    kinds = np.tile(np.array([FORWARD, BACKWARD], np.int8).repeat(total), workers)
    numbers = np.tile(np.arange(microbatches, dtype=np.int32), 2 * virtual_stages * workers)
    return OrderArrays(stages, kinds, numbers, tuple(range(0, 2 * total * workers + 1, 2 * total)))
