"""Stochastic gradient descent with momentum, by torch.

As in Megatron, weight decay is added to the gradient (L2 regularization), not decoupled as in AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn

from ...config.sections.optimizer import OptimizerConfig
from .protocol import Optimizer, OptimizerContext, StateShapes, Update
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

    def step(self, update: Update) -> None:
        """See ``Optimizer``."""
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        counts = [self._count_of(each) for each in parameters if each.grad is not None] if self._has_state else []
        if counts:
            # On the device, because only it knows whether the update is skipped.
            torch._foreach_add_(
                counts, torch.ones((), device=counts[0].device) if update.skip is None else 1 - update.skip
            )
        super().step(update)

    def _count_of(self, parameter: nn.Parameter) -> torch.Tensor:
        state = self._optimizer.state[parameter]
        if not state:
            # Zeros: the fused kernel takes all buffers of a group as uninitialized, or none.
            count = torch.zeros((), device=parameter.device)
            state.update(step=count, momentum_buffer=torch.zeros_like(parameter))
        found: torch.Tensor = state["step"]
        return found
