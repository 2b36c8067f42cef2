"""Floating-point operations of a training step, from the sizes of the layer list; nothing is built."""

from __future__ import annotations

import torch

from .layer_list import ModelFamily, parameters_of


def matrix_parameters(family: ModelFamily, *, experts: int = 1, active: int = 1) -> int:
    """Weights that every token is multiplied with: all matrices but lookup tables; of experts, those that it visits.

    Args:
        experts: of a layer.
        active: experts that a token visits.
    """
    total = 0.0
    for item in family.items:
        if item.kind == "embedding":
            continue
        for name, parameter in parameters_of(item.name, family.build(item.name, torch.device("meta"))).items():
            if parameter.dim() >= 2:
                total += parameter.numel() * (active / experts if ".experts." in name else 1.0)
    return round(total)


def step_flops(family: ModelFamily, *, width: int, samples: int, tokens: int, experts: int = 1, active: int = 1) -> int:
    """Multiplications and additions of forward and backward over ``samples`` of ``tokens`` each, nothing recomputed.

    Two for each weight and token, four more in the backward; attention's two products take ``4 T D`` for a token in a
    forward, over the whole square (as Megatron and PaLM, arXiv 2204.02311 appendix B, count it).

    Worked: GPT 345M, 1,024 tokens, one sample: 6 x 354 M x 1,024 + 12 x 24 x 1,024 x 1,024 x 1,024 = 2.48e12.
    """
    weights = matrix_parameters(family, experts=experts, active=active)
    attention = sum(item.kind in ("attention", "cross_attention") for item in family.items)
    return samples * tokens * (6 * weights + 12 * attention * tokens * width)
