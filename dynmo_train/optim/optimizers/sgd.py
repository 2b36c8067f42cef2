"""Stochastic gradient descent with momentum, by torch.

As in Megatron, weight decay is added to the gradient (L2 regularization), not decoupled as in AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn

from ...config.optimizer import OptimizerConfig
from .protocol import Optimizer, OptimizerContext, StateShapes
from .torch_groups import TorchGroups, empty_groups

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, kw_only=True)
class SGDSettings:
    """SGD with momentum, without dampening or Nesterov momentum.

    Attributes:
        momentum: Factor of the buffer in each update; 0 keeps no state.
        weight_decay: Constant weight decay, where no schedule sets it per step.
    """

    STORED_TYPE: ClassVar[str] = "sgd"
    MOVES_PRUNED: ClassVar[bool] = False
    momentum: float
    weight_decay: float

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> Self:
        """See ``OptimizerSettings``."""
        return cls(momentum=config.sgd_momentum, weight_decay=config.weight_decay)

    def state_shapes(self, name: str, shape: tuple[int, ...]) -> StateShapes:
        """Return the momentum buffer in the ``shape`` of any parameter ``name``; nothing without momentum."""
        return {MOMENTUM: tuple(shape)} if self.momentum else {}

    def state_dtype(self, key: str) -> torch.dtype:
        """Return float32 for every ``key``."""
        return torch.float32

    def describe(self, context: OptimizerContext) -> str:
        """See ``OptimizerSettings``; ``context`` has no effect."""
        return "torch SGD"

    def make(self, context: OptimizerContext) -> Optimizer:
        """Create it; ``context`` has no effect."""
        return TorchSGD(self)


class TorchSGD(TorchGroups):
    """``torch.optim.SGD`` in its fused form, with a count of the updates of each parameter.

    Args:
        settings: Hyperparameters.
    """

    def __init__(self, settings: SGDSettings) -> None:
        super().__init__(torch.optim.SGD(empty_groups(), lr=0.0, momentum=settings.momentum, fused=True))
        self._has_state = settings.momentum != 0

    def step(
        self,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        *,
        divisor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """See ``Optimizer``; a skipped update counts, too.

        Args:
            lr: Learning rate.
            weight_decay: Of matrices.
            decoupled_lr: Learning rate of word embeddings and output layer.
            divisor: A float32 scalar that divides every gradient.
            skip: A float32 scalar, 1 where nothing is to be updated.
        """
        if self._has_state:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._count(parameter)
        super().step(lr, weight_decay, decoupled_lr, divisor=divisor, skip=skip)

    def _count(self, parameter: nn.Parameter) -> None:
        # Zeros: the fused kernel takes all buffers of a group as uninitialized, or none.
        state = self._optimizer.state[parameter]
        if not state:
            state.update(step=0, momentum_buffer=torch.zeros_like(parameter))
        state["step"] += 1

    def load_state(self, parameter: nn.Parameter, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue ``parameter`` after ``steps`` updates; ``moments`` has a buffer of its shape."""
        self._optimizer.state[parameter] = {"step": steps, **moments}
