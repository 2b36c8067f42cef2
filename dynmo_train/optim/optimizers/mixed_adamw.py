"""AdamW whose moments are stored in bfloat16 on request: ``--use-precision-aware-optimizer``.

The arithmetic is float32, as in torch's AdamW; only what is kept between two steps is rounded. ``exp_avg`` is rounded
to the nearest number. ``exp_avg_sq`` is rounded stochastically: with a decay rate of 0.999 it changes by less than half
a bfloat16 step in an update, so that the nearest number would be the old one and the mean would never fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...parallel.random_stream import hashed_numbers
from ...parallel.seeding import stable_seed
from .torch_groups import TorchGroups, empty_groups

if TYPE_CHECKING:
    from .adamw import AdamWSettings

# Elements that are updated at once; their float32 copies take 12 bytes each.
BATCH_ELEMENTS = 1 << 24


def round_stochastically(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Round to bfloat16, up with the probability of the fraction that is cut off, so that the mean stays.

    Args:
        values: Float32, finite, not negative, of any shape.
        seed: Of the random numbers.

    Returns:
        bfloat16 of the shape of ``values``.
    """
    noise = hashed_numbers(values.numel(), seed, values.device).view(values.shape).int().bitwise_and_((1 << 16) - 1)
    # A bfloat16 is the upper half of a float32: the carry out of the lower half rounds up.
    bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)


class _AdamWWithDtypes(torch.optim.Optimizer):
    """The update; state and groups as ``torch.optim.AdamW``."""

    def __init__(self, settings: AdamWSettings) -> None:
        super().__init__(empty_groups(), {"lr": 0.0, "weight_decay": 0.0})
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            for batch in _batches(trained):
                self._update(batch, group["lr"], group["weight_decay"])

    def _update(self, parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        settings = self._settings
        states = [self._state_of(each) for each in parameters]
        weights: list[torch.Tensor] = list(parameters)
        gradients = [each.grad for each in parameters if each.grad is not None]
        steps = [int(state["step"]) for state in states]
        means = [state["exp_avg"].float() for state in states]
        squares = [state["exp_avg_sq"].float() for state in states]
        torch._foreach_lerp_(means, gradients, 1 - settings.beta1)
        torch._foreach_mul_(squares, settings.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - settings.beta2)
        for state, mean, square, step in zip(states, means, squares, steps, strict=True):
            if settings.exp_avg_dtype != torch.float32:
                state["exp_avg"].copy_(mean)
            if settings.exp_avg_sq_dtype != torch.float32:
                # Not by name: the copies of a tied weight on two ranks must stay equal.
                state["exp_avg_sq"].copy_(round_stochastically(square, stable_seed("exp_avg_sq", step)))
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        # Not in place: without a cast, these are the state itself.
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, [math.sqrt(1 - settings.beta2**step) for step in steps])
        torch._foreach_add_(denominators, settings.eps)
        torch._foreach_addcdiv_(weights, means, denominators, [-lr / (1 - settings.beta1**step) for step in steps])

    def _state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self._settings.exp_avg_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self._settings.exp_avg_sq_dtype)
        state["step"] += 1
        return state


class MixedAdamW(TorchGroups):
    """AdamW with moments in the dtypes of its settings.

    Args:
        settings: Hyperparameters.
    """

    def __init__(self, settings: AdamWSettings) -> None:
        super().__init__(_AdamWWithDtypes(settings))

    def load_state(self, parameter: nn.Parameter, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue ``parameter`` after ``steps`` updates; ``moments`` have its shape."""
        # On the CPU: the count is read in each step.
        self._optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **moments}


def _batches(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    batch: list[nn.Parameter] = []
    for parameter in parameters:
        if batch and sum(each.numel() for each in batch) + parameter.numel() > BATCH_ELEMENTS:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch
