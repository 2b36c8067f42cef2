"""The registry of model families: from a configuration, or the ``model`` of a manifest, to a family and its boundary.

Adding a family is one file in ``models/`` and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..config import Config
from .bert import Bert, BertShape
from .bert_tasks import BertTask, task_of_manifest
from .early_exit import LEFT, ExitSettings
from .gpt import Gpt, GptShape
from .ict import CONTEXT, EMBEDDED, QUERY, Ict, IctShape
from .layer_list import HIDDEN, LOSS, BoundaryShape, ModelFamily
from .llama import Llama, LlamaShape
from .mixture_of_depths import DepthSettings
from .moe import MoeShape
from .t5 import DECODER, ENCODER, T5, T5Shape
from .technique_blocks import DynamicFamily, DynamicSettings, SparseAttentionSettings

CAUSAL = ("gpt", "llama")


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


def _moe(config: Config) -> MoeShape | None:
    model = config.model
    if model.num_experts is None:
        return None
    return MoeShape(
        num_experts=model.num_experts,
        top_k=model.moe_router_topk,
        aux_loss_coeff=model.moe_aux_loss_coeff,
        z_loss_coeff=model.moe_z_loss_coeff,
        capacity_factor=model.moe_expert_capacity_factor,
        routing=model.moe_routing,
    )


def _gpt(config: Config) -> ModelFamily:
    tied = not config.model.untie_embeddings_and_output_weights
    return Gpt(GptShape(**_common(config), tied_embeddings=tied, moe=_moe(config)))


def _llama(config: Config) -> ModelFamily:
    model = config.model
    scaling = None
    if model.use_rope_scaling:
        # Llama 3.1's own values; only the factor differs between its sizes.
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return Llama(
        LlamaShape(
            **_common(config),
            num_key_value_heads=model.num_query_groups,
            head_dim=model.kv_channels,
            rotary_base=model.rotary_base,
            rotary_scaling=scaling,
            tied_embeddings=not model.untie_embeddings_and_output_weights,
            moe=_moe(config),
        )
    )


def _bert(config: Config) -> ModelFamily:
    binary = not config.model.bert_no_binary_head
    return Bert(BertShape(**_common(config), binary_head=binary, num_tokentypes=2 if binary else 0))


def _ict(config: Config) -> ModelFamily:
    given = config.ict
    return Ict(
        IctShape(
            **_common(config),
            projection_size=given.biencoder_projection_dim,
            shared_towers=given.biencoder_shared_query_context_model,
            scaled_scores=given.retriever_score_scaling,
            top_k=given.top_k,
        )
    )


def _ict_boundary(config: Config) -> BoundaryShape:
    model, batch = config.model, config.training.micro_batch_size
    stream = (batch, model.seq_length, model.hidden_size)
    embedded = (batch, config.ict.biencoder_projection_dim or model.hidden_size)
    return BoundaryShape(shapes={QUERY: stream, EMBEDDED: embedded, CONTEXT: stream, LOSS: ()})


def _t5(config: Config) -> ModelFamily:
    model = config.model
    common = _common(config)
    relative = model.position_embedding_type == "relative"
    return T5(
        T5Shape(
            **{name: value for name, value in common.items() if name != "num_layers"},
            num_encoder_layers=model.num_layers,
            num_decoder_layers=model.decoder_num_layers,
            head_dim=model.kv_channels,
            position_embedding="relative" if relative else "learned",
            relative_buckets=model.relative_attention_num_buckets,
            relative_max_distance=model.relative_attention_max_distance,
            activation="relu" if relative else "gelu",
        )
    )


def _t5_boundary(config: Config) -> BoundaryShape:
    model, batch = config.model, config.training.micro_batch_size
    return BoundaryShape(
        shapes={
            ENCODER: (batch, model.seq_length, model.hidden_size),
            DECODER: (batch, model.decoder_seq_length, model.hidden_size),
            LOSS: (),
        }
    )


def _shape_of_manifest(shape: type, model: Mapping[str, Any]) -> Any:
    """The fields of ``shape`` that the manifest's ``model`` object states."""
    names = {field.name for field in fields(shape)}
    given = {name: value for name, value in model.items() if name in names}
    return shape(**given, **({"moe": MoeShape.of_manifest(model)} if "moe" in names else {}))


def _bert_of_manifest(model: Mapping[str, Any]) -> ModelFamily:
    shape, head = _shape_of_manifest(BertShape, model), task_of_manifest(model)
    return Bert(shape) if head is None else BertTask(shape, head)


FAMILIES: dict[str, FamilyEntry] = {
    "gpt": FamilyEntry(
        of_config=_gpt, of_manifest=lambda model: Gpt(_shape_of_manifest(GptShape, model)), boundary=_hidden
    ),
    "llama": FamilyEntry(
        of_config=_llama, of_manifest=lambda model: Llama(_shape_of_manifest(LlamaShape, model)), boundary=_hidden
    ),
    "ict": FamilyEntry(
        of_config=_ict, of_manifest=lambda model: Ict(_shape_of_manifest(IctShape, model)), boundary=_ict_boundary
    ),
    "bert": FamilyEntry(of_config=_bert, of_manifest=_bert_of_manifest, boundary=_hidden),
    "t5": FamilyEntry(
        of_config=_t5, of_manifest=lambda model: T5(_shape_of_manifest(T5Shape, model)), boundary=_t5_boundary
    ),
}
