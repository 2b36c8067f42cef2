"""Floating-point operations of a training step, from parameter shapes on the meta device."""

from __future__ import annotations

import torch

from .families.vocabulary_family import has_tied_output, prediction_depths, shard_names
from .layer_list import ItemSpec, ModelFamily, parameters_of
from .vocabulary.vocabulary_shards import WORD_ROWS, shard_index


def is_routed(item: ItemSpec) -> bool:
    """Whether an item is a block of mixture of depths, which computes a fraction of the tokens."""
    return ("depth_share", 1) in item.metrics


def matrix_parameters(family: ModelFamily, *, experts: int = 1, active: float = 1, routed: float = 1) -> int:
    """Number of weights that multiply each token: all matrices except lookup tables; of experts the active ones.

    Args:
        family: the model.
        experts: experts of a layer.
        active: experts of a token; less than chosen where a capacity drops some.
        routed: fraction of the tokens that the blocks of mixture of depths compute.
    """
    total = 0.0
    depths = tuple(f"{item.name}.{part}." for item in family.items if is_routed(item) for part in ("attention", "mlp"))
    # Rows of a shard that are looked up only.
    is_tied = has_tied_output(family)
    items = (item.name for item in family.items if item.kind != "embedding")
    for item in (*items, *shard_names(family)):
        for name, parameter in parameters_of(item, family.build(item, torch.device("meta"))).items():
            # The copy of the word table in a depth of multi-token prediction is looked up only.
            is_table = name.endswith(".embedding.word.weight") or (not is_tied and name.endswith(f".{WORD_ROWS}"))
            if parameter.dim() >= 2 and not is_table:
                weight = active / experts if ".experts." in name else 1.0
                # The router of a block reads all tokens, and so does an exit behind it.
                weight *= routed if name.startswith(depths) and not name.endswith(".attention.router.weight") else 1.0
                # The rows of a shard multiply the tokens of all predictions.
                weight *= 1 + prediction_depths(family) if shard_index(name) is not None else 1
                total += parameter.numel() * weight
    return round(total)


def attention_windows(family: ModelFamily) -> dict[str, int | None]:
    """The keys that a token attends to, by attention; None where these are all. Layers may differ."""
    found: dict[str, int | None] = {}
    for item in family.items:
        if item.kind in ("attention", "cross_attention", "layer"):
            module = family.build(item.name, torch.device("meta"))
            # A depth of multi-token prediction and a block of mixture of depths are one item.
            attention = module if item.kind != "layer" else getattr(module, "attention", None)
            if attention is not None:
                found[item.name] = getattr(attention, "window", None)
    return found


def step_flops(
    family: ModelFamily,
    *,
    width: int,
    samples: int,
    tokens: int,
    experts: int = 1,
    active: float = 1,
    routed: float = 1,
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
        routed: fraction of the tokens that the blocks of mixture of depths compute, and attend to.

    Worked: GPT 345M, 1,024 tokens, one sample: 6 x 354 M x 1,024 + 12 x 24 x 1,024 x 1,024 x 1,024 = 2.48e12.
    """
    weights = matrix_parameters(family, experts=experts, active=active, routed=routed)
    shares = {item.name: routed * routed if is_routed(item) else 1 for item in family.items}
    windows = attention_windows(family)
    keys = sum(shares[item] * (tokens if size is None else min(size, tokens)) for item, size in windows.items())
    return round(samples * tokens * (6 * weights + 12 * keys * width))
