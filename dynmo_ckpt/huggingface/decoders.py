"""Decoders of transformers: which one computes a model, and their configurations both ways. Pure.

A row of ``DECODERS`` states by which fields of a manifest's ``model`` an architecture differs from a Llama.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._common.document import short_repr
from ..io.errors import CorruptError, UnsupportedError, short_names
from ..maps.decoder_fields import LLAMA, decoder_fields
from .config_keys import size

Config = Mapping[str, Any]
Model = dict[str, Any]
# Fields of each type of rotary scaling: those that it must have, and those that it may have.
ROTARY_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}
# What a Mixtral's router computes: the likeliest experts, weighted by their normalized probabilities.
MIXTRAL_ROUTER: Mapping[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_experts": None,
}
NO_OR_ALL = ("none", "all")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """An architecture of transformers.

    Attributes:
        map: the table of ``maps/``.
        name: of its classes, without ``ForCausalLM``.
        activation: of its MLP, as in a manifest.
        fields: permitted values of fields; others must be those of a Llama.
        experts: whether its MLPs are experts.
        scales_embedding: whether word embeddings are multiplied by the square root of the width.
        config: further keys of its configuration.
    """

    map: str
    name: str
    activation: str = "swiglu"
    fields: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    experts: bool = False
    scales_embedding: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


_FULL: Mapping[str, Any] = {"use_sliding_window": False}
DECODERS: Mapping[str, Decoder] = {
    "llama": Decoder(map="llama", name="Llama", fields={"attention_bias": NO_OR_ALL, "mlp_bias": (False, True)}),
    "mistral": Decoder(map="llama", name="Mistral"),
    "mixtral": Decoder(map="llama", name="Mixtral", experts=True),
    "qwen2": Decoder(map="llama", name="Qwen2", fields={"attention_bias": ("qkv",)}, config=_FULL),
    "qwen3": Decoder(
        map="llama", name="Qwen3", fields={"attention_bias": NO_OR_ALL, "qk_norm": ("head",)}, config=_FULL
    ),
    "qwen3_moe": Decoder(
        map="qwen3_moe",
        name="Qwen3Moe",
        fields={"attention_bias": NO_OR_ALL, "qk_norm": ("head",)},
        experts=True,
        config={**_FULL, "decoder_sparse_step": 1},
    ),
    "gemma": Decoder(
        map="llama",
        name="Gemma",
        activation="geglu",
        fields={"attention_bias": NO_OR_ALL, "normalization": ("rmsnorm_1p",)},
        scales_embedding=True,
        config={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "olmo2": Decoder(
        map="olmo2",
        name="Olmo2",
        fields={"attention_bias": NO_OR_ALL, "norm_placement": ("post",), "qk_norm": ("projection",)},
    ),
}
SILENT = ("rotary_base", "rotary_scaling", "embedding_scale")
ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}


def decoder_kind(model: Config) -> str:
    """The ``model_type`` of transformers that computes a decoder.

    Args:
        model: the ``model`` of a manifest.

    Raises:
        UnsupportedError: transformers has no such model.
    """
    if model.get("num_experts"):
        if model.get("moe_shared_ffn_size"):
            raise UnsupportedError("transformers' Mixtral has no shared experts; use --to native")
        free = ("moe_router_pre_softmax",) if model.get("qk_norm") else ()
        if unlike := {name: value for name, value in unlike_mixtral(model).items() if name not in free}:
            fields = ", ".join(f"{name} = {value}" for name, value in unlike.items())
            raise UnsupportedError(f"transformers' Mixtral implements no router with {fields}; use --to native")
    candidates = {kind: unlike_decoder(model, decoder) for kind, decoder in DECODERS.items()}
    # In the order of the table: a plain model with a window is a Mistral, one without a Llama.
    found = [kind for kind, unlike in candidates.items() if not unlike]
    if found:
        return found[0]
    # Of the architecture that fits best.
    kind, unlike = min(candidates.items(), key=lambda item: len(item[1]))
    name, (value, needed) = next(iter(unlike.items()))
    raise UnsupportedError(f"a {DECODERS[kind].name} implements {name} = {needed} only; the model has {value}")


def unlike_decoder(model: Config, decoder: Decoder) -> dict[str, tuple[Any, Any]]:
    """The fields by which a model is not the one that an architecture computes: its value, and what it must be.

    Args:
        model: the ``model`` of a manifest.
        decoder: an architecture.
    """
    own = decoder_fields(model)
    allowed = {name: decoder.fields.get(name, (value,)) for name, value in LLAMA.items() if name not in SILENT}
    unlike: dict[str, tuple[Any, Any]] = {
        name: (own[name], " or ".join(map(str, values))) for name, values in allowed.items()
    }
    unlike = {name: pair for name, pair in unlike.items() if own[name] not in allowed[name]}
    if model["activation"] != decoder.activation:
        unlike["activation"] = (model["activation"], decoder.activation)
    scale = math.sqrt(model.get("hidden_size", 0)) if decoder.scales_embedding else 1.0
    if not math.isclose(own["embedding_scale"], scale, rel_tol=1e-6):
        unlike["embedding_scale"] = (own["embedding_scale"], scale)
    for name in ("moe_layer_pattern", "moe_ffn_hidden_size"):
        if model.get(name) is not None and decoder.name != "Qwen3Moe":
            unlike[name] = (model[name], None)
    if bool(model.get("num_experts")) != decoder.experts:
        unlike["num_experts"] = (model.get("num_experts"), "any number" if decoder.experts else None)
    window = model.get("sliding_window")
    if (window is not None and decoder.name not in ("Mistral", "Mixtral")) or (
        window is None and decoder.name == "Mistral"
    ):
        unlike["sliding_window"] = (window, "a number" if window is None else None)
    return unlike


def unlike_mixtral(model: Config) -> dict[str, Any]:
    """The fields of a model by which its router computes something else than a Mixtral's, with their values."""
    unlike = {field: model[field] for field, value in MIXTRAL_ROUTER.items() if model.get(field, value) != value}
    # Training by expert choice ends in a model that routes as a Mixtral; that by an assignment has other weights.
    if model.get("moe_routing") in ("balanced", "sinkhorn"):
        unlike["moe_routing"] = model["moe_routing"]
    return unlike


