"""Groups of keys that only some decoders of transformers have, each both ways: a row of ``DECODERS`` names its groups.

``write`` gives the keys of a configuration from a model, ``fields`` the fields of a model from a configuration. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._common.document import finite_number, short_repr
from ..io.errors import CorruptError, UnsupportedError
from .config_keys import experts_per_token, size
from .decoder_rotary import FULL, SLIDING
from .deepseek_experts import expert_fields, expert_keys

Config = Mapping[str, Any]
Fields = dict[str, Any]
DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class KeyGroup:
    """Keys of a configuration that belong together.

    Attributes:
        write: from the ``model`` of a manifest and its fields with defaults, to the keys.
        fields: from a configuration with the defaults of transformers, to fields of the model.
    """

    write: Callable[[Config, Config], Fields]
    fields: Callable[[Config], Fields]


def _attention_bias(config: Config) -> Fields:
    return {"attention_bias": "all" if config["attention_bias"] else "none"}


def _write_experts(model: Config, _own: Config) -> Fields:
    return {
        "num_local_experts": model["num_experts"],
        "num_experts_per_tok": model.get("moe_top_k", 2),
        "router_aux_loss_coef": model.get("moe_aux_loss_coeff", 0.0),
    }


def _expert_fields(config: Config) -> Fields:
    return {
        "num_experts": size(config, "num_local_experts"),
        "moe_top_k": experts_per_token(config, "num_local_experts"),
        "moe_aux_loss_coeff": config["router_aux_loss_coef"],
        "moe_routing": "topk",
    }


def _write_expert_size(model: Config, _own: Config) -> Fields:
    pattern = model.get("moe_layer_pattern", [])
    return {
        "num_experts": model["num_experts"],
        "moe_intermediate_size": model.get("moe_ffn_hidden_size", model["ffn_hidden_size"]),
        "mlp_only_layers": [layer for layer, has_experts in enumerate(pattern) if not has_experts],
        "norm_topk_prob": not model.get("moe_router_pre_softmax", False),
    }


def _expert_size_fields(config: Config) -> Fields:
    """Blocks with experts, the widths of MLPs and experts, and the router."""
    only, step = config["mlp_only_layers"] or [], size(config, "decoder_sparse_step")
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise CorruptError(f"config.json: mlp_only_layers must be a list of integers, found {short_repr(only)}")
    layers = range(size(config, "num_hidden_layers"))
    pattern = [int(layer not in only and (layer + 1) % step == 0) for layer in layers]
    router = _router(config)
    inner = size(config, "moe_intermediate_size")
    if all(pattern):
        # Without dense blocks the other width is not read.
        return {"ffn_hidden_size": inner, **router}
    if not any(pattern):
        raise UnsupportedError("mlp_only_layers and decoder_sparse_step: no block has experts; convert it as a qwen3")
    own = {} if inner == config["intermediate_size"] else {"moe_ffn_hidden_size": inner}
    return {**own, "moe_layer_pattern": pattern, **router}


def _router(config: Config) -> Fields:
    return {} if config["norm_topk_prob"] else {"moe_router_pre_softmax": True}


def _deepseek_experts(config: Config) -> Fields:
    layers = size(config, "num_hidden_layers")
    fields = expert_fields("deepseek_v3", config, layers, config["first_k_dense_replace"])
    if not fields:
        raise UnsupportedError("first_k_dense_replace: no block has experts")
    return fields


def _write_deepseek_experts(model: Config, _own: Config) -> Fields:
    return {**expert_keys(model), "norm_topk_prob": model.get("moe_top_k", 2) > 1}


def _both_biases(config: Config) -> Fields:
    has_bias = bool(config["use_bias"])
    return {"attention_bias": "all" if has_bias else "none", "mlp_bias": has_bias}


def _write_both_biases(_model: Config, own: Config) -> Fields:
    if (own["attention_bias"] == "all") != own["mlp_bias"]:
        raise UnsupportedError(
            f"attention_bias {own['attention_bias']} and mlp_bias {own['mlp_bias']}: use_bias is one key for both"
        )
    return {"use_bias": own["mlp_bias"]}


def _attention_biases(config: Config) -> Fields:
    if config["attention_out_bias"] and not config["attention_bias"]:
        raise UnsupportedError("attention_out_bias = True with attention_bias = False: must be both or the latter")
    return {"attention_bias": "all" if config["attention_out_bias"] else "qkv" if config["attention_bias"] else "none"}


def _write_attention_biases(_model: Config, own: Config) -> Fields:
    return {"attention_bias": own["attention_bias"] != "none", "attention_out_bias": own["attention_bias"] == "all"}


def _qkv_bias(key: str) -> KeyGroup:
    """A key for biases of queries, keys and values."""
    return KeyGroup(
        write=lambda _model, own: {key: own["attention_bias"] == "qkv"},
        fields=lambda config: {"attention_bias": "qkv" if config[key] else "none"},
    )


def _write_rotary_dim(model: Config, own: Config) -> Fields:
    return {"rotary_dim": round(own["rotary_fraction"] * model.get("head_dim", 0))}


def _write_attention_scalar(model: Config, own: Config) -> Fields:
    heads, scale = model["num_attention_heads"], own["attention_scale"]
    scalar = model.get("head_dim", model["hidden_size"] // heads) if scale is None else round(scale**-2)
    if scale is not None and abs(scalar**-0.5 - scale) > 1e-9 * scale:
        raise UnsupportedError(f"attention_scale {scale}: query_pre_attn_scalar, its inverse square, is an integer")
    return {"query_pre_attn_scalar": scalar}


def _attention_scalar_fields(config: Config) -> Fields:
    scalar = positive_number(config, "query_pre_attn_scalar")
    width = config["head_dim"] or size(config, "hidden_size") // size(config, "num_attention_heads")
    return {"attention_scale": None if scalar == width else scalar**-0.5}


def _multiplier_fields(config: Config) -> Fields:
    """Granite's factors; that of the logits divides."""
    names = {"embedding_scale": "embedding_multiplier", "attention_scale": "attention_multiplier"}
    names |= {name: name for name in ("residual_multiplier", "logits_scaling")}
    fields: Fields = {name: positive_number(config, key) for name, key in names.items()}
    width = config["head_dim"] or size(config, "hidden_size") // size(config, "num_attention_heads")
    return fields if fields["attention_scale"] != width**-0.5 else {**fields, "attention_scale": None}


