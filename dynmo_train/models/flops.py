"""Floating-point operations of a training step, from parameter shapes on the meta device."""

from __future__ import annotations

import torch

from .families.multi_token import is_prediction
from .families.vocabulary_family import has_tied_output, prediction_depths, shard_names
from .layer_list import ModelFamily, parameters_of
from .vocabulary.vocabulary_shards import WORD_ROWS, shard_index


def matrix_parameters(family: ModelFamily, *, experts: int = 1, active: float = 1) -> int:
    """Number of weights that multiply each token: all matrices except lookup tables; of experts the active ones.

    Args:
        family: the model.
        experts: experts of a layer.
        active: experts of a token; less than chosen where a capacity drops some.
    """
    total = 0.0
    # Rows of a shard that are looked up only.
    is_tied = has_tied_output(family)
    items = (item.name for item in family.items if item.kind != "embedding")
    for item in (*items, *shard_names(family)):
        for name, parameter in parameters_of(item, family.build(item, torch.device("meta"))).items():
            # The copy of the word table in a depth of multi-token prediction is looked up only.
            is_table = name.endswith(".embedding.word.weight") or (not is_tied and name.endswith(f".{WORD_ROWS}"))
            if parameter.dim() >= 2 and not is_table:
                weight = active / experts if ".experts." in name else 1.0
                # The rows of a shard multiply the tokens of all predictions.
                weight *= 1 + prediction_depths(family) if shard_index(name) is not None else 1
                total += parameter.numel() * weight
    return round(total)


def attention_windows(family: ModelFamily) -> dict[str, int | None]:
    """The keys that a token attends to, by attention; None where these are all. Layers may differ."""
    found: dict[str, int | None] = {}
    for item in family.items:
        if item.kind in ("attention", "cross_attention") or is_prediction(item):
            module = family.build(item.name, torch.device("meta"))
            found[item.name] = getattr(getattr(module, "attention", module), "window", None)
    return found


def step_flops(
    family: ModelFamily,
    *,
    width: int,
    samples: int,
    tokens: int,
    experts: int = 1,
    active: float = 1,
) -> int:
    """Floating-point operations of forward and backward, without recomputation.

    Two per weight and token in the forward, four in the backward. The two products of attention take ``4 T D`` per
    token in the forward, over the whole square (as in Megatron and in PaLM, arXiv:2204.02311, appendix B); in a layer
    with a sliding window of W keys ``4 W D``.

    Args:
        family: the model.
        width: mean width of queries and values of all heads; the model width D in most models.
        samples: number of samples of the step.
        tokens: tokens of a sample T.
        experts: experts of a layer.
        active: experts of a token; less than chosen where a capacity drops some.

    Worked: GPT 345M, 1,024 tokens, one sample: 6 x 354 M x 1,024 + 12 x 24 x 1,024 x 1,024 x 1,024 = 2.48e12.
    """
    weights = matrix_parameters(family, experts=experts, active=active)
    windows = attention_windows(family)
    keys = sum(tokens if window is None else min(window, tokens) for window in windows.values())
    return samples * tokens * (6 * weights + 12 * keys * width)