def decoder_config(kind: str, model: Config) -> dict[str, Any]:
    """The fields of a configuration, ``architectures`` included.

    Args:
        kind: ``model_type`` of transformers.
        model: the ``model`` of a manifest.
    """
    decoder, heads, own = DECODERS[kind], model["num_attention_heads"], decoder_fields(model)
    base, scaling = float(own["rotary_base"]), scaling_of(own["rotary_scaling"], model)
    config = {
        "architectures": [f"{decoder.name}ForCausalLM"],
        "hidden_act": ACTIVATIONS[decoder.activation],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("num_key_value_heads", heads),
        "head_dim": model.get("head_dim", model["hidden_size"] // heads),
        "num_hidden_layers": model["num_layers"],
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": model["layernorm_epsilon"],
        # transformers reads the first two before release 5, the third since then.
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": base},
        **decoder.config,
    }
    if kind != "qwen2":
        config["attention_bias"] = own["attention_bias"] == "all"
    if kind in ("llama", "mistral", "mixtral"):
        config["mlp_bias"] = own["mlp_bias"]
    if decoder.experts:
        config |= {"num_local_experts": model["num_experts"], "num_experts_per_tok": model.get("moe_top_k", 2)}
        config |= {"router_aux_loss_coef": model.get("moe_aux_loss_coeff", 0.0)}
    if kind == "qwen3_moe":
        inner, pattern = model.get("moe_ffn_hidden_size", model["ffn_hidden_size"]), model.get("moe_layer_pattern", [])
        config |= {"num_experts": model["num_experts"], "moe_intermediate_size": inner}
        config["mlp_only_layers"] = [layer for layer, has_experts in enumerate(pattern) if not has_experts]
        config |= {"norm_topk_prob": not model.get("moe_router_pre_softmax", False)}
    if kind in ("mistral", "mixtral"):
        config["sliding_window"] = model.get("sliding_window")
    return config


def scaling_of(scaling: Config | None, model: Config) -> dict[str, Any] | None:
    """The scaling as transformers has it, whose ``dynamic`` reads the number of positions.

    Args:
        scaling: ``rotary_scaling`` of a manifest's ``model``.
        model: the ``model``.

    Raises:
        UnsupportedError: transformers would compute it from another number of positions.
    """
    if scaling is None or scaling.get("rope_type") != "dynamic":
        return None if scaling is None else dict(scaling)
    trained, positions = scaling["original_max_position_embeddings"], model["max_position_embeddings"]
    if trained != positions:
        raise UnsupportedError(
            f"rotary scaling dynamic: transformers computes from max_position_embeddings {positions}; the model was"
            f" trained with {trained} positions"
        )
    return {name: value for name, value in scaling.items() if name != "original_max_position_embeddings"}


def decoder_model(kind: str, config: Config) -> Model:
    """The ``model`` of a manifest, without the vocabulary.

    Args:
        kind: ``model_type`` of transformers.
        config: a configuration with the defaults of transformers.

    Raises:
        CorruptError: an invalid size.
        UnsupportedError: a variant that DynMo does not implement.
    """
    decoder, heads = DECODERS[kind], size(config, "num_attention_heads")
    hidden = size(config, "hidden_size")
    positions = size(config, "max_position_embeddings")
    window = _window(config, positions)
    base, scaling = rotary_of(config, positions)
    biases = "all" if config.get("attention_bias") else "none"
    own = {name: values[0] for name, values in decoder.fields.items()}
    own |= {"attention_bias": biases if own.get("attention_bias", "none") == "none" else own["attention_bias"]}
    own |= {"mlp_bias": bool(config.get("mlp_bias", False))}
    if decoder.scales_embedding:
        own["embedding_scale"] = math.sqrt(hidden)
    model = {
        "family": "llama",
        "num_layers": size(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": size(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": config["num_key_value_heads"] or heads,
        "head_dim": config["head_dim"] or hidden // heads,
        "max_position_embeddings": positions,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "rmsnorm",
        "activation": decoder.activation,
        "position_embedding": "rotary",
        "rotary_base": base,
        "rotary_scaling": scaling,
        "tied_embeddings": config["tie_word_embeddings"],
        # Readers of versions without a field must refuse a model that has it.
        **{name: value for name, value in own.items() if value != LLAMA[name]},
    }
    if window is not None:
        model["sliding_window"] = window
    if decoder.experts:
        model |= {
            "num_experts": size(config, "num_local_experts"),
            "moe_top_k": size(config, "num_experts_per_tok"),
            "moe_aux_loss_coeff": config["router_aux_loss_coef"],
            "moe_routing": "topk",
        }
    if kind == "qwen3_moe":
        model |= _qwen3_moe(config, model["num_layers"])
    return model


def _qwen3_moe(config: Config, layers: int) -> Model:
    """Blocks with experts, the widths of MLPs and experts, and the router."""
    only, step = config["mlp_only_layers"] or [], size(config, "decoder_sparse_step")
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise CorruptError(f"config.json: mlp_only_layers must be a list of integers, found {short_repr(only)}")
    pattern = [int(layer not in only and (layer + 1) % step == 0) for layer in range(layers)]
    router = {} if config["norm_topk_prob"] else {"moe_router_pre_softmax": True}
    inner = size(config, "moe_intermediate_size")
    if all(pattern):
        # Without dense blocks the other width is not read.
        return {"ffn_hidden_size": inner, **router}
    if not any(pattern):
        raise UnsupportedError("mlp_only_layers and decoder_sparse_step: no block has experts; convert it as a qwen3")
    own = {} if inner == config["intermediate_size"] else {"moe_ffn_hidden_size": inner}
    return {**own, "moe_layer_pattern": pattern, **router}


def _window(config: Config, positions: int) -> int | None:
    """The sliding window of all layers, in tokens; None where a token attends to all earlier ones.

    Raises:
        CorruptError: an invalid size.
        UnsupportedError: the layers differ.
    """
    kinds = config.get("layer_types")
    if config.get("sliding_window") is None and kinds is None:
        return None
    found = {"sliding_attention"} if kinds is None else set(map(str, kinds if isinstance(kinds, list) else [kinds]))
    if found == {"full_attention"}:
        return None
    if found != {"sliding_attention"} or "sliding_window" not in config:
        raise UnsupportedError(
            f"layer_types = {short_repr(kinds)}: DynMo implements full_attention, or Mistral's sliding_attention, in"
            " all layers"
        )
    window = size(config, "sliding_window")
    # A window that covers all positions has no effect.
    return window if window < positions else None


def rotary_of(config: Config, positions: int) -> tuple[Any, dict[str, Any] | None]:
    """The base of the rotary frequencies, and their scaling as an object of transformers, or None.

    Args:
        config: a configuration with the defaults of transformers.
        positions: its ``max_position_embeddings``.

    Raises:
        CorruptError: values of another form.
        UnsupportedError: a type of scaling, or a field of it, that DynMo does not implement.
    """
    found = [config[name] for name in ("rope_scaling", "rope_parameters") if config[name]]
    if any(not isinstance(each, dict) for each in found):
        raise CorruptError("config.json: rope_scaling and rope_parameters must be objects")
    rope: dict[str, Any] = {}
    for each in found:
        # Older releases of transformers write `type`.
        named = ({"rope_type": each["type"]} if "type" in each else {}) | each
        differing = sorted(key for key in rope.keys() & named.keys() if rope[key] != named[key])
        if differing:
            raise CorruptError(f"config.json: rope_scaling and rope_parameters have different {short_names(differing)}")
        rope |= named
    rope.pop("type", None)
    kind = rope.pop("rope_type", "default")
    base = rope.pop("rope_theta", config["rope_theta"])
    if rope.pop("partial_rotary_factor", config["partial_rotary_factor"]) not in (None, 1):
        raise UnsupportedError("partial_rotary_factor: DynMo rotates complete heads only; it must be 1")
    if not isinstance(kind, str) or kind not in ROTARY_FIELDS:
        raise UnsupportedError(f"rope_type {short_repr(kind)}: must be one of {', '.join(ROTARY_FIELDS)}")
    if kind in ("llama3", "yarn", "dynamic"):
        rope.setdefault("original_max_position_embeddings", positions)
        if config["original_max_position_embeddings"] is not None:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    required, optional = ROTARY_FIELDS[kind]
    # transformers writes the optional fields as null where they are not given.
    rope = {name: value for name, value in rope.items() if name not in optional or value is not None}
    if kind == "dynamic" and rope["original_max_position_embeddings"] != positions:
        raise UnsupportedError(
            f"rope_type dynamic: original_max_position_embeddings must be max_position_embeddings {positions}, which"
            " transformers reads instead"
        )
    unlike = sorted((set(required) - rope.keys()) | (rope.keys() - {*required, *optional}))
    if unlike:
        raise UnsupportedError(f"rope_type {kind}: missing or unknown fields: {short_names(unlike)}")
    if not all(isinstance(value, int | float) and (value > 0 or name == "truncate") for name, value in rope.items()):
        raise CorruptError(
            f"config.json: the fields of rope_scaling must be positive numbers, found {short_repr(rope)}"
        )
    return base, None if kind == "default" else {"rope_type": kind, **rope}
