"""The interface of an optimizer of the local parameters, and of its settings.

One optimizer updates all items at once, so that the number of kernels does not grow with that of the items. Parameters
join and leave with their item. The update of one must not depend on which others are local: any partition gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn

from ...config.sections.optimizer import OptimizerConfig
from ..item_sharding import ItemSharding

# Name of a state tensor -> its shape.
StateShapes = dict[str, tuple[int, ...]]


def decays(parameter: torch.Tensor) -> bool:
    """Whether ``parameter``, of any shape, has weight decay: it has two dimensions or more."""
    return parameter.dim() >= 2


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update of all local parameters.

    Attributes:
        lr: Learning rate.
        weight_decay: Of matrices; vectors have none.
        decoupled_lr: Learning rate of word embeddings and output layer; None is ``lr``.
        divisor: Divides every gradient (clipping), a float32 scalar on the device; None divides by nothing.
        skip: Float32 scalar on the device: 1 drops the gradients and leaves parameters and state unchanged, 0 updates.
            None updates.
    """

    lr: float
    weight_decay: float
    decoupled_lr: float | None = None
    divisor: torch.Tensor | None = None
    skip: torch.Tensor | None = None

    def rate_of(self, *, is_decoupled: bool) -> float:
        """Return the learning rate of parameters, by whether they are word embeddings or output layer."""
        return self.decoupled_lr if is_decoupled and self.decoupled_lr is not None else self.lr


class Optimizer(Protocol):
    """The optimizer of the local parameters. A parameter has state from its first update on."""

    def add(self, parameters: Mapping[str, nn.Parameter], num_rows: Mapping[str, int] | None = None) -> None:
        """Update these parameters, too, from now on; they have no state.

        Args:
            parameters: Global name -> local parameter; with ZeRO, its rows of this process.
            num_rows: Global name -> number of rows before ZeRO; None: those of the parameters.
        """

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget parameters that were added, with their state."""

    @property
    def skips_on_device(self) -> bool:
        """Whether ``step`` reads ``skip`` on the device; otherwise it waits for the device."""

    def step(self, update: Update) -> None:
        """Update every parameter that has a gradient, as ``update`` describes, and drop the gradients."""

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the live state tensors by name, as ``OptimizerSettings.state_shapes``; empty without state."""

    def steps(self, parameter: nn.Parameter) -> int:
        """Return the number of updates; 0 without state."""

    def load_state(self, parameter: nn.Parameter, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue a parameter from this state.

        Args:
            parameter: Parameter that was added.
            steps: Number of its updates.
            moments: Complete state tensors of the shapes of ``state_shapes``, on the parameter's device; not copied.
        """

    def drop_state(self, parameter: nn.Parameter) -> None:
        """Drop the state of a parameter."""


@dataclass(frozen=True, kw_only=True)
class OptimizerContext:
    """What an optimizer needs apart from its hyperparameters.

    Attributes:
        fused_adam: apex's ``FusedAdam``; None uses torch's AdamW.
        sharding: The part of each tensor that this process has; None: the whole tensor.
    """

    fused_adam: type[Any] | None = None
    sharding: ItemSharding | None = None


class OptimizerSettings(Protocol):
    """Hyperparameters of an optimizer.

    Attributes:
        STORED_TYPE: ``optimizer.type`` in checkpoints.
        MOVES_PRUNED: Whether an update can move a weight whose gradient and state are zero.
    """

    STORED_TYPE: ClassVar[str]
    MOVES_PRUNED: ClassVar[bool]

    @property
    def weight_decay(self) -> float:
        """Constant weight decay, where no schedule sets it per step."""

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> Self:
        """Return the settings of a run."""

    def state_shapes(self, name: str, shape: tuple[int, ...]) -> StateShapes:
        """Return the state tensors of a parameter after an update.

        Args:
            name: Global name of the parameter.
            shape: Its shape.
        """

    def state_dtype(self, key: str) -> torch.dtype:
        """Return the dtype of the state tensors of this name."""

    def describe(self, context: OptimizerContext) -> str:
        """Return implementation and name for log and ``run.json``: ``torch AdamW``."""

    def make(self, context: OptimizerContext) -> Optimizer:
        """Create the optimizer, without parameters."""
