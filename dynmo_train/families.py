"""The registry of model families: from a configuration, or the ``model`` of a manifest, to a family and its boundary.

Adding a family is one file in ``models/`` and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .config import Config
from .models.gpt import Gpt, GptShape
from .models.items import BoundaryShape, ModelFamily

CAUSAL = ("gpt",)


@dataclass(frozen=True, kw_only=True)
class FamilyEntry:
    """How a family is made.

    Attributes:
        of_config: from a run's configuration.
        of_manifest: from the ``model`` object of a manifest.
        boundary: what crosses its stage boundaries.
    """

    of_config: Callable[[Config], ModelFamily]
    of_manifest: Callable[[Mapping[str, Any]], ModelFamily]
    boundary: Callable[[Config], BoundaryShape]


def family_of(config: Config) -> ModelFamily:
    """The model of a run."""
    return FAMILIES[config.model.family].of_config(config)


def family_of_manifest(model: Mapping[str, Any]) -> ModelFamily:
    """The model that a manifest describes; raises ``TypeError`` or ``KeyError`` where it is not complete."""
    return FAMILIES[model["family"]].of_manifest(model)


def boundary_of(config: Config) -> BoundaryShape:
    """What crosses the stage boundaries of a run."""
    return FAMILIES[config.model.family].boundary(config)


def _hidden(config: Config) -> BoundaryShape:
    model = config.model
    return BoundaryShape.hidden(
        batch=config.training.micro_batch_size, tokens=model.seq_length, width=model.hidden_size
    )


def _common(config: Config) -> dict[str, Any]:
    """What every family's shape has."""
    model = config.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": config.padded_vocab_size,
        "layernorm_epsilon": model.layernorm_epsilon,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "seed": config.training.seed,
    }


def _gpt(config: Config) -> ModelFamily:
    return Gpt(GptShape(**_common(config), tied_embeddings=not config.model.untie_embeddings_and_output_weights))


def _gpt_of_manifest(model: Mapping[str, Any]) -> ModelFamily:
    return Gpt(GptShape(**{name: value for name, value in model.items() if name != "family"}))


FAMILIES: dict[str, FamilyEntry] = {
    "gpt": FamilyEntry(of_config=_gpt, of_manifest=_gpt_of_manifest, boundary=_hidden),
}
