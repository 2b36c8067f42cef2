"""Stands in for ``torch.cuda.make_graphed_callables`` where there is no device: static memory, no graphs."""

from __future__ import annotations

import torch


def on_static_memory(functions, samples, **_options):
    """Each function with inputs, outputs and gradients in memory that its next call overwrites."""
    return tuple(map(_on_static_memory, functions, samples))


def _on_static_memory(function, static):
    leaves = [each for each in static if each.requires_grad]
    output = function(*static)
    static_output, static_gradient = output.detach().clone(), torch.empty_like(output)
    static_gradients = [torch.empty_like(each) for each in leaves]
    now = {}

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            for target, value in zip(static, inputs, strict=True):
                if target.data_ptr() != value.data_ptr():
                    assert not target.is_leaf or target.shape == value.shape
                    target.data.copy_(value)
            with torch.enable_grad():
                now["output"] = function(*static)
            static_output.copy_(now["output"].detach())
            return static_output.detach()

        @staticmethod
        def backward(ctx, gradient):
            static_gradient.copy_(gradient)
            computed = torch.autograd.grad(now.pop("output"), leaves, static_gradient, allow_unused=True)
            for target, value in zip(static_gradients, computed, strict=True):
                target.copy_(value)
            of_leaf = dict(zip(map(id, leaves), static_gradients, strict=True))
            return tuple(of_leaf[id(each)].detach() if each.requires_grad else None for each in static)

    return Graphed.apply
