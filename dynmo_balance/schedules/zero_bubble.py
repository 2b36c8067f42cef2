"""ZB-H1: 1F1B whose backward is split in two, weight gradients in the bubbles (Qi et al. 2023, arXiv 2401.10241)."""

from __future__ import annotations

from .interleaved import rounds_arrays
from .order_arrays import OrderArrays


def arrays(workers: int, virtual_stages: int, microbatches: int) -> OrderArrays:
    """The order of operations, also with several stages per worker.

    Args:
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step.
    """
    # torch's interleaved zero-bubble schedule has this warm-up factor as well. A plan for ``zero-bubble`` is executed
    # by that class, so the order must equal its table operation for operation; a test compares them.
    return rounds_arrays(workers, virtual_stages, microbatches, warm_up_factor=1, split=True)
