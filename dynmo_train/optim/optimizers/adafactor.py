"""Adafactor, by torch: the second moment of a matrix is the product of means over its rows and its columns.

The update is relative to the size of a weight: the learning rate is an upper bound of the relative step, which falls as
``1 / sqrt(step)`` (Shazeer and Stern, arXiv 1804.04235, algorithm 4; torch's defaults). Means and norms are over whole
matrices, so slices of tensor parallelism and rows of ZeRO are refused (``config/rules/training.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from ...config.sections.optimizer import OptimizerConfig
from .protocol import Optimizer, OptimizerContext, StateShapes
from .torch_groups import TorchGroups, empty_groups


@dataclass(frozen=True, kw_only=True)
class AdafactorSettings:
    """Adafactor with torch's hyperparameters and decoupled weight decay.

    Attributes:
        weight_decay: Constant weight decay, where no schedule sets it per step.
    """

    STORED_TYPE: ClassVar[str] = "adafactor"
    MOVES_PRUNED: ClassVar[bool] = False
    weight_decay: float

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> Self:
        """See ``OptimizerSettings``."""
        return cls(weight_decay=config.weight_decay)

    def state_shapes(self, name: str, shape: tuple[int, ...]) -> StateShapes:
        """Return two factors for a matrix of this ``shape``, the second moment for a vector, of any ``name``."""
        if len(shape) < 2:
            return {"variance": tuple(shape)}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def state_dtype(self, key: str) -> torch.dtype:
        """Return float32 for every ``key``."""
        return torch.float32

    def describe(self, context: OptimizerContext) -> str:
        """See ``OptimizerSettings``; ``context`` has no effect."""
        return "torch Adafactor"

    def make(self, context: OptimizerContext) -> Optimizer:
        """Create it; ``context`` has no effect."""
        return TorchGroups(torch.optim.Adafactor(empty_groups(), lr=0.0))
