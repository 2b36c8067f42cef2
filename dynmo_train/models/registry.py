"""From a run's configuration, or the ``model`` object of a manifest, to the model and what crosses its boundaries.

The families are registered in ``config/extensions.py``: one file and one line each, or an entry point of an outside
package. Techniques that change the model wrap the family in the order of their registry.

    --num-layers ...     config ──▶ FamilySpec.from_config   ──▶ TechniqueSpec.wrap_family ──▶ family_of
    checkpoint manifest  model  ──▶ FamilySpec.from_manifest ──▶ TechniqueSpec.wrap_stored ──▶ family_of_manifest
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..config import Config
from ..config.extensions import family_spec, technique_specs
from .families.multi_token import PREDICTION
from .families.sharded_prediction import with_predictions
from .families.vocabulary_family import VocabularyShardedFamily
from .layer_list import HIDDEN, BoundaryShape, ModelFamily
from .vocabulary.vocabulary_shards import WORDS

if TYPE_CHECKING:
    from .families.decoder import Decoder, DecoderShape

CAUSAL = ("gpt", "llama")


def family_of(config: Config) -> ModelFamily:
    """The model of a run, with the techniques that change it."""
    family = family_spec(config.model.family).from_config(config)
    for spec in technique_specs().values():
        if spec.wrap_family is not None:
            family = spec.wrap_family(config, family)
    shards = config.parallel.vocabulary_parallel
    return (
        family
        if shards is None
        else VocabularyShardedFamily(family, shards, parts=config.parallel.tensor_model_parallel_size)
    )


def family_of_manifest(model: Mapping[str, Any]) -> ModelFamily:
    """The model that a manifest describes.

    Raises:
        KeyError, TypeError: the description is not complete.
        UsageError: the package of the family is not installed.
    """
    family = family_spec(model["family"]).from_manifest(model)
    for spec in technique_specs().values():
        if spec.wrap_stored is not None:
            family = spec.wrap_stored(model, family)
    return family


def named_as(model: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """The description of the same model under another name of a decoder's shape.

    ``gpt`` and ``llama`` compute the same where their shapes are equal; each states what the other takes for granted.

    Args:
        model: the ``model`` object of a manifest.
        family: name of the family to describe it as.

    Returns:
        ``model`` itself if it has that name, or if one of both is not the name of a decoder's shape.
    """
    if model["family"] == family or {model["family"], family} - set(CAUSAL):
        return model
    plain = cast("Decoder[DecoderShape]", family_spec(model["family"]).from_manifest(model)).shape
    stated = {**plain.stated(), "tied_embeddings": plain.tied_embeddings, "family": family}
    return family_of_manifest({**model, **stated}).manifest()


def boundary_of(config: Config) -> BoundaryShape:
    """The values that may cross the stage boundaries of a run, with their shapes."""
    model, make = config.model, family_spec(config.model.family).boundary
    if make is not None:
        boundary = make(config)
    else:
        boundary = BoundaryShape.hidden(
            batch=config.training.micro_batch_size, tokens=model.seq_length, width=model.hidden_size
        )
    sharded = config.parallel.vocabulary_parallel is not None
    if model.mtp_num_layers > 1 and not sharded:
        boundary = replace(boundary, shapes={**boundary.shapes, PREDICTION: boundary.shapes[HIDDEN]})
    if sharded:
        boundary = replace(boundary, shapes={**boundary.shapes, WORDS: boundary.shapes[HIDDEN]})
        boundary = with_predictions(boundary, model.mtp_num_layers)
    for spec in technique_specs().values():
        if spec.wrap_boundary is not None:
            boundary = spec.wrap_boundary(config, boundary)
    return boundary
