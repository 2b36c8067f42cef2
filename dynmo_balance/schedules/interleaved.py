"""Interleaved 1F1B: several stages per worker, in rounds of microbatches (Narayanan et al. 2021, section 2.2).

The zero-bubble order ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 3) is built here too. It differs only in the
warm-up and in the position of the weight gradients.
"""

from __future__ import annotations

import numpy as np

from .._common.errors import UsageError
from .order_arrays import BACKWARD, FORWARD, INPUT, WEIGHT, OrderArrays


def round_length(workers: int, microbatches: int) -> int:
    """The number of microbatches of a round.

    Args:
        workers: number of workers, ``P``.
        microbatches: of one step, ``M``.

    Raises:
        UsageError: the microbatches do not divide into equal rounds.
    """
    # torch's rule. Megatron's rounds have ``P`` microbatches by default and require a multiple of ``P``; for such
    # numbers the two agree.
    rounds = max(1, microbatches // workers)
    if microbatches % rounds:
        raise UsageError(
            f"{microbatches} microbatches do not divide into {rounds} equal rounds on {workers} workers;"
            f" use a multiple of {workers}"
        )
    return microbatches // rounds


def rounds_arrays(
    workers: int, virtual_stages: int, microbatches: int, *, warm_up_factor: int, split: bool
) -> OrderArrays:
    """The 1F1B orders.

    Worker ``p`` of ``P`` warms up with ``(v - 1) * round + warm_up_factor * (P - 1 - p)`` forward operations. With
    ``split`` the backward pass is two operations. The weight gradient of a microbatch follows its input gradient by
    ``p`` operations, so that weight gradients fill the bubble.

    Args:
        workers: ``P``.
        virtual_stages: ``v``, stages per worker.
        microbatches: of one step.
        warm_up_factor: 1 or 2.
        split: whether the backward pass is split.

    Raises:
        UsageError: the microbatches do not divide into equal rounds.
    """
    # With one stage per worker a round has no effect on the order, so any number of microbatches is permitted.
    length = microbatches if virtual_stages == 1 else round_length(workers, microbatches)
    total = virtual_stages * microbatches
    index = np.arange(total, dtype=np.int32)
    # Round by round, each stage of the worker in turn; backward passes take the stages in reverse.
    lap = index // length % virtual_stages
    microbatch = index // (length * virtual_stages) * length + index % length
    stages, kinds, numbers = [], [], []
    for worker in range(workers):
        warm_up = min(total, (virtual_stages - 1) * length + warm_up_factor * (workers - 1 - worker))
        # The place of each operation: a round of one forward, one backward, one weight gradient has three. Delayed by
        # ``p``: with its warm-up of ``P - 1 - p``, every worker then has ``P`` microbatches in flight, the number of
        # the first worker under 1F1B (Qi et al., section 3). A longer delay would need more memory.
        places = [3 * (index - warm_up), 3 * index + 1, 3 * (index + worker) + 2][: 3 if split else 2]
        at = np.argsort(np.concatenate(places), kind="stable")
        forward, backward = lap * workers + worker, (virtual_stages - 1 - lap) * workers + worker
        stages.append(np.concatenate([forward, backward, backward][: len(places)])[at])
        kinds.append(
            np.repeat(np.array([FORWARD, INPUT, WEIGHT] if split else [FORWARD, BACKWARD], np.int8), total)[at]
        )
        numbers.append(np.tile(microbatch, len(places))[at])
    begins = tuple(range(0, workers * (3 if split else 2) * total + 1, (3 if split else 2) * total))
    return OrderArrays(np.concatenate(stages), np.concatenate(kinds), np.concatenate(numbers), begins)


def arrays(workers: int, virtual_stages: int, microbatches: int) -> OrderArrays:
    """The order of operations of interleaved 1F1B.

    Args:
        workers: ``P``.
        virtual_stages: ``v``, stages per worker.
        microbatches: of one step.

    Raises:
        UsageError: the microbatches do not divide into equal rounds.
    """
    # Two per hop to the last worker, as in Megatron and torch: a microbatch takes one operation per hop to get there,
    # and its gradient one to return. Forward passes of the worker's other stages fill both.
    return rounds_arrays(workers, virtual_stages, microbatches, warm_up_factor=2, split=False)
