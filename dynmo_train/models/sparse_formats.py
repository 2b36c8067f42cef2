"""The storage format of a pruned weight's product: a function of its mask, a table of thresholds, and the device type.

The table is built in, or measured once by ``dynmo-train tune-sparse``. It is stored with the run and its checkpoints,
so that the choice never depends on the rank that has the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

DENSE = "dense"
CSR = "csr"
SEMI_STRUCTURED = "2:4"
BLOCK = "block"
# On CPU a CSR product costs 0.9 of the dense one at sparsity 0.8, half at 0.9, a quarter at 0.95 (measured on shapes
# from 256x1024 to 384x1536 with one thread and MKL). The values for CUDA are not measured: tune-sparse does that.
BUILT_IN: Mapping[str, float] = MappingProxyType({CSR: 0.85, "cuda.2:4": 0.5, "cuda.block": 0.7, "cuda.csr": 0.98})
BLOCK_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class SparseTable:
    """Sparsities from which a sparse format is the fastest.

    Attributes:
        thresholds: rule -> fraction of zeros: ``csr`` (on CPU), ``cuda.csr``, ``cuda.2:4``, ``cuda.block``; for one
            shape of weight, outputs x inputs, ``csr 1024x256``.
        structured: whether whole rows and columns are pruned, so that products run on the remaining rows and columns.
    """

    thresholds: Mapping[str, float] = field(default_factory=lambda: BUILT_IN)
    structured: bool = False

    def threshold(self, rule: str, outputs: int, inputs: int) -> float:
        """The threshold of a rule for a weight ``[outputs, inputs]``; above 1 where the format is never used."""
        return self.thresholds.get(f"{rule} {outputs}x{inputs}", self.thresholds.get(rule, 2.0))

    def form(self, mask_OI: torch.Tensor, device_type: str) -> str:
        """The format of a product: the first of block, CSR and 2:4 that fits and is faster, else dense.

        Args:
            mask_OI: bool ``[O, I]``, true for weights that remain.
            device_type: ``cpu`` or ``cuda``.
        """
        outputs, inputs = mask_OI.shape
        sparsity = 1.0 - int(mask_OI.sum()) / mask_OI.numel()
        if device_type == "cpu":
            return CSR if sparsity >= self.threshold(CSR, outputs, inputs) else DENSE
        for form, fits in ((BLOCK, is_in_blocks), (CSR, lambda _: True), (SEMI_STRUCTURED, is_semi_structured)):
            if sparsity >= self.threshold(f"{device_type}.{form}", outputs, inputs) and fits(mask_OI):
                return form
        return DENSE


def is_semi_structured(mask_OI: torch.Tensor) -> bool:
    """Whether at most two of every four weights in a row of ``mask_OI`` ``[O, I]`` remain, in a shape of the GPU."""
    outputs, inputs = mask_OI.shape
    if outputs % 32 or inputs % 64:
        return False
    return int(mask_OI.view(outputs, -1, 4).sum(-1).max()) <= 2


def is_in_blocks(mask_OI: torch.Tensor, size: int = BLOCK_SIZE) -> bool:
    """Whether each block of ``size`` x ``size`` weights of ``mask_OI`` ``[O, I]`` is pruned as a whole or not."""
    outputs, inputs = mask_OI.shape
    if outputs % size or inputs % size:
        return False
    blocks = mask_OI.view(outputs // size, size, inputs // size, size)
    remaining = blocks.sum((1, 3))
    return bool(((remaining == 0) | (remaining == size * size)).all())


def unpruned_lines(mask_OI: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(rows, columns), int64 ``[n]``, that remain under ``mask_OI`` ``[O, I]``; None where all of them remain."""
    rows, columns = mask_OI.any(1), mask_OI.any(0)
    return (
        None if bool(rows.all()) else rows.nonzero()[:, 0],
        None if bool(columns.all()) else columns.nonzero()[:, 0],
    )