def _write_multipliers(model: Config, own: Config) -> Fields:
    width = model.get("head_dim", model["hidden_size"] // model["num_attention_heads"])
    return {
        "embedding_multiplier": own["embedding_scale"],
        "attention_multiplier": own["attention_scale"] or width**-0.5,
        "residual_multiplier": own["residual_multiplier"],
        "logits_scaling": own["logits_scaling"],
    }


def _rotated_layers(config: Config) -> list[int]:
    """SmolLM3's ``no_rope_layers``: 1 for each layer that is rotated, in spite of the name."""
    layers, rotated = size(config, "num_hidden_layers"), config["no_rope_layers"]
    if rotated is None:
        every = size(config, "no_rope_layer_interval")
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise CorruptError(f"config.json: no_rope_layers must have 0 or 1 for each of {layers} layers")
    return [int(each) for each in rotated]


def _unrotated(rotated: list[int]) -> Fields:
    return {} if all(rotated) else {"no_rope_freq": [1 - each for each in rotated]}


def _write_rotated_layers(model: Config, own: Config) -> Fields:
    return {"no_rope_layers": [1 - each for each in own["no_rope_freq"] or [0] * model["num_layers"]]}


def _full_layers_unrotated(config: Config) -> Fields:
    """EXAONE 4 with a window: layers without the window are not rotated."""
    if config["sliding_window"] is None:
        return {}
    layers = range(size(config, "num_hidden_layers"))
    types = config["layer_types"] or [periodic_pattern(config, layer) for layer in layers]
    return _unrotated([int(each == SLIDING) for each in types]) if isinstance(types, list) else {}


def _write_full_layers_unrotated(model: Config, own: Config) -> Fields:
    types = model.get("layer_types") or [SLIDING] * model["num_layers"]
    needed = {} if model.get("sliding_window") is None else _unrotated([int(each == SLIDING) for each in types])
    if own["no_rope_freq"] != needed.get("no_rope_freq"):
        raise UnsupportedError(f"no_rope_freq {short_repr(own['no_rope_freq'])}: must be 1 in layers without a window")
    return {}


def _copied(*names: str) -> KeyGroup:
    """Keys that have the names and values of the model's fields: positive numbers, or null."""
    return KeyGroup(
        write=lambda _model, own: {name: own[name] for name in names},
        fields=lambda config: {name: None if config[name] is None else positive_number(config, name) for name in names},
    )


def positive_number(config: Config, name: str) -> float:
    """A number of a configuration.

    Args:
        config: the configuration.
        name: its key.

    Raises:
        CorruptError: the value is not a positive number.
    """
    number = finite_number(config[name])
    if number is None or number <= 0:
        raise CorruptError(f"config.json: {name} must be a positive number, found {short_repr(config[name])}")
    return number


KEY_GROUPS: Mapping[str, KeyGroup] = {
    "attention_bias": KeyGroup(
        write=lambda _model, own: {"attention_bias": own["attention_bias"] == "all"}, fields=_attention_bias
    ),
    "mlp_bias": KeyGroup(
        write=lambda _model, own: {"mlp_bias": own["mlp_bias"]},
        fields=lambda config: {"mlp_bias": bool(config.get("mlp_bias", False))},
    ),
    "experts": KeyGroup(write=_write_experts, fields=_expert_fields),
    "expert_size": KeyGroup(write=_write_expert_size, fields=_expert_size_fields),
    "norm_topk_prob": KeyGroup(
        write=lambda model, _own: {"norm_topk_prob": not model.get("moe_router_pre_softmax", False)}, fields=_router
    ),
    "shared_expert": KeyGroup(
        write=lambda model, _own: {"shared_expert_intermediate_size": model["moe_shared_ffn_size"]},
        fields=lambda config: {
            "moe_shared_ffn_size": size(config, "shared_expert_intermediate_size"),
            "moe_shared_gate": True,
        },
    ),
    "deepseek_experts": KeyGroup(write=_write_deepseek_experts, fields=_deepseek_experts),
    "qkv_bias": _qkv_bias("qkv_bias"),
    "attention_qkv_bias": _qkv_bias("attention_bias"),
    "attention_out_bias": KeyGroup(write=_write_attention_biases, fields=_attention_biases),
    "use_bias": KeyGroup(write=_write_both_biases, fields=_both_biases),
    "use_qk_norm": KeyGroup(
        write=lambda _model, own: {"use_qk_norm": own["qk_norm"] is not None},
        fields=lambda config: {"qk_norm": "head" if config["use_qk_norm"] else None},
    ),
    "multipliers": KeyGroup(write=_write_multipliers, fields=_multiplier_fields),
    "no_rope_layers": KeyGroup(write=_write_rotated_layers, fields=lambda config: _unrotated(_rotated_layers(config))),
    "full_layers_without_rotation": KeyGroup(write=_write_full_layers_unrotated, fields=_full_layers_unrotated),
    "rotary_dim": KeyGroup(write=_write_rotary_dim, fields=lambda _config: {}),
    "query_pre_attn_scalar": KeyGroup(write=_write_attention_scalar, fields=_attention_scalar_fields),
    "softcaps": _copied("attn_logit_softcapping", "final_logit_softcapping"),
    "final_softcap": _copied("final_logit_softcapping"),
    "clamped_swiglu": _copied("swiglu_alpha", "swiglu_limit"),
}


@dataclass(frozen=True)
class WindowRules:
    """Which layers of an architecture have its sliding window.

    Attributes:
        everywhere: whether all have it; else ``layer_types`` decides.
        required: whether a model without one is another architecture.
        switch: whether ``use_sliding_window`` turns it on.
        pattern: the type of each layer where ``layer_types`` is not given, of a configuration and a layer's number.
        absent: the window that is written where no layer has it.
    """

    everywhere: bool = False
    required: bool = False
    switch: bool = False
    pattern: Callable[[Config, int], str] = lambda _config, _layer: FULL
    absent: int | None = DEFAULT_WINDOW

    def fields(self, config: Config, layers: int, positions: int) -> Fields:
        """``sliding_window`` and ``layer_types`` of a model, where it has them.

        Args:
            config: a configuration with the defaults of transformers.
            layers: number of layers.
            positions: number of positions.

        Raises:
            CorruptError: an invalid size or list.
            UnsupportedError: a layer of another type.
        """
        is_on = not self.switch or bool(config["use_sliding_window"])
        if self.everywhere:
            if not is_on or config["sliding_window"] is None:
                return {}
            window = size(config, "sliding_window")
            # A window that covers all positions has no effect.
            return {"sliding_window": window} if window < positions else {}
        types = config["layer_types"]
        if types is None:
            has_window = is_on and config["sliding_window"] is not None
            types = [self.pattern(config, layer) if has_window else FULL for layer in range(layers)]
        if not isinstance(types, list) or len(types) != layers:
            raise CorruptError(f"config.json: layer_types must have {layers} entries, found {short_repr(types)}")
        if any(each not in (FULL, SLIDING) for each in types):
            raise UnsupportedError(f"layer_types {short_repr(types)}: must be {FULL} or {SLIDING}")
        if SLIDING not in types:
            return {}
        if not is_on:
            raise UnsupportedError(f"layer_types has {SLIDING}: use_sliding_window must be true")
        found = {"sliding_window": size(config, "sliding_window")}
        return found if FULL not in types else {**found, "layer_types": types}

    def write(self, model: Config) -> Fields:
        """The keys of a configuration, from the ``model`` of a manifest."""
        window, layers = model.get("sliding_window"), model["num_layers"]
        if self.everywhere:
            own = {"use_sliding_window": window is not None} if self.switch else {}
            return {**own, "sliding_window": window}
        types = model.get("layer_types") or [FULL if window is None else SLIDING] * layers
        keys: Fields = {"sliding_window": window or self.absent, "layer_types": types}
        if self.switch:
            # Releases of transformers without layer_types read the number of layers before the first window.
            first = types.index(SLIDING) if SLIDING in types else layers
            keys |= {"use_sliding_window": window is not None, "max_window_layers": first}
        return keys

    def unlike(self, model: Config) -> tuple[str, Any, Any] | None:
        """A field by which a model has other windows: its name, its value, and what it must be; None where it has not.

        Args:
            model: the ``model`` of a manifest.
        """
        if self.required and model.get("sliding_window") is None:
            return "sliding_window", None, "a number"
        if self.everywhere and model.get("layer_types") is not None:
            return "layer_types", model["layer_types"], None
        return None


def periodic_pattern(config: Config, layer: int) -> str:
    """The type of a layer in Gemma 3 and OLMo 3: every ``sliding_window_pattern``-th is full."""
    every = size(config, "sliding_window_pattern")
    return SLIDING if (layer + 1) % every else FULL


def qwen_pattern(config: Config, layer: int) -> str:
    """Qwen 2's and 3's type of a layer: sliding from ``max_window_layers`` on."""
    return SLIDING if layer >= config["max_window_layers"] else FULL


def smollm3_pattern(config: Config, layer: int) -> str:
    """SmolLM3's type of a layer: those without rotation are sliding."""
    return FULL if _rotated_layers(config)[layer] else SLIDING


def qwen2_moe_pattern(config: Config, layer: int) -> str:
    """Qwen2-MoE's type of a layer: every second before ``max_window_layers`` is sliding."""
    return SLIDING if layer % 2 == 0 and layer < config["max_window_layers"] else FULL
