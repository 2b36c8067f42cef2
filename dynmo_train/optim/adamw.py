"""AdamW on the parameters of all local items, by torch or by NVIDIA's apex, with one interface to its state.

One optimizer updates all items at once, so that the number of kernels does not grow with that of the items.
Parameters join and leave with their item. The update of one does not depend on the others, so neither does any bit.

Both keep the moments ``exp_avg`` and ``exp_avg_sq`` of every parameter in float32. torch counts the updates of each
parameter. apex counts those of a parameter group, whether or not its members had gradients; :class:`FusedAdamW` counts
per parameter instead, so that a checkpoint of one implementation resumes with the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW with decoupled weight decay on matrices, none on vectors (Loshchilov and Hutter, arXiv 1711.05101).

    Attributes:
        beta1: Decay rate of ``exp_avg``.
        beta2: Decay rate of ``exp_avg_sq``.
        eps: Added to the denominator.
        weight_decay: Constant weight decay, where no schedule sets it per step.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @staticmethod
    def decays(parameter: torch.Tensor) -> bool:
        """Whether ``parameter``, of any shape, has weight decay: it has two dimensions or more."""
        return parameter.dim() >= 2


class Optimizer(Protocol):
    """The optimizer of the local parameters. A parameter has state from its first update on."""

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update these parameters, too, from now on; they have no state."""

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget parameters that were added, with their state."""

    def step(self, lr: float, weight_decay: float) -> None:
        """Update every parameter that has a gradient, and drop the gradients.

        Args:
            lr: Learning rate.
            weight_decay: Of matrices; vectors have none.
        """

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the live moments by name, float32 in the parameter's shape; empty without state."""

    def steps(self, parameter: nn.Parameter) -> int:
        """Return the number of updates; 0 without state."""

    def load_state(self, parameter: nn.Parameter, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue a parameter from this state.

        Args:
            parameter: Parameter that was added.
            steps: Number of its updates.
            moments: ``exp_avg`` and ``exp_avg_sq``, float32 in the parameter's shape, on its device; not copied.
        """

    def drop_state(self, parameter: nn.Parameter) -> None:
        """Drop the state of a parameter."""


class TorchAdamW:
    """``torch.optim.AdamW`` in its fused form.

    Args:
        settings: Hyperparameters.
    """

    def __init__(self, settings: AdamWSettings) -> None:
        self._settings = settings
        # lr=0.0: learning rate and weight decay are set in every step. Fused: one kernel updates many tensors.
        self._optimizer = torch.optim.AdamW(
            [{"params": [], "decays": True}, {"params": [], "decays": False}],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """See ``Optimizer``."""
        matrices, vectors = (group["params"] for group in self._optimizer.param_groups)
        for parameter in parameters:
            (matrices if self._settings.decays(parameter) else vectors).append(parameter)

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """See ``Optimizer``."""
        leaving = list(parameters)
        # By identity: tensors compare by value.
        ids = {id(parameter) for parameter in leaving}
        for group in self._optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
        for parameter in leaving:
            self.drop_state(parameter)

    def step(self, lr: float, weight_decay: float) -> None:
        """Update with learning rate ``lr`` and ``weight_decay``; see ``Optimizer``."""
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, weight_decay if group["decays"] else 0.0
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """See ``Optimizer``."""
        state = self._optimizer.state.get(parameter, {})
        return {key: state[key] for key in MOMENTS if key in state}

    def steps(self, parameter: nn.Parameter) -> int:
        """See ``Optimizer``."""
        return int(self._optimizer.state.get(parameter, {}).get("step", 0))

    def load_state(self, parameter: nn.Parameter, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue ``parameter`` after ``steps`` updates; ``moments`` have its shape."""
        # The fused kernel reads the count on the device of the parameter, as float32.
        count = torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)
        self._optimizer.state[parameter] = {"step": count, **moments}

    def drop_state(self, parameter: nn.Parameter) -> None:
        """See ``Optimizer``."""
        self._optimizer.state.pop(parameter, None)


class FusedAdamW:
    """apex's FusedAdam in its AdamW mode, with new parameter groups in every step.

    A group has equal weight decay and an equal number of updates. So one kernel still updates a group, and a parameter
    without a gradient is not counted.

    Args:
        settings: Hyperparameters.
        fused_adam: ``apex.optimizers.FusedAdam`` or a compatible class.
    """

    def __init__(self, settings: AdamWSettings, fused_adam: type[Any]) -> None:
        self._settings = settings
        self._parameters: dict[nn.Parameter, None] = {}
        self._optimizer = fused_adam(
            [{"params": []}],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            adam_w_mode=True,
        )
        self._steps: dict[nn.Parameter, int] = {}

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """See ``Optimizer``."""
        self._parameters.update(dict.fromkeys(parameters))

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """See ``Optimizer``."""
        for parameter in parameters:
            del self._parameters[parameter]
            self.drop_state(parameter)

    def step(self, lr: float, weight_decay: float) -> None:
        """Update with learning rate ``lr`` and ``weight_decay``; see ``Optimizer``."""
        trained = [parameter for parameter in self._parameters if parameter.grad is not None]
        groups: dict[tuple[bool, int], list[nn.Parameter]] = {}
        for parameter in trained:
            groups.setdefault((self._settings.decays(parameter), self.steps(parameter)), []).append(parameter)
        # apex counts updates by group, and its kernel uses that count for the bias correction of all members.
        self._optimizer.param_groups = [
            {
                **self._optimizer.defaults,
                "params": group,
                "lr": lr,
                "weight_decay": weight_decay if decays else 0.0,
                "step": done,
            }
            for (decays, done), group in groups.items()
        ]
        self._optimizer.step()
        for parameter in trained:
            self._steps[parameter] = self.steps(parameter) + 1
            parameter.grad = None

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """See ``Optimizer``."""
        state = self._optimizer.state.get(parameter, {})
        return {key: state[key] for key in MOMENTS if key in state}

    def steps(self, parameter: nn.Parameter) -> int:
        """See ``Optimizer``."""
        return self._steps.get(parameter, 0)

    def load_state(self, parameter: nn.Parameter, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue ``parameter`` after ``steps`` updates; ``moments`` have its shape."""
        self._optimizer.state[parameter] = dict(moments)
        self._steps[parameter] = steps

    def drop_state(self, parameter: nn.Parameter) -> None:
        """See ``Optimizer``."""
        self._optimizer.state.pop(parameter, None)
        self._steps.pop(parameter, None)


def make_optimizer(settings: AdamWSettings, fused_adam: type[Any] | None) -> Optimizer:
    """Create the optimizer with apex's ``fused_adam``, or with torch's AdamW where that is None; without parameters."""
    return TorchAdamW(settings) if fused_adam is None else FusedAdamW(settings, fused_adam)
