"""The options of the model in a checkpoint, for ``--use-checkpoint-args``; they are the inverse of ``from_config``.

::

    --load ─▶ model object of a manifest ─▶ from_manifest ─▶ shape ─▶ model_options
               └ of another project: by dynmo-ckpt info

A shape is complete, so that no option depends on the defaults of a family. What has no option is found when the weights
are loaded: ``check_same_model`` compares every field.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..._common.document import parse_json
from ..._common.errors import UsageError
from ...config.extensions import family_spec
from ...config.schema import ModelConfig
from ...data.tokenizer import FOLDER_NAMES, TokenizerFiles
from ...formats.checkpoint import CheckpointError, find_checkpoint, open_checkpoint
from ...launch.find_command import program_path
from ...models.experts.moe_dispatch import PROBS
from ...models.experts.moe_shape import SINKHORN, TOPK, MoeShape
from ...models.families.bert import BertShape
from ...models.families.decoder import DecoderShape
from ...models.families.family import STATED
from ...models.families.ict import IctShape
from ...models.families.t5 import T5Shape
from ...models.registry import CAUSAL
from .load_checkpoint import foreign_kind, has_native_checkpoint
from .model_keys import TRAINING_KEYS, WITHOUT_WEIGHTS

TOKENIZER_OPTIONS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
# What belongs to the training, not to the model: a checkpoint of the Hub has its author's.
_TRAINING_NAMES = frozenset({*TRAINING_KEYS, "moe_expert_capacity_factor"})
# The options that describe a model.
NAMES = frozenset(each.name for each in fields(ModelConfig)) - _TRAINING_NAMES


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of the checkpoint of a run.

    Attributes:
        values: option name to value, of the model and of the tokenizer.
        of_training: the options of the training that the checkpoint records, which are not taken, as text.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    of_training: tuple[str, ...] = ()


def checkpoint_options(path: Path, family: str, given: Mapping[str, Any]) -> CheckpointOptions:
    """The options of the model and of the tokenizer in the newest checkpoint at ``path``; empty where there is none.

    A checkpoint of another project is not converted: ``dynmo-ckpt info`` reads its configuration only.

    Args:
        path: value of ``--load``.
        family: family of the run.
        given: option name to value of the options that the run has. If one of them names a tokenizer, that of the
            checkpoint is left out; so is the number of its positions for longer samples, if positions have no weights.

    Raises:
        UsageError: the checkpoint cannot be read or is of another family, or ``dynmo-ckpt`` is not installed.
    """
    if has_native_checkpoint(path):
        try:
            found = open_checkpoint(find_checkpoint(path, weights_only=True))
        except CheckpointError as error:
            raise UsageError(f"--use-checkpoint-args: {error}") from error
        model, folder = found.manifest["model"], found.directory / "tokenizer"
    elif kind := foreign_kind(path):
        model, folder = _foreign_model(path, kind), path
    else:
        return CheckpointOptions()
    stored = model["family"]
    # The names of decoders are interchangeable: all of their options are stated.
    if stored != family and {stored, family} - set(CAUSAL):
        raise UsageError(f"--use-checkpoint-args: {path} is a {stored}: give pretrain {stored}")
    has_tokenizer = any(name in given for name in TOKENIZER_OPTIONS)
    tokenizer = {} if has_tokenizer else _tokenizer_options(folder)
    values = {**model_options(model), **(_dropout(model) if stored != family else {}), **tokenizer}
    is_free = values.get("position_embedding_type") in WITHOUT_WEIGHTS
    if is_free and (given.get("seq_length") or 0) > values["max_position_embeddings"]:
        del values["max_position_embeddings"]
    return CheckpointOptions(values, training_options(model))


def training_options(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The options of the training that the description of a model has."""
    stated = ((flag, model.get(key)) for key, flag in TRAINING_KEYS.items())
    return tuple(f"{flag} {value}" for flag, value in stated if value not in (None, 0, PROBS))


def _dropout(model: Mapping[str, Any]) -> dict[str, float]:
    """The dropout that the name of a model implies, for a run of another name."""
    shape = _shape(model)
    return {"hidden_dropout": shape.hidden_dropout, "attention_dropout": shape.attention_dropout}


def _tokenizer_options(folder: Path) -> dict[str, Any]:
    """The options that name the files of the tokenizer in a folder; empty without one."""
    try:
        named = TokenizerFiles.of_folder(folder)
    except UsageError:
        return {}
    flags = FOLDER_NAMES[named.kind]
    files = {flags[name].removeprefix("--").replace("-", "_"): str(path) for name, path in named.files.items()}
    return {"tokenizer_type": named.kind, **files}


