"""Keeps the original ``config.json`` of a model, and restores it on export to a Hugging Face directory. Pure.

The ``source`` of a manifest has ``config.json`` and ``generation_config.json`` as they were read. So token ids,
dropouts, labels and generation settings survive, for which the ``model`` of a manifest has no fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._common.document import encode_json, parse_json, short_repr
from .._common.errors import DynmoError
from ..io.errors import CorruptError
from ..maps.decoder_fields import DECODERS, family_fields
from .config_keys import irrelevant_keys, key_table
from .decoders import MIXTRAL_ROUTER
from .models import hf_model

# Remote code, and properties of the original files.
DROPPED_KEYS = ("auto_map", "_name_or_path", "name_or_path", "_commit_hash")
CLASS_NAMES_KEY = "x_class_names"
DTYPE_KEYS = ("dtype", "torch_dtype")
NOT_IN_CONFIG = (
    "padded_vocab_size",
    "moe_seq_aux_loss_coeff",
    "moe_global_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_capacity_factor",
    "moe_eval_capacity_factor",
    "moe_min_capacity",
    "moe_token_drop_policy",
    # By the tensors of a file: transformers writes a number also where it leaves the layers out.
    "mtp_num_layers",
)
# Keys that change no logit, but belong to this model: the conversion computes them.
COMPUTED = (*DTYPE_KEYS, "model_type", "architectures")
# vLLM reads them, the classes of transformers do not and leave them out.
ROUTER_KEYS = ("scoring_func", "topk_method")
LABEL_KEYS = ("num_labels", "id2label", "label2id")


def source_of(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ``source`` of a manifest.

    Args:
        config: the contents of ``config.json``.
        generation: the contents of ``generation_config.json``, or None.

    Raises:
        CorruptError: a manifest cannot store them: a number is not finite, or they are nested too deeply.
    """
    source = {
        "format": "huggingface",
        "config": dict(config),
        "generation_config": None if generation is None else dict(generation),
    }
    try:
        parse_json(encode_json({"manifest": {"source": source}}))
    except ValueError as error:
        raise CorruptError(f"config.json or generation_config.json: {error}") from error
    return source


def export_config(
    source: Mapping[str, Any] | None, model: Mapping[str, Any], computed: dict[str, Any]
) -> dict[str, Any]:
    """The ``config.json`` to write: that of ``source`` where it describes ``model``, else the keys that still apply.

    Args:
        source: the ``source`` of the manifest; None where the model does not come from a Hugging Face directory.
        model: the current ``model`` of the manifest.
        computed: the configuration computed from ``model``; its weight type is always used.
    """
    if source is None:
        return computed
    config = {key: value for key, value in source["config"].items() if key not in DROPPED_KEYS}
    if _describes(config, model):
        present = {key: computed["torch_dtype"] for key in DTYPE_KEYS if key in config}
        if model.get("mtp_num_layers"):
            present["num_nextn_predict_layers"] = model["mtp_num_layers"]
        stated = {key: computed[key] for key in ROUTER_KEYS if key in computed}
        return {"architectures": computed["architectures"], **stated, **config, **present}
    table = key_table()
    kind = table["model_types"].get(str(config.get("model_type")), {"irrelevant": {}, "mapped": {}})
    applicable = {*irrelevant_keys(table["every"]), *irrelevant_keys(kind)} - {*COMPUTED, *kind["mapped"]}
    if "num_classes" in model:
        applicable -= {*LABEL_KEYS}  # of the head of the source, which the model has replaced
    return {**computed, **{key: value for key, value in config.items() if key in applicable}}


def with_class_names(config: dict[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the class names of a classifier, where the training run recorded them.

    They replace those of ``config``, which may belong to the model from which the run started.
    """
    names = _class_names(manifest)
    if not names:
        return config
    config = {key: value for key, value in config.items() if key not in LABEL_KEYS}
    labels = {
        "id2label": {str(at): name for at, name in enumerate(names)},
        "label2id": dict(zip(names, range(len(names)), strict=True)),
    }
    return {**config, **labels}


def _class_names(manifest: Mapping[str, Any]) -> list[str]:
    """The unique class names of the model of a manifest; empty where none are recorded."""
    names, model = manifest.get(CLASS_NAMES_KEY), manifest["model"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    fits = model.get("task_head") == "classification" and len(names) == len(set(names)) == model["num_classes"]
    return names if fits else []


def export_generation_config(source: Mapping[str, Any] | None, computed: dict[str, Any]) -> dict[str, Any] | None:
    """The ``generation_config.json`` to write: that of ``source``, or None where the source has none."""
    if source is None:
        return computed
    generation: dict[str, Any] | None = source["generation_config"]
    return generation


def unlike_config(config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """How a configuration differs from a model: fields with both values; empty where it describes the model."""
    try:
        described = stated_fields(hf_model(config, 1, ignored=("*",)))
    except DynmoError as error:
        return str(error)
    own = stated_fields(model)
    unlike = [name for name in own | described if own.get(name) != described.get(name)]
    return "; ".join(f"{name} {short_repr(described.get(name))}, not {short_repr(own.get(name))}" for name in unlike)


def _describes(config: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether a configuration describes a model; the padding of the vocabulary is ignored."""
    # Unknown keys were refused, or ignored by an option, when the source was read.
    return not unlike_config(config, model)


def stated_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model with the defaults of the format, without those that a configuration does not have.

    Args:
        model: the ``model`` of a manifest.
    """
    heads = model["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": model["hidden_size"] // heads,
        **family_fields(model["family"]),
        "sliding_window": None,
        "relative_buckets": 32,
        "relative_max_distance": 128,
        "num_tokentypes": 0,
        "binary_head": False,
        "moe_routing": "topk",
        "rotary_interleaved": True,
        **MIXTRAL_ROUTER,
    }
    # The names of decoders are interchangeable where all of their fields are stated.
    name = {"family": "decoder"} if model["family"] in DECODERS else {}
    return {key: value for key, value in {**defaults, **model, **name}.items() if key not in NOT_IN_CONFIG}
