"""Layouts as named axes, as in einops: ``(n t d) h`` is a matrix whose rows are heads x query/key/value x head dim.

A pattern for each side of a map describes a conversion in both directions. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..io.errors import UnsupportedError, short_name
from ..tensors.views import Tensor

Axes = tuple[tuple[str, ...], ...]


def parse_axes(pattern: str) -> Axes:
    """The axes of each stored dimension: ``(n t d) h`` gives ``(("n", "t", "d"), ("h",))``."""
    axes: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in pattern.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            axes.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(token)
        else:
            axes.append((token,))
    return tuple(axes)


def stored_shape(axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The stored shape of an array with these axes."""
    return tuple(math.prod(sizes[axis] for axis in group) for group in axes)


def expand(tensor: Tensor, axes: Axes, sizes: Mapping[str, int], name: str, *, finer: bool = False) -> Tensor:
    """``tensor`` with one dimension per axis.

    Args:
        tensor: of the stored shape, or already expanded.
        axes: the axes of each stored dimension.
        sizes: of the axes.
        name: of the tensor, for messages.
        finer: ``tensor`` may come from another map, with other dimensions than these axes.

    Raises:
        UnsupportedError: the shape does not fit the axes and sizes.
    """
    expected = stored_shape(axes, sizes)
    flat = tuple(sizes[axis] for group in axes for axis in group)
    # The maps are applied one after the other: the tensor may already have a dimension per axis.
    if tensor.shape == flat:
        return tensor
    # Some formats store a vector with a dimension of size 1, such as the bias [1, v] of Blenderbot.
    if tensor.shape != expected and [n for n in tensor.shape if n != 1] == [n for n in flat if n != 1]:
        return tensor.with_unit_dims(flat)
    if finer and len(tensor.shape) > len(expected):
        merged = _merged(tensor, [size for size in flat if size != 1])
        if merged is not None:
            return merged.with_unit_dims(flat)
    if tensor.shape != expected:
        raise UnsupportedError(
            f"{short_name(name)}: has the shape {list(tensor.shape)}; the model requires {list(expected)}"
        )
    # From the last dimension: a dimension that is split moves only those after it.
    for dim in reversed(range(len(axes))):
        if len(axes[dim]) > 1:
            tensor = tensor.unflatten(dim, [sizes[axis] for axis in axes[dim]])
    return tensor


def _merged(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """``tensor`` with dimensions flattened and split until it has ``shape``; None where that is impossible."""
    # Dimensions of size 1 would stop the search: any number of them may lie between the others.
    result = tensor.with_unit_dims(tuple(size for size in tensor.shape if size != 1))
    for dim, size in enumerate(shape):
        while dim + 1 < len(result.shape) and result.shape[dim] < size:
            result = result.flatten(dim)
        # An axis of the other map may be two of this one, such as a head of the planes of its rotation.
        if dim < len(result.shape) and result.shape[dim] > size and result.shape[dim] % size == 0:
            result = result.unflatten(dim, (size, result.shape[dim] // size))
        if dim >= len(result.shape) or result.shape[dim] != size:
            return None
    return result if len(result.shape) == len(shape) else None


def axis_sizes(model: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    """Sizes of the axes and parts of the tables.

    A group is a key-value head: it has ``q`` query heads, one key head and one value head, ``t`` heads in total.

    Args:
        model: the ``model`` of a manifest.
        vocab_size: number of rows of the vocabulary, the true or a padded one.
    """
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads", heads)
    width = model.get("head_dim", model["hidden_size"] // heads)
    return {
        "v": vocab_size,
        "s": model["max_position_embeddings"],
        "h": model["hidden_size"],
        "o": model["hidden_size"],
        "f": model["ffn_hidden_size"],
        "g": groups,
        "q": heads // groups,
        # The rows of a group lie together, "(g t d) h". So a contiguous slice of rows has complete groups, and a rank
        # that gets it computes attention without its neighbors. Where t comes first, as in Megatron's version 0, each
        # rank has its own [Q; K; V], and the slices must be permuted before they are concatenated.
        "t": heads // groups + 2,
        # Phi-3 has the queries of all groups, then their keys, then their values: of n heads the first gq, g and g.
        "n": (heads // groups + 2) * groups,
        "gq": heads,
        "d": width,
        # A head is "(b w)" where rotary embedding pairs elements half a head apart (rotate_half of transformers and
        # Megatron), and "(w b)" where it pairs neighbors (Meta, llama2.c).
        "w": width // 2,
        "b": 2,
        "x": 2,
        # "(p f) h": the gate, then the up projection. Ranks split f, so each has a slice of both.
        "p": 2,
        "one": 1,
        "two": 2,
        "types": model.get("num_tokentypes", 0),
        "e": model.get("num_experts", 0),
        "r": model.get("relative_buckets", 32),
        "classes": model.get("num_classes", 1),
        "fe": model.get("moe_ffn_hidden_size", model["ffn_hidden_size"]),
        "fs": model.get("moe_shared_ffn_size", 0),
        "hh": 2 * model["hidden_size"],
        # Multi-head latent attention; 0 in models without it, whose tables do not have these axes.
        "k": model.get("qk_head_dim", 0) + model.get("qk_pos_emb_head_dim", 0),
        "m": model.get("qk_head_dim", 0) + model.get("v_head_dim", 0),
        "u": model.get("v_head_dim", 0),
        "rq": model.get("q_lora_rank", 0),
        "c": model.get("kv_lora_rank", 0),
        "cr": model.get("kv_lora_rank", 0) + model.get("qk_pos_emb_head_dim", 0),
    }
