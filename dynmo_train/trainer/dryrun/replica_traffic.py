"""Bytes that data-parallel ranks exchange in a step: gradients, and with ZeRO parameters."""

from __future__ import annotations

from ...config import Config
from ..monitoring.profile_writer import FLOAT_BYTES

BF16_BYTES = 2


def replica_bytes(
    config: Config, num_parameters: int, compute_bytes: int, num_frozen: int = 0, num_untrained: int = 0
) -> int:
    """Bytes that a device sends to other data-parallel ranks in a step, without gradient compression.

    By ring algorithms over D ranks, an all-gather or a reduce-scatter sends ``(D - 1) / D`` of the whole from a rank,
    an all-reduce twice as much. Parameters of experts are counted as any other.

    Args:
        config: configuration of the run.
        num_parameters: number of parameters of the device before ZeRO.
        compute_bytes: bytes of an element of the arithmetic.
        num_frozen: number of those that are frozen: no gradients are summed, and no backward gathers them.
        num_untrained: number of others without gradients, such as those under adapters, which a backward reads.
    """
    parallel = config.parallel
    num_trained = num_parameters - num_frozen - num_untrained
    gradients = num_trained * (BF16_BYTES if parallel.grad_reduce_in_bf16 else FLOAT_BYTES)
    if not parallel.zero_stage:
        return _all_reduce(gradients, parallel.data_ranks)
    # Stage 3 gathers for each forward and each backward, the others once.
    gathered = num_parameters
    if parallel.zero_stage == 3:
        gathered = config.microbatches * (2 * num_parameters - num_frozen)
    scatters = config.microbatches if parallel.zero_gradient_sync == "microbatch" else 1
    within = gathered * compute_bytes + scatters * gradients
    shards = parallel.shard_ranks
    return (shards - 1) * within // shards + _all_reduce(gradients // shards, parallel.data_ranks // shards)


def _all_reduce(size: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size // ranks
