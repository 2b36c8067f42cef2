"""The registry of model families: from a configuration, or the ``model`` of a manifest, to a family and its boundary.

Adding a family is one file in ``models/`` and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .config import Config
from .models.dynamic import DynamicFamily, DynamicSettings, SparseAttentionSettings
from .models.early_exit import LEFT, ExitSettings
from .models.gpt import Gpt, GptShape
from .models.items import HIDDEN, BoundaryShape, ModelFamily
from .models.mixture_of_depths import DepthSettings

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
    """The model of a run, with the techniques that it asks for."""
    base = FAMILIES[config.model.family].of_config(config)
    model = config.model
    settings = dynamic_settings(config)
    if settings == DynamicSettings():
        return base
    return DynamicFamily(base, settings, seed=config.training.seed, width=model.hidden_size, std=model.init_method_std)


def dynamic_settings(config: Config) -> DynamicSettings:
    """The techniques that change the model of a run."""
    depth, exits, attention = config.depth, config.exits, config.attention
    return DynamicSettings(
        depths=None
        if depth.mod_capacity is None
        else DepthSettings(capacity=depth.mod_capacity, every=depth.mod_every, aux_weight=depth.mod_router_loss_weight),
        exits=ExitSettings(
            layers=exits.exit_layers,
            loss_weight=exits.early_exit_loss_weight,
            threshold=exits.early_exit_threshold,
            measure=exits.early_exit_measure,
        )
        if exits.exit_layers
        else None,
        sparse_attention=SparseAttentionSettings(
            buckets=attention.sparse_attention_buckets, block=attention.sparse_attention_block
        )
        if attention.sparse_attention
        else None,
    )


def family_of_manifest(model: Mapping[str, Any]) -> ModelFamily:
    """The model that a manifest describes; raises ``TypeError`` or ``KeyError`` where it is not complete."""
    plain = {name: value for name, value in model.items() if name != "x_dynamic"}
    base = FAMILIES[model["family"]].of_manifest(plain)
    if "x_dynamic" not in model:
        return base
    # The seed and the spread of initial weights do not matter to a model that is read.
    settings = DynamicSettings.of_document(model["x_dynamic"])
    return DynamicFamily(base, settings, seed=0, width=model["hidden_size"], std=0.0)


def boundary_of(config: Config) -> BoundaryShape:
    """What crosses the stage boundaries of a run."""
    boundary = FAMILIES[config.model.family].boundary(config)
    if not config.exits.exit_layers:
        return boundary
    return replace(boundary, shapes={**boundary.shapes, LEFT: boundary.shapes[HIDDEN][:2]})


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
