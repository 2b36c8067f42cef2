"""The storage format of a pruned weight's product: a function of its mask, a table of thresholds, and the device type.

The table is built in, or measured once by ``dynmo-train tune-sparse``. It is stored with the run and its checkpoints,
so that the choice never depends on the rank that has the weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

DENSE = "dense"
CSR = "csr"
SEMI_STRUCTURED = "2:4"
# The rule of 2:4 masks whose transpose is one, too: then the gradient of the input is a sparse product.
TRANSPOSABLE = "2:4-transposable"
# A threshold that no sparsity reaches; infinity is not a JSON number.
NEVER = 2.0
BLOCK = "block"
# Forward and both gradients on CPU, relative to dense (512x512 to 2048x512, 512 tokens, one thread and MKL): CSR 0.8 at
# sparsity 0.85 and 0.5 at 0.9; blocks of 32 0.95 at sparsity 0.5 and 0.4 at 0.8, of 16 0.65 at 0.8, of 64 0.7 at 0.5.
# The values for CUDA are not measured: tune-sparse does that.
BUILT_IN: Mapping[str, float] = MappingProxyType(
    {
        CSR: 0.85,
        "block": 0.6,
        "block16": 0.75,
        "block64": 0.5,
        "block128": 0.5,
        "cuda.2:4": 0.5,
        "cuda.block": 0.7,
        "cuda.csr": 0.98,
    }
)
BLOCK_SIZE = 32
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class SparseTable:
    """Sparsities from which a sparse format is the fastest.

    Attributes:
        thresholds: rule -> fraction of zeros: ``csr`` and ``block`` (on CPU), ``cuda.csr``, ``cuda.2:4``,
            ``cuda.2:4-transposable``, ``cuda.block``; for blocks of another size than 32 such as ``block64``; for one
            shape of weight, outputs x inputs, ``csr 1024x256``.
        structured: whether whole rows and columns are pruned, so that products run on the remaining rows and columns.
    """

    thresholds: Mapping[str, float] = field(default_factory=lambda: BUILT_IN)
    structured: bool = False

    def threshold(self, rule: str, outputs: int, inputs: int) -> float:
        """The threshold of a rule for a weight ``[outputs, inputs]``; above 1 where the format is never used.

        Without ``block64`` or ``2:4-transposable`` the rule ``block`` or ``2:4`` is used.
        """
        for each in dict.fromkeys((rule, general_rule(rule))):
            for key in (f"{each} {outputs}x{inputs}", each):
                if key in self.thresholds:
                    return self.thresholds[key]
        return NEVER

    def lowest(self, rule: str) -> float:
        """The lowest threshold of a rule over all shapes; above 1 where the format is never used."""
        for each in dict.fromkeys((rule, general_rule(rule))):
            found = [value for key, value in self.thresholds.items() if key.partition(" ")[0] == each]
            if found:
                return min(found)
        return NEVER

    def form(self, mask_OI: torch.Tensor, device_type: str) -> str:
        """The format of a product: the first of block, CSR and 2:4 that fits and is faster, else dense.

        Args:
            mask_OI: bool ``[O, I]``, true for weights that remain.
            device_type: ``cpu`` or ``cuda``.
        """
        outputs, inputs = mask_OI.shape
        sparsity = 1.0 - int(mask_OI.sum()) / mask_OI.numel()
        prefix = prefix_of(device_type)
        size = block_size(mask_OI)
        if size and sparsity >= self.threshold(f"{prefix}{block_rule(size)}", outputs, inputs):
            return BLOCK
        if sparsity >= self.threshold(f"{prefix}{CSR}", outputs, inputs):
            return CSR
        # torch has no 2:4 product on CPU.
        if device_type != "cpu" and is_semi_structured(mask_OI):
            rule = TRANSPOSABLE if is_semi_structured(mask_OI.t()) else SEMI_STRUCTURED
            if sparsity >= self.threshold(f"{prefix}{rule}", outputs, inputs):
                return SEMI_STRUCTURED
        return DENSE


def prefix_of(device_type: str) -> str:
    """What precedes the rules of a device in a table: nothing for ``cpu``, ``cuda.`` for ``cuda``."""
    return "" if device_type == "cpu" else f"{device_type}."


def general_rule(rule: str) -> str:
    """The rule that stands for ``rule`` where a table lacks it: ``block`` for ``block64``, ``2:4`` for transposable."""
    return re.sub(rf"{BLOCK}\d+$", BLOCK, rule).removesuffix("-transposable")


def block_rule(size: int) -> str:
    """The rule of a table for blocks of ``size`` x ``size`` weights: ``block`` for 32, else such as ``block64``."""
    return BLOCK if size == BLOCK_SIZE else f"{BLOCK}{size}"


def block_size(mask_OI: torch.Tensor) -> int:
    """The largest of ``BLOCK_SIZES`` by which ``mask_OI`` ``[O, I]`` consists of whole blocks; 0 without one."""
    return next((size for size in reversed(BLOCK_SIZES) if is_in_blocks(mask_OI, size)), 0)


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
