"""A ``torch.optim`` optimizer whose parameters join and leave, in groups of equal learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from ...models.layer_list import is_embedding_or_output
from .protocol import Update, decays


def empty_groups() -> list[dict[str, Any]]:
    """Return the parameter groups of a torch optimizer, without parameters."""
    return [{"params": [], "decays": decay, "is_decoupled": apart} for decay, apart in product((True, False), repeat=2)]


class TorchGroups:
    """A torch optimizer of the local parameters; see ``Optimizer``.

    Args:
        optimizer: Created with :func:`empty_groups`; learning rate and weight decay are set in every step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def add(self, parameters: Mapping[str, nn.Parameter], num_rows: Mapping[str, int] | None = None) -> None:
        """Update ``parameters``, too; ``num_rows`` has no effect; see ``Optimizer``."""
        for name, parameter in parameters.items():
            key = decays(parameter), is_embedding_or_output(name)
            groups = self._optimizer.param_groups
            next(group for group in groups if (group["decays"], group["is_decoupled"]) == key)["params"].append(
                parameter
            )

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """See ``Optimizer``."""
        leaving = list(parameters)
        # By identity: tensors compare by value.
        ids = {id(parameter) for parameter in leaving}
        for group in self._optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
        for parameter in leaving:
            self.drop_state(parameter)

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer is fused: its kernel divides and skips by itself, in the same pass."""
        return bool(self._optimizer.defaults.get("fused"))

    def step(self, update: Update) -> None:
        """See ``Optimizer``."""
        if self.skips_on_device:
            # The names are those of torch's GradScaler.
            self._optimizer.grad_scale, self._optimizer.found_inf = update.divisor, update.skip  # type: ignore[attr-defined]
        elif not divide_or_skip(self.gradients(), update):
            self._optimizer.zero_grad(set_to_none=True)
            return
        for group in self._optimizer.param_groups:
            group["lr"] = update.rate_of(is_decoupled=group["is_decoupled"])
            group["weight_decay"] = update.weight_decay if group["decays"] else 0.0
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all parameters that have one, each in the shape of its parameter."""
        groups = self._optimizer.param_groups
        return [each.grad for group in groups for each in group["params"] if each.grad is not None]

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """See ``Optimizer``."""
        state = self._optimizer.state.get(parameter, {})
        return {key: tensor for key, tensor in state.items() if key != "step"}

    def steps(self, parameter: nn.Parameter) -> int:
        """See ``Optimizer``."""
        return int(self._optimizer.state.get(parameter, {}).get("step", 0))

    def load_state(self, parameter: nn.Parameter, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue ``parameter`` after ``steps`` updates; ``moments`` have the declared shapes."""
        # torch's kernels read the count on the device of the parameter, as float32.
        count = torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)
        self._optimizer.state[parameter] = {"step": count, **moments}

    def drop_state(self, parameter: nn.Parameter) -> None:
        """See ``Optimizer``."""
        self._optimizer.state.pop(parameter, None)


def divide_or_skip(gradients: Sequence[torch.Tensor], update: Update) -> bool:
    """Do what a kernel that cannot divide or skip leaves over; waits for the device.

    Args:
        gradients: Float32 tensors of any shape, divided in place.
        update: The update.

    Returns:
        Whether to update.
    """
    if update.skip is not None and float(update.skip):
        return False
    if update.divisor is not None and gradients:
        torch._foreach_div_(list(gradients), update.divisor)
    return True
