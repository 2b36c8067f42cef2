"""Names and state of an item's tensors: what a migration sends and what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..models.layer_list import EXPERT_BIAS, has_vocabulary_rows

# Suffix of the reference weights that adaptive freezing compares with.
REFERENCE = "reference"
# Suffixes of the tensors of gradient compression: error feedback and the warm-start factor.
MEMORIES = ("error", "factor")
# Suffixes of the factors of a second moment, which do not have the shape of their parameter.
FACTORS = ("row_var", "col_var")
ROLES = {
    "mask": "mask",
    REFERENCE: "buffer",
    EXPERT_BIAS: "buffer",
    **dict.fromkeys(("exp_avg", "exp_avg_sq", "momentum_buffer", "variance", *FACTORS), "optimizer"),
    **dict.fromkeys(MEMORIES, "buffer"),
}


@dataclass(frozen=True, kw_only=True)
class ItemState:
    """The complete state of an item, by global tensor names, in a fixed order.

    Attributes:
        tensors: Parameters and, where they exist, ``NAME.mask`` (bool), optimizer state such as ``NAME.exp_avg``
            (float32), ``NAME.reference`` (adaptive freezing), ``ITEM.memory.*`` (gradient compression), and biases of
            experts.
        steps: Parameter name -> number of optimizer updates, for parameters with optimizer state.
    """

    tensors: Mapping[str, torch.Tensor]
    steps: Mapping[str, int]


def parameter_of(tensor_name: str) -> str:
    """Return the name of the parameter that a tensor of an ``ItemState`` is or belongs to."""
    return tensor_name if role_of(tensor_name) == "parameter" else tensor_name.rpartition(".")[0]


def role_of(tensor_name: str) -> str:
    """Return the role of a tensor of an ``ItemState``: ``parameter``, ``mask``, ``buffer`` or ``optimizer``."""
    return ROLES.get(tensor_name.rpartition(".")[2], "parameter")


def is_whole(tensor_name: str) -> bool:
    """Whether ZeRO leaves a tensor of an ``ItemState`` whole: masks, and biases of experts."""
    return role_of(tensor_name) == "mask" or tensor_name.removesuffix(f".{REFERENCE}").endswith(f".{EXPERT_BIAS}")


def has_own_shape(tensor_name: str) -> bool:
    """Whether a tensor of an ``ItemState`` has no shape of its parameter that ZeRO cuts: whole ones, and factors."""
    return is_whole(tensor_name) or tensor_name.endswith(FACTORS)


def has_token_rows(tensor_name: str) -> bool:
    """Whether a tensor of an ``ItemState`` has a row for each token id, as its parameter has."""
    return has_vocabulary_rows(parameter_of(tensor_name)) and not tensor_name.endswith(".col_var")


def memory_name(item: str, *parts: str) -> str:
    """Return ``ITEM.memory.PARTS``, the name of a tensor of gradient compression; the last part is in ``MEMORIES``."""
    return ".".join((item, "memory", *parts))


def is_memory(item: str, tensor_name: str) -> bool:
    """Whether a tensor of an item's state belongs to gradient compression."""
    return tensor_name.startswith(memory_name(item, "")) and tensor_name.rpartition(".")[2] in MEMORIES
