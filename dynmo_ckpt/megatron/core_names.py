"""Translates Megatron-core's tensor names to those of legacy Megatron, which has the same matrices, and back.

The rules are in ``maps/core_names.json``. In a distributed checkpoint Megatron-core stacks the layers along a first
dimension; ``unstacked`` splits them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources

from .. import maps
from .._common.document import parse_json
from ..io.errors import UnsupportedError, short_name
from ..tensors.views import Tensor

# A layer without a number: the layers are one tensor with a first dimension of layers.
STACKED = re.compile(r"decoder\.layers\.(?!\d)")
# Transformer Engine's float8 scales, which are not weights.
EXTRA_STATE = "_extra_state"
LEGACY_LAYER = re.compile(r"language_model\.encoder\.layers\.(\d{1,9})\.(.+)\.(weight|bias)")
LAYER_PARTS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
SINGLE = {
    "language_model.embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "language_model.embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "language_model.encoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    "language_model.encoder.final_layernorm.bias": "decoder.final_layernorm.bias",
    "language_model.output_layer.weight": "output_layer.weight",
}
WORD_TABLE = "embedding.word_embeddings.weight"


def is_core(names: Iterable[str]) -> bool:
    """Whether ``names`` are those of Megatron-core."""
    return any(name == WORD_TABLE or name.startswith("decoder.layers.") for name in names)


def legacy_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under legacy Megatron's names, one for each layer; a name without a rule is unchanged.

    Args:
        tensors: by the names of Megatron Core; a tensor of a stack of layers has the shape ``[layers, ...]``.

    Returns:
        The tensors by legacy name, without the dimension of layers; extra state is left out.

    Raises:
        UnsupportedError: a stack without a dimension of layers.
    """
    document = parse_json(resources.files(maps).joinpath("core_names.json").read_bytes())
    rules = [(re.compile(pattern), new) for pattern, new in document["rules"]]

    def renamed(name: str) -> str:
        return next((match.expand(new) for pattern, new in rules if (match := pattern.fullmatch(name))), name)

    return {renamed(name): tensor for name, tensor in unstacked(tensors).items() if EXTRA_STATE not in name}


def core_name(name: str) -> str:
    """Megatron-core's name of a tensor of legacy Megatron.

    Its own layers and those of Transformer Engine both store norms under the names of the linear layers after them.

    Raises:
        UnsupportedError: a name that Megatron-core does not have.
    """
    match = LEGACY_LAYER.fullmatch(name)
    single = SINGLE.get(name) if match is None else None
    inner = LAYER_PARTS.get(match[2]) if match is not None else None
    if match is not None and inner is not None:
        return f"decoder.layers.{match[1]}.{inner}{'' if inner.endswith('_') else '.'}{match[3]}"
    if single is None:
        raise UnsupportedError(f"{name}: has no name in Megatron-core; use --to legacy or native")
    return single


def unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked tensors as one for each layer: ``decoder.layers.mlp...`` gives ``decoder.layers.0.mlp...``.

    Args:
        tensors: by name; a stacked one has the shape ``[layers, ...]``.

    Returns:
        The tensors by name; those of a stack have the shape ``[...]`` of one layer.

    Raises:
        UnsupportedError: a stack without a dimension of layers.
    """
    result = {}
    for name, tensor in tensors.items():
        if not STACKED.match(name) or EXTRA_STATE in name:
            result[name] = tensor
            continue
        if len(tensor.shape) < 2:
            raise UnsupportedError(
                f"{short_name(name)}: has the shape {list(tensor.shape)}; its first dimension must be the layers"
            )
        for i in range(tensor.shape[0]):
            layer = tensor.narrow(0, i, i + 1)
            result[STACKED.sub(f"decoder.layers.{i}.", name)] = layer.squeeze_first()
    return result
