"""1F1B: after a warm-up, one forward, one backward (PipeDream: Narayanan et al. 2019; 2021, arXiv 2104.04473)."""

from __future__ import annotations

from .interleaved import rounds_arrays
from .order_arrays import OrderArrays


def arrays(workers: int, virtual_stages: int, microbatches: int) -> OrderArrays:
    """The order of operations; worker ``p`` of ``P`` executes ``P - p`` forward operations before its first backward.

    It is the interleaved order with one stage per worker and rounds of any length. Several stages per worker are
    interleaved.

    Args:
        workers: ``P``.
        virtual_stages: stages per worker.
        microbatches: of one step.
    """
    # With one stage per worker and free transfers, a longer warm-up does not shorten the step, but needs twice the
    # activations. It would hide the latency of transfers; Megatron and torch use the short one nevertheless.
    if virtual_stages > 1:
        return rounds_arrays(workers, virtual_stages, microbatches, warm_up_factor=2, split=False)
    return rounds_arrays(workers, 1, microbatches, warm_up_factor=1, split=False)
