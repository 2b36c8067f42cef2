"""The states of random number generators for Megatron's checkpoints, as they are immediately after seeding.

DynMo's trainer derives random numbers from a hash of seed, step, microbatch and item; its checkpoints store a seed
only. Megatron and DeepSpeed refuse a checkpoint without states. They get those of the seed, by the rule of
``model_parallel_cuda_manual_seed``: one generator for the whole model, and one for each tensor-parallel rank.
"""

from __future__ import annotations

import random
import struct
from typing import Any

from ..torch_save.writer import ConstantStorages, NewTensor

MERSENNE_WORDS = 624
PER_STAGE = 100  # added to the seed for each pipeline stage
PER_TENSOR_RANK = 2718  # added with the tensor-parallel rank, for tensor-parallel regions


def mersenne_words(seed: int) -> list[int]:
    """The 624-word state of a Mersenne twister after ``init_genrand`` (Matsumoto and Nishimura 1998).

    Args:
        seed: of the generator; its low 32 bits are used.
    """
    words = [seed & 0xFFFFFFFF]
    for at in range(1, MERSENNE_WORDS):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + at) & 0xFFFFFFFF)
    return words


def torch_state(seed: int) -> bytes:
    """What ``torch.get_rng_state`` returns after ``torch.manual_seed(seed)`` on a CPU: 5,056 bytes."""
    # The struct `CPUGeneratorImplStateLegacy` of ATen: seed, left (1: generate on the first call), seeded, next, and
    # 64-bit words. The rest caches normal samples, of which there are none after seeding.
    words = struct.pack(f"<{MERSENNE_WORDS}Q", *mersenne_words(seed))
    return struct.pack("<QiiQ", seed, 1, 1, 0) + words + bytes(24 + 8) + bytes(8)


def cuda_state(seed: int) -> bytes:
    """What ``torch.cuda.get_rng_state`` returns after ``torch.cuda.manual_seed``: seed and offset, 16 bytes."""
    return struct.pack("<QQ", seed, 0)


def rng_states(seed: int, *, tensor_rank: int, stage: int, constants: ConstantStorages) -> list[dict[str, Any]]:
    """Megatron's ``rng_state`` of one model-parallel rank: a list with one entry for all data-parallel ranks.

    Args:
        seed: of the run.
        tensor_rank: the tensor-parallel rank.
        stage: the pipeline stage.
        constants: the states are added to it.
    """
    own = seed + PER_STAGE * stage

    def tensor(name: str, payload: bytes) -> NewTensor:
        return constants.add(name, "U8", (len(payload),), payload)

    return [
        {
            "random_rng_state": random.Random(own).getstate(),
            "np_rng_state": ("MT19937", mersenne_words(own), MERSENNE_WORDS, 0, 0.0),
            "torch_rng_state": tensor("torch_rng_state", torch_state(own)),
            "cuda_rng_state": tensor("cuda_rng_state", cuda_state(own)),
            "rng_tracker_states": {
                "model-parallel-rng": tensor("model-parallel-rng", cuda_state(own + PER_TENSOR_RANK + tensor_rank))
            },
        }
    ]
