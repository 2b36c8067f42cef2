"""AdamW, by torch or by NVIDIA's apex, with one interface to its state.

Both keep the moments ``exp_avg`` and ``exp_avg_sq`` of every parameter in float32. torch counts the updates of each
parameter. apex counts those of a parameter group, whether or not its members had gradients; :class:`FusedAdamW` counts
per parameter instead, so that a checkpoint of one implementation resumes with the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from ...config.sections.optimizer import OptimizerConfig
from ...models.layer_list import is_embedding_or_output
from .mixed_adamw import MixedAdamW
from .protocol import Optimizer, OptimizerContext, StateShapes, Update, decays
from .torch_groups import TorchGroups, divide_or_skip, empty_groups

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW with decoupled weight decay on matrices, none on vectors (Loshchilov and Hutter, arXiv 1711.05101).

    Attributes:
        beta1: Decay rate of ``exp_avg``.
        beta2: Decay rate of ``exp_avg_sq``.
        eps: Added to the denominator.
        weight_decay: Constant weight decay, where no schedule sets it per step.
        exp_avg_dtype: dtype of ``exp_avg`` between two steps, float32 or bfloat16.
        exp_avg_sq_dtype: dtype of ``exp_avg_sq`` between two steps, float32 or bfloat16.
    """

    STORED_TYPE: ClassVar[str] = "adamw"
    MOVES_PRUNED: ClassVar[bool] = False
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> Self:
        """See ``OptimizerSettings``."""
        return cls(
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            exp_avg_dtype=_DTYPES[config.exp_avg_dtype],
            exp_avg_sq_dtype=_DTYPES[config.exp_avg_sq_dtype],
        )

    def state_shapes(self, name: str, shape: tuple[int, ...]) -> StateShapes:
        """Return two moments in the ``shape`` of any parameter ``name``."""
        return dict.fromkeys(MOMENTS, tuple(shape))

    def state_dtype(self, key: str) -> torch.dtype:
        """Return the dtype of ``exp_avg`` or ``exp_avg_sq``."""
        return self.exp_avg_dtype if key == "exp_avg" else self.exp_avg_sq_dtype

    @property
    def _is_mixed(self) -> bool:
        return (self.exp_avg_dtype, self.exp_avg_sq_dtype) != (torch.float32, torch.float32)

    def describe(self, context: OptimizerContext) -> str:
        """See ``OptimizerSettings``; ``context`` decides between apex and torch."""
        if self._is_mixed:
            return "AdamW with moments in bfloat16"
        return "torch AdamW" if context.fused_adam is None else "apex FusedAdam"

    def make(self, context: OptimizerContext) -> Optimizer:
        """Create it with apex's ``FusedAdam`` where ``context`` has it, else with torch's AdamW."""
        if self._is_mixed:
            return MixedAdamW(self)
        return TorchAdamW(self) if context.fused_adam is None else FusedAdamW(self, context.fused_adam)


class TorchAdamW(TorchGroups):
    """``torch.optim.AdamW`` in its fused form.

    Args:
        settings: Hyperparameters.
    """

    def __init__(self, settings: AdamWSettings) -> None:
        # Fused: one kernel updates many tensors.
        super().__init__(
            torch.optim.AdamW(
                empty_groups(), lr=0.0, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True
            )
        )


class FusedAdamW:
    """apex's FusedAdam in its AdamW mode, with new parameter groups in every step.

    A group has equal learning rate, weight decay and number of updates. So one kernel still updates a group, and a
    parameter without a gradient is not counted.

    Args:
        settings: Hyperparameters.
        fused_adam: ``apex.optimizers.FusedAdam`` or a compatible class.
    """

    def __init__(self, settings: AdamWSettings, fused_adam: type[Any]) -> None:
        self._is_decoupled: dict[nn.Parameter, bool] = {}
        self._optimizer = fused_adam(
            [{"params": []}],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            adam_w_mode=True,
        )
        self._steps: dict[nn.Parameter, int] = {}

    def add(self, parameters: Mapping[str, nn.Parameter], num_rows: Mapping[str, int] | None = None) -> None:
        """Update ``parameters``, too; ``num_rows`` has no effect; see ``Optimizer``."""
        self._is_decoupled.update({each: is_embedding_or_output(name) for name, each in parameters.items()})

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """See ``Optimizer``."""
        for parameter in parameters:
            del self._is_decoupled[parameter]
            self.drop_state(parameter)

    @property
    def skips_on_device(self) -> bool:
        """See ``Optimizer``; apex reads such a flag only in forms of its kernel that keep copies of the parameters."""
        return False

    def step(self, update: Update) -> None:
        """See ``Optimizer``."""
        trained = [parameter for parameter in self._is_decoupled if parameter.grad is not None]
        if not divide_or_skip([each.grad for each in trained if each.grad is not None], update):
            for parameter in trained:
                parameter.grad = None
            return
        groups: dict[tuple[float, bool, int], list[nn.Parameter]] = {}
        for parameter in trained:
            rate = update.rate_of(is_decoupled=self._is_decoupled[parameter])
            groups.setdefault((rate, decays(parameter), self.steps(parameter)), []).append(parameter)
        # apex counts updates by group, and its kernel uses that count for the bias correction of all members.
        self._optimizer.param_groups = [
            {
                **self._optimizer.defaults,
                "params": group,
                "lr": rate,
                "weight_decay": update.weight_decay if has_decay else 0.0,
                "step": done,
            }
            for (rate, has_decay, done), group in groups.items()
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
