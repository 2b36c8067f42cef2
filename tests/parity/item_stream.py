"""A model family on one device, item after item, for comparison with another implementation."""

from __future__ import annotations

import torch
from torch import nn

from dynmo_train.models.layer_list import ModelFamily, output_of, parameters_of

TOLERANCE = {"rtol": 0, "atol": 1e-4}
OF_LOGITS = {"rtol": 1e-5, "atol": 1e-5}


def build_all(family: ModelFamily, seed: int = 0) -> dict[str, nn.Module]:
    """All items with random vectors as well (norms around 1, biases around 0), ties equal."""
    modules = {item.name: family.build(item.name, torch.device("cpu")) for item in family.items}
    generator = torch.Generator().manual_seed(seed)
    for item, module in modules.items():
        for name, parameter in parameters_of(item, module).items():
            if parameter.dim() == 1 and name not in family.ties:
                middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                parameter.data.copy_(middle + 0.2 * torch.randn(parameter.shape, generator=generator))
    return modules


def parameters(modules: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {name: value for item, module in modules.items() for name, value in parameters_of(item, module).items()}


def run(family: ModelFamily, modules: dict[str, nn.Module], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All values behind the last item (``loss`` among them), and as ``before.NAME`` what the last item read."""
    values: dict[str, torch.Tensor] = {}
    for item in family.items:
        read = [values[name] for name in item.reads]
        if item.name == "head":
            values |= {f"before.{name}": values[name] for name in item.reads}
        values[item.writes] = output_of(modules[item.name](*read, *(batch[name] for name in item.inputs)))
    return values


def gradients(family: ModelFamily, modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Gradient by parameter, those of tied copies added to their owner's."""
    total: dict[str, torch.Tensor] = {}
    for name, parameter in parameters(modules).items():
        owner = family.ties.get(name, name)
        if parameter.grad is not None:
            total[owner] = total[owner] + parameter.grad if owner in total else parameter.grad.clone()
    return total


def copy_into(theirs: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Set the other model's parameters; every parameter must be given, with its shape."""
    own = dict(theirs.named_parameters())
    assert set(own) == set(values), set(own) ^ set(values)
    with torch.no_grad():
        for name, parameter in own.items():
            assert parameter.shape == values[name].shape, name
            parameter.copy_(values[name])


def assert_same_gradients(theirs: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """``expected`` are our gradients under the other model's names."""
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(expected[name], parameter.grad, msg=lambda text, n=name: f"{n}: {text}", **TOLERANCE)
