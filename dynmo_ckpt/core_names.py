"""Megatron-core's names as legacy Megatron's, which hold the same matrices; the rules are in ``maps/core_names.json``.

Megatron-core stacks the layers of a distributed checkpoint along a first dimension; here they come apart again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources

from .faults import UnsupportedError
from .formats._document import parse_json
from .views import Tensor

STACKED = re.compile(r"decoder\.layers\.(?!\d)")
EXTRA_STATE = "_extra_state"
WORD_TABLE = "embedding.word_embeddings.weight"


def is_core(names: Iterable[str]) -> bool:
    """Whether these are Megatron-core's names."""
    return any(name == WORD_TABLE or name.startswith("decoder.layers.") for name in names)


def legacy_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under legacy Megatron's names, one for each layer; a name that no rule takes stays as it is."""
    document = parse_json(resources.files(__package__).joinpath("maps", "core_names.json").read_bytes())
    rules = [(re.compile(pattern), new) for pattern, new in document["rules"]]

    def renamed(name: str) -> str:
        return next((match.expand(new) for pattern, new in rules if (match := pattern.fullmatch(name))), name)

    return {renamed(name): tensor for name, tensor in unstacked(tensors).items() if EXTRA_STATE not in name}


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
            result[STACKED.sub(f"decoder.layers.{i}.", name)] = layer.without_first()
    return result
