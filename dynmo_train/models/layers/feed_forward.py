"""The MLP of a block: two products and an activation, or a gate.

Shapes in names: B samples, T tokens, D model width, F width inside the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.random_stream import item_dropout
from .gated import Activation, are_stacked, gated_activation, is_gated, join_gated, stacked_rows
from .linear import PrunableLinear, overlapped_pair

Linear = Callable[[str, torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


class FeedForward(nn.Module):
    """``fc2(activation(fc1(x)))``, or with a gated activation ``fc2(activation(gate(x)) * up(x))`` (Shazeer 2020).

    Args:
        width: model width D.
        inner: width F inside the MLP.
        activation: a key of ``ACTIVATIONS`` or ``GATED``, or a ``ClampedSwiglu``.
        device: where the parameters are created.
        bias: whether the linear layers have biases.
    """

    def __init__(
        self, *, width: int, inner: int, activation: Activation, device: torch.device, bias: bool = True
    ) -> None:
        super().__init__()
        self.activation, self.gated = activation, is_gated(activation)
        if self.gated:
            self.gate = PrunableLinear(width, inner, device, bias=bias)
            self.up = PrunableLinear(width, inner, device, bias=bias)
        else:
            self.fc1 = PrunableLinear(width, inner, device, bias=bias)
        self.fc2 = PrunableLinear(inner, width, device, bias=bias)

    def transform(self, x: torch.Tensor, linear: Linear | None = None) -> torch.Tensor:
        """Apply to the last dimension of ``x``, ``[..., D]`` to ``[..., D]``, without norm and residual.

        Args:
            x: input, ``[..., D]``.
            linear: applies a linear layer, by its name, to an input; None applies this module's own layers.
        """
        product = linear or self._own_linear
        if not self.gated:
            return product("fc2", ACTIVATIONS[str(self.activation)](product("fc1", x)))
        gate, up = self._gate_and_up(x) if linear is None else (linear("gate", x), linear("up", x))
        return product("fc2", gated_activation(gate, up, self.activation))

    def _gate_and_up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both products; where one product has both, they are concatenated in the first."""
        gate, up = self.gate, self.up
        if gate.can_overlap(x) and up.can_overlap(x):
            return overlapped_pair(gate, up, x), None
        # Once for both: each entry costs a collective in the forward or the backward.
        x = x if gate.enter is None else gate.enter(x)
        # A compiled graph cannot ask for the storage of a weight.
        is_plain = gate.is_dense and up.is_dense and x.numel() > 0 and not torch.compiler.is_compiling()
        if not is_plain or not are_stacked(gate.weight, up.weight):
            return gate.product(x), up.product(x)
        bias = None
        if gate.bias is not None and up.bias is not None:
            if not are_stacked(gate.bias, up.bias):
                return gate.product(x), up.product(x)
            bias = stacked_rows(gate.bias, up.bias)
        return gate.dense_product(x, stacked_rows(gate.weight, up.weight), bias), None

    def linear_layers(self) -> list[PrunableLinear]:
        """The linear layers, in the order of their application."""
        return [self.gate, self.up, self.fc2] if self.gated else [self.fc1, self.fc2]

    def _own_linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, name)(x)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``transform`` of ``x`` ``[..., D]``."""
        return self.transform(x)


def join_gated_layers(module: nn.Module) -> None:
    """Lay out gate and up of an item's MLPs for one product (``gated.py``), in place; not those of routed experts."""
    for path, child in module.named_modules():
        # Grouped products want the gates of all experts in one storage instead.
        if isinstance(child, FeedForward) and child.gated and "experts" not in path.split("."):
            join_gated(child.gate, child.up)


class Mlp(FeedForward):
    """``x + post_norm(transform(norm(x)))``, where most models have one of the two norms.

    Args:
        width: model width D.
        inner: width F inside the MLP.
        activation: a key of ``ACTIVATIONS`` or ``GATED``, or a ``ClampedSwiglu``.
        norm: normalization before the sublayer; ``nn.Identity`` where there is none.
        device: where the parameters are created.
        bias: whether the linear layers have biases.
        post_norm: normalization of the sublayer's output, before dropout and residual; None means none.
        dropout: dropout probability of the output.
    """

    def __init__(
        self,
        *,
        width: int,
        inner: int,
        activation: Activation,
        norm: nn.Module,
        device: torch.device,
        bias: bool = True,
        post_norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(width=width, inner=inner, activation=activation, device=device, bias=bias)
        self.norm, self.post_norm, self.dropout = norm, post_norm, dropout

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Apply the sublayer with its residual to the stream ``x_BTD`` ``[B, T, D]``."""
        y_BTD = self.transform(self.norm(x_BTD))
        if self.post_norm is not None:
            y_BTD = self.post_norm(y_BTD)
        return x_BTD + item_dropout(y_BTD, self.dropout, self.training)
