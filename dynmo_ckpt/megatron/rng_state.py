"""The states of the random generators that Megatron's checkpoints hold, as they are right after it seeds them.

Our trainer draws by a hash of seed, step, microbatch and item, so that a checkpoint of ours has a seed alone.
Megatron and DeepSpeed refuse a checkpoint without states; they get those of its seed, each under the rule of
``model_parallel_cuda_manual_seed``: one generator for the whole model, and one for each tensor rank.
"""

from __future__ import annotations

import random
import struct
from typing import Any

from ..torch_save.writer import Constants, NewTensor

MERSENNE_WORDS = 624
PER_STAGE = 100  # Megatron adds it to the seed for each pipeline stage
PER_TENSOR_RANK = 2718  # ... and this, and the number of the tensor rank, for its regions of tensor parallelism


def mersenne_words(seed: int) -> list[int]:
    """The 624 words of a Mersenne twister after ``init_genrand`` (Matsumoto and Nishimura 1998, as revised 2002)."""
    words = [seed & 0xFFFFFFFF]
    for at in range(1, MERSENNE_WORDS):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + at) & 0xFFFFFFFF)
    return words


def torch_state(seed: int) -> bytes:
    """What ``torch.get_rng_state`` gives on a CPU after ``torch.manual_seed``: 5,056 bytes."""
    words = struct.pack(f"<{MERSENNE_WORDS}Q", *mersenne_words(seed))
    return struct.pack("<QiiQ", seed, 1, 1, 0) + words + bytes(24 + 8) + bytes(8)


def cuda_state(seed: int) -> bytes:
    """What ``torch.cuda.get_rng_state`` gives after ``torch.cuda.manual_seed``: seed and offset."""
    return struct.pack("<QQ", seed, 0)


def rng_states(seed: int, *, tensor_rank: int, stage: int, constants: Constants) -> list[dict[str, Any]]:
    """Megatron's ``rng_state`` of one model-parallel rank: a list with one entry, for all replicas.

    Args:
        seed: of the run.
        tensor_rank: of this file.
        stage: the pipeline stage of this file.
        constants: where the bytes of the tensors go.
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
