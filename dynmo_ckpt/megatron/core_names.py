"""Megatron-core's names as legacy Megatron's, which hold the same matrices; the rules are in ``maps/core_names.json``.

Megatron-core stacks the layers of a distributed checkpoint along a first dimension; here they come apart again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources

from .. import maps
from .._common.document import parse_json
from ..errors import UnsupportedError
from ..tensors.views import Tensor

STACKED = re.compile(r"decoder\.layers\.(?!\d)")
EXTRA_STATE = "_extra_state"
LEGACY_LAYER = re.compile(r"language_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
LAYER_PARTS = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
WHOLE = {
    "language_model.embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "language_model.embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "language_model.encoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    "language_model.encoder.final_layernorm.bias": "decoder.final_layernorm.bias",
    "language_model.output_layer.weight": "output_layer.weight",
}
WORD_TABLE = "embedding.word_embeddings.weight"


def is_core(names: Iterable[str]) -> bool:
    """Whether these are Megatron-core's names."""
    return any(name == WORD_TABLE or name.startswith("decoder.layers.") for name in names)


def legacy_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under legacy Megatron's names, one for each layer; a name that no rule takes stays as it is."""
    document = parse_json(resources.files(maps).joinpath("core_names.json").read_bytes())
    rules = [(re.compile(pattern), new) for pattern, new in document["rules"]]

    def renamed(name: str) -> str:
        return next((match.expand(new) for pattern, new in rules if (match := pattern.fullmatch(name))), name)

    return {renamed(name): tensor for name, tensor in unstacked(tensors).items() if EXTRA_STATE not in name}


def core_name(name: str) -> str:
    """Megatron-core's name of a tensor of legacy Megatron, with norms of their own and not fused with what follows.

    Raises:
        UnsupportedError: a name that Megatron-core does not have.
    """
    match = LEGACY_LAYER.fullmatch(name)
    whole = WHOLE.get(name) if match is None else None
    inner = LAYER_PARTS.get(match[2]) if match is not None else None
    if match is not None and inner is not None:
        return f"decoder.layers.{match[1]}.{inner}.{match[3]}"
    if whole is None:
        raise UnsupportedError(f"{name}: has no name in Megatron-core")
    return whole


def unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all layers in one as one for each layer: ``decoder.layers.mlp...`` gives ``decoder.layers.0.mlp...``.

    Raises:
        UnsupportedError: a stack that has no layers.
    """
    result = {}
    for name, tensor in tensors.items():
        if not STACKED.match(name) or EXTRA_STATE in name:
            result[name] = tensor
            continue
        if len(tensor.shape) < 2:
            raise UnsupportedError(
                f"{name}: the shape is {list(tensor.shape)}, layers along the first dimension expected"
            )
        for i in range(tensor.shape[0]):
            layer = tensor.narrow(0, i, i + 1)
            result[STACKED.sub(f"decoder.layers.{i}.", name)] = layer.squeeze_first()
    return result
