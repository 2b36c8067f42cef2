"""The items that a worker holds, each with its own optimizer, so that an item moves with all that belongs to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..models.items import ModelFamily, masks_of, parameters_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW with decoupled weight decay on matrices, none on vectors (Loshchilov and Hutter, arXiv 1711.05101)."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class ItemState:
    """All that an item is, by global names: what a move carries and a checkpoint stores.

    Attributes:
        tensors: parameters, ``NAME.mask`` (bool) and ``NAME.exp_avg``, ``NAME.exp_avg_sq``, in a fixed order.
        steps: parameter name -> optimizer updates done, for parameters that have optimizer state.
    """

    tensors: Mapping[str, torch.Tensor]
    steps: Mapping[str, int]


def role_of(tensor_name: str) -> str:
    """``parameter``, ``mask`` or ``optimizer``: what a tensor of an ``ItemState`` is, by its name."""
    ending = tensor_name.rpartition(".")[2]
    return {"mask": "mask", "exp_avg": "optimizer", "exp_avg_sq": "optimizer"}.get(ending, "parameter")


class HeldItems:
    """The items of one worker: modules and optimizers, built, exported, imported and dropped one by one."""

    def __init__(
        self, family: ModelFamily, settings: AdamWSettings, device: torch.device, sparse_threshold: float
    ) -> None:
        self.family, self.settings, self.device = family, settings, device
        self.sparse_threshold = sparse_threshold
        self.modules: dict[str, nn.Module] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def build(self, name: str) -> None:
        """Hold an item with its initial weights and no optimizer state."""
        self.hold(name, self.family.build(name, self.device))

    def hold(self, name: str, module: nn.Module) -> None:
        """Hold ``module`` as the item ``name``."""
        settings = self.settings
        parameters = list(module.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.modules[name] = module
        self._optimizers[name] = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    def drop(self, name: str) -> None:
        """Hold the item no longer."""
        del self.modules[name], self._optimizers[name]

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Every parameter: (item, global parameter name, parameter), in the order in which the items are held."""
        for item, module in self.modules.items():
            for name, parameter in parameters_of(item, module).items():
                yield item, name, parameter

    def update(self, rate: float) -> None:
        """One optimizer step on every parameter that has a gradient; the gradients are dropped."""
        for item, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for layer in masks_of(item, self.modules[item]).values():
                layer.weights_changed()

    def forget_moments(self, parameter_names: set[str]) -> None:
        """Drop the optimizer state of parameters that will train no more."""
        for item, name, parameter in self.parameters():
            if name in parameter_names:
                self._optimizers[item].state.pop(parameter, None)

    def moments(self, item: str, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The moments of a parameter, empty before its first update."""
        state = self._optimizers[item].state.get(parameter, {})
        return {key: state[key] for key in MOMENTS if key in state}

    def export(self, item: str) -> ItemState:
        """The whole state of an item; the tensors are the live ones, not copies."""
        tensors: dict[str, torch.Tensor] = {}
        steps: dict[str, int] = {}
        module = self.modules[item]
        masks = masks_of(item, module)
        for name, parameter in parameters_of(item, module).items():
            tensors[name] = parameter.detach()
            if name in masks and (mask := masks[name].mask) is not None:
                tensors[f"{name}.mask"] = mask
            moments = self.moments(item, parameter)
            tensors.update({f"{name}.{key}": value for key, value in moments.items()})
            if moments:
                steps[name] = int(self._optimizers[item].state[parameter]["step"])
        return ItemState(tensors=tensors, steps=steps)

    def adopt(self, item: str, state: ItemState) -> None:
        """Hold an item with exactly this state; raises ``KeyError`` where a parameter is missing."""
        module = self.family.build(item, torch.device("meta")).to_empty(device=self.device)
        with torch.no_grad():
            for name, parameter in parameters_of(item, module).items():
                parameter.copy_(state.tensors[name])
        for name, layer in masks_of(item, module).items():
            if f"{name}.mask" in state.tensors:
                layer.set_mask(state.tensors[f"{name}.mask"].to(self.device), self.sparse_threshold)
        self.hold(item, module)
        optimizer = self._optimizers[item]
        for name, parameter in parameters_of(item, module).items():
            if name in state.steps:
                moments = {key: state.tensors[f"{name}.{key}"].to(self.device).clone() for key in MOMENTS}
                step = torch.tensor(float(state.steps[name]), dtype=torch.float32, device=self.device)
                optimizer.state[parameter] = {"step": step, **moments}

    def reorder(self, names: tuple[str, ...]) -> None:
        """Hold the items in this order; ``names`` are exactly the held ones."""
        self.modules = {name: self.modules[name] for name in names}
        self._optimizers = {name: self._optimizers[name] for name in names}