def _foreign_model(path: Path, kind: str) -> Mapping[str, Any]:
    program = program_path("dynmo-ckpt")
    if program is None:
        raise UsageError(
            f"--use-checkpoint-args: {path} is {kind}; dynmo-ckpt, which reads it, is not installed next to dynmo-train"
            " nor on PATH; run: pip install 'dynmo-toolkit[ckpt]'"
        )
    command = [program, "info", str(path), "--format", "json"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        cause = done.stderr.strip().removeprefix("dynmo-ckpt: error: ") or f"exit code {done.returncode}"
        raise UsageError(f"--use-checkpoint-args: {path}: dynmo-ckpt cannot read it: {cause}")
    document = parse_json(done.stdout)
    found = document.get("model") if isinstance(document, dict) else None
    if not isinstance(found, dict):
        raise UsageError(f"--use-checkpoint-args: {path}: dynmo-ckpt states no model of {kind}; update it")
    return found


def model_options(model: Mapping[str, Any]) -> dict[str, Any]:
    """The option values, by name, of a run whose model has the description ``model``.

    The length of samples, dropout and the initial weights are not stored, nor are options of dynamic techniques. What
    belongs to the training of experts (``TRAINING_KEYS``) is not taken.

    Args:
        model: the ``model`` object of a manifest.

    Raises:
        UsageError: the description is not complete, or is of an installed family, whose options are not known here.
    """
    try:
        shape = _shape(model)
    except (KeyError, TypeError) as error:
        raise UsageError(f"--use-checkpoint-args: the checkpoint does not describe its model: {error}") from error
    if isinstance(shape, BertShape):
        own = _bert(shape)
    elif isinstance(shape, IctShape):
        own = _ict(shape)
    elif isinstance(shape, T5Shape):
        own = _t5(shape)
    elif isinstance(shape, DecoderShape):
        own = _decoder(shape)
    else:
        raise UsageError(
            f"--use-checkpoint-args: not possible for the family {model['family']} of an installed package; give the"
            " options of the run again, from its run.json"
        )
    found = {**{name: getattr(shape, name) for name in STATED if name in NAMES}, **own}
    # The default of every option that may be None is None.
    return {name: value for name, value in found.items() if value is not None}


def _shape(model: Mapping[str, Any]) -> Any:
    """The shape of a model, without its dynamic techniques; None of an installed family without one."""
    described = {"padded_vocab_size": model.get("vocab_size"), **model}
    return getattr(family_spec(model["family"]).from_manifest(described), "shape", None)


def _bert(shape: BertShape) -> dict[str, Any]:
    return {"num_layers": shape.num_layers, "bert_no_binary_head": not shape.num_tokentypes}


def _ict(shape: IctShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "biencoder_projection_dim": shape.projection_size,
        "biencoder_shared_query_context_model": shape.shared_towers,
    }


def _t5(shape: T5Shape) -> dict[str, Any]:
    relative = {
        "relative_attention_num_buckets": shape.relative_buckets,
        "relative_attention_max_distance": shape.relative_max_distance,
    }
    return {
        "num_layers": shape.num_encoder_layers,
        "decoder_num_layers": shape.num_decoder_layers,
        "kv_channels": shape.head_dim,
        "position_embedding_type": shape.position_embedding,
        **(relative if shape.is_relative else {}),
    }


def _decoder(shape: DecoderShape) -> dict[str, Any]:
    """Fields that have the names of options, and those that options state in another form."""
    parts = [part.manifest() for part in (shape.latent, shape.moe) if part is not None]
    stated = {name: value for part in (shape.stated(), *parts) for name, value in part.items() if name in NAMES}
    found: dict[str, Any] = {
        **stated,
        "num_layers": shape.num_layers,
        "position_embedding_type": shape.position_embedding,
        "rotary_percent": shape.rotary_fraction,
        "attention_window": shape.sliding_window,
        "layer_types": None if shape.layer_types is None else ",".join(shape.layer_types),
        "no_rope_freq": None if shape.no_rope_freq is None else str(list(shape.no_rope_freq)).replace(" ", ""),
        "qk_norm": shape.qk_norm or "none",
        "add_bias_linear": shape.attention_bias == "all",
        "add_qkv_bias": shape.attention_bias == "qkv",
        "rotary_scaling": None if shape.rotary_scaling is None else json.dumps(shape.rotary_scaling),
        "untie_embeddings_and_output_weights": not shape.tied_embeddings,
        "mtp_num_layers": shape.mtp_num_layers,
    }
    if shape.latent is None:
        found |= {"num_query_groups": shape.groups, "kv_channels": shape.head_width}
    else:
        found |= {"multi_latent_attention": True}
    return found if shape.moe is None else found | _experts(shape.moe)


def _experts(moe: MoeShape) -> dict[str, Any]:
    # The balance of the logits is a part of the choice; the losses belong to the training.
    sinkhorn = {"moe_router_load_balancing_type": SINKHORN} if moe.routing == SINKHORN else {}
    return {
        "moe_router_topk": moe.top_k,
        "moe_routing": TOPK if moe.routing == SINKHORN else moe.routing,
        **sinkhorn,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_layer_freq": "1" if moe.layers is None else str(list(moe.layers)).replace(" ", ""),
    }
