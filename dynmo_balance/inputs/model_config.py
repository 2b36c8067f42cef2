"""Model shapes from configurations: Hugging Face's ``config.json``, and DynMo's ``manifest.json`` and ``run.json``.

A configuration is accepted only if each of its keys is known: *read* (the shape depends on it), *irrelevant* (no cost
depends on it: numerics, tokens, dropouts, file formats), or *neutral* (null, false or empty). Any other key is refused
by name, and so is an unknown family: there is no fallback to a plain GPT. A missing key has the default of
transformers' configuration class, if the table has one.

Refusing is deliberate. A new key is usually a new part of the architecture, and a plan from a wrong shape looks as
plausible as one from the right shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .._common.document import MAX_LAYERS, MAX_SIZE, MAX_TABLE_BYTES, read_any_json, short_repr
from .._common.errors import UsageError
from ..costs.model_spec import LatentAttention, ModelSpec
from .model_families import FAMILIES, IRRELEVANT, NEUTRAL, T5_NAMES, Config, Family


def _sizes(config: Config, family: Family, source: str) -> dict[str, int]:
    """The sizes that every model has, validated."""
    values: dict[str, Any] = {name: config.get(key) for name, key in family.names.items()}
    # transformers' own rules for null: GPT-2's MLP is four times the model's width, T5's decoder has the depth of its
    # encoder. A configuration without a maximum length gets 1024, which ``--sequence-length`` replaces.
    if family.names["ffn"] == "n_inner" and values["ffn"] is None and isinstance(values["hidden"], int):
        values["ffn"] = 4 * values["hidden"]
    if family.names is T5_NAMES and values["layers"] is None:
        values["layers"] = config.get("num_layers")
    if values["sequence"] is None:
        values["sequence"] = 1024
    missing = [f"{name} ({family.names[name]})" for name, value in values.items() if value is None]
    if missing:
        raise UsageError(f"{source}: missing {', '.join(missing)}")
    _check_whole(values, source)
    return values


def _check_whole(values: Mapping[str, Any], source: str) -> None:
    # ``type`` and not ``isinstance``: JSON's true is an int in Python.
    wrong = [name for name, value in values.items() if type(value) is not int or value < 1]
    if wrong:
        raise UsageError(f"{source}: {', '.join(wrong)} must be positive integers")
    large = [
        f"{name} {value}" for name, value in values.items() if value > (MAX_LAYERS if name == "layers" else MAX_SIZE)
    ]
    if large:
        raise UsageError(
            f"{source}: {', '.join(large)}: must be at most {MAX_LAYERS:,} layers, and {MAX_SIZE:,} otherwise"
        )


def _refuse_unknown(config: Config, family: Family, name: str, source: str) -> None:
    """Refuse keys that are neither read nor irrelevant, unless their value is neutral."""
    read = {*family.names.values(), *family.defaults}
    unknown = [
        f"{key} {short_repr(value)}"
        for key, value in config.items()
        if key not in read
        and key not in IRRELEVANT
        and value not in NEUTRAL.get(key, ())
        and value not in (None, False, "", [], {})
    ]
    if unknown:
        raise UsageError(
            f"{source}: {', '.join(unknown)}: its effect on a {name} is not modelled;"
            " remove it if no cost depends on it"
        )


def from_hugging_face(config: Config, name: str, source: str) -> ModelSpec:
    """The shape of a Hugging Face configuration.

    Raises:
        UsageError: the family or a key is not modelled, or a size is missing or not a positive integer.
    """
    family = FAMILIES[name]
    _refuse_unknown(config, family, name, source)
    whole = {**family.defaults, **config}
    sizes = _sizes(whole, family, source)
    try:
        more = family.more(whole)
        fields: dict[str, Any] = {
            "kv_heads": int(whole.get("num_key_value_heads") or sizes["heads"]),
            "head_size": int(whole.get("head_dim") or sizes["hidden"] // sizes["heads"]),
            **family.shape,
            **more,
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{source}: a size of the {name} is not an integer: {error}") from error
    tied = whole["tie_word_embeddings"]
    spec = ModelSpec(family=name, tied=True if tied is None else bool(tied), **{**sizes, **fields})
    _check_spec(spec, source)
    return spec


def _check_spec(spec: ModelSpec, source: str) -> None:
    other = [
        f"{each.name} {short_repr(getattr(spec, each.name))}"
        for each in fields(spec)
        if each.type == "int" and type(getattr(spec, each.name)) is not int
    ]
    if other:
        raise UsageError(f"{source}: {', '.join(other)}: must be integers")
    if (
        max(spec.encoder_layers, spec.layers) > MAX_LAYERS
        or max(spec.experts, spec.head_size, spec.expert_ffn) > MAX_SIZE
    ):
        raise UsageError(f"{source}: must be at most {MAX_LAYERS:,} layers, and {MAX_SIZE:,} otherwise")
    counts = (spec.kv_heads, spec.head_size, spec.experts, spec.experts_per_token, spec.sparse_step)
    if min(counts) < 1 or spec.experts_per_token > spec.experts or spec.heads % spec.kv_heads:
        raise UsageError(
            f"{source}: heads {spec.heads}, key-value heads {spec.kv_heads} of size {spec.head_size} and"
            f" {spec.experts_per_token} of {spec.experts} experts per token are inconsistent; check the configuration"
        )


NATIVE_FAMILIES = ("gpt", "llama", "bert", "t5")
_OWN_TECHNIQUES = ("mod_capacity", "early_exit_layers", "sparse_attention")


def _first_value(config: Config, *keys: str, default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def from_dynmo_train(config: Config, name: str, source: str) -> ModelSpec:
    """The shape of a model of ``dynmo-train``, from a manifest or from the options of a run.

    Raises:
        UsageError: the model has a dynamic technique inside its layers, or a size is missing or invalid.
    """
    # The two documents name the same sizes differently: first the key of the manifest, then the option of the run.
    used = [key for key in _OWN_TECHNIQUES if config.get(key)]
    if used:
        raise UsageError(f"{source}: {', '.join(used)}: not modelled; remove them and use --technique")
    encoder = _first_value(config, "num_encoder_layers", "num_layers") if name == "t5" else 0
    layers = _first_value(config, "num_decoder_layers", "decoder_num_layers", "num_layers")
    sizes = {
        "layers": layers,
        "hidden": config.get("hidden_size"),
        "heads": config.get("num_attention_heads"),
        "vocabulary": _first_value(config, "padded_vocab_size", "vocab_size"),
    }
    missing = [f"{key}" for key, value in sizes.items() if value is None]
    if missing:
        raise UsageError(f"{source}: missing {', '.join(missing)}")
    counts = ("num_experts", "moe_top_k", "moe_router_topk", "sliding_window", "attention_window")
    _check_whole({**sizes, **{key: config[key] for key in counts if config.get(key) is not None}}, source)
    llama, bert = name == "llama", name == "bert"
    normalization = _first_value(config, "normalization", default="rmsnorm" if llama else "layernorm")
    positions = _first_value(
        config, "position_embedding", "position_embedding_type", default="rotary" if llama else "learned"
    )
    rows = _first_value(config, "max_position_embeddings", "seq_length", default=1024)
    experts = _first_value(config, "num_experts", default=1)
    binary = _first_value(config, "binary_head", default=bert and not config.get("bert_no_binary_head"))
    untied = _first_value(config, "untie_embeddings_and_output_weights", default=llama)
    # A run has options in place of the manifest's fields.
    is_biased = bool(_first_value(config, "add_bias_linear", default=not llama))
    stated = "all" if is_biased else "qkv" if config.get("add_qkv_bias") else "none"
    attention_bias = _first_value(config, "attention_bias", default=stated)
    biases = normalization == "layernorm" and name != "t5"
    window = _first_value(config, "sliding_window", "attention_window")
    spec = ModelSpec(
        family=name,
        layers=layers,
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=_first_value(config, "num_key_value_heads", "num_query_groups", default=sizes["heads"]),
        head_size=_first_value(config, "head_dim", "kv_channels", default=sizes["hidden"] // sizes["heads"]),
        ffn=_first_value(config, "ffn_hidden_size", default=4 * sizes["hidden"]),
        vocabulary=_padded_vocabulary(config, sizes["vocabulary"], source),
        sequence=_first_value(config, "seq_length", "max_position_embeddings", default=1024),
        gated=llama or config.get("activation") in ("swiglu", "geglu", "clamped_swiglu", "quick_geglu"),
        experts=experts,
        experts_per_token=min(experts, _first_value(config, "moe_top_k", "moe_router_topk", default=2)),
        tied=_first_value(config, "tied_embeddings", default=not untied),
        encoder_layers=encoder,
        positions=rows if positions == "learned" else 0,
        token_types=_first_value(config, "num_tokentypes", default=2 if bert and binary else 0),
        relative_buckets=(
            _first_value(config, "relative_buckets", "relative_attention_num_buckets", default=32)
            if positions == "relative"
            else 0
        ),
        window=None if window is None else int(window),
        local_layers=() if window is None else _local_layers(config, source),
        sinks=bool(config.get("attention_sinks")),
        router_biases=bool(config.get("moe_router_bias")),
        block_norms=2 if config.get("norm_placement") == "sandwich" else 1,
        head_transform=bert,
        pooler=bool(binary) and bert,
        norm_biases=biases,
        query_biases=name != "t5" and attention_bias != "none",
        output_biases=name != "t5" and attention_bias == "all",
        mlp_biases=name != "t5" and bool(_first_value(config, "mlp_bias", default=is_biased)),
        expert_biases=name != "t5" and bool(_first_value(config, "mlp_bias", default=is_biased)),
    )
    spec = replace(spec, **_own_blocks(config, layers, source))
    _check_spec(spec, source)
    return spec


_LATENT = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_TERM = re.compile(r"\s*\[([01](?:\s*,\s*[01])*)\](?:\s*\*\s*(\d{1,6}))?\s*")


def _own_blocks(config: Config, layers: int, source: str) -> dict[str, Any]:
    """Fields of blocks that not all models have: experts in some of them, their width, latent attention."""
    widths = {"expert_ffn": "moe_ffn_hidden_size", "shared_ffn": "moe_shared_ffn_size"}
    found: dict[str, Any] = {field: config[key] for field, key in widths.items() if config.get(key) is not None}
    if config.get("moe_shared_expert_intermediate_size") is not None:
        found["shared_ffn"] = config["moe_shared_expert_intermediate_size"]
    pattern = config.get("moe_layer_pattern")
    if pattern is None:
        pattern = _pattern_of(str(_first_value(config, "moe_layer_freq", default="1")), layers)
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise UsageError(f"{source}: the blocks with experts must be 0 or 1 for each of {layers} blocks")
    found["dense_only"] = tuple(layer for layer, has_experts in enumerate(pattern) if not has_experts)
    if config.get("multi_latent_attention", config.get("kv_lora_rank") is not None):
        sizes = {key: config.get(key) for key in _LATENT}
        query = {"q_lora_rank": config["q_lora_rank"]} if config.get("q_lora_rank") is not None else {}
        _check_whole({**sizes, **query}, source)
        bias = _first_value(config, "attention_bias", default="all" if config.get("add_bias_linear") else "none")
        found["latent"] = LatentAttention(
            query_rank=config.get("q_lora_rank") or 0,
            kv_rank=config["kv_lora_rank"],
            nope=config["qk_head_dim"],
            rope=config["qk_pos_emb_head_dim"],
            value=config["v_head_dim"],
            biases=bias == "all",
        )
        found["head_size"] = config["qk_head_dim"] + config["qk_pos_emb_head_dim"]
        found["kv_heads"] = config["num_attention_heads"]
    if config.get("mtp_num_layers"):
        found["left_out"] = (f"{config['mtp_num_layers']} layers of multi-token prediction",)
    return found


def _pattern_of(text: str, layers: int) -> list[int] | None:
    """``--moe-layer-freq`` of a run: a number, or a sum of lists such as ``[0]*3+[1]*58``; None for another form."""
    if text.isdecimal() and int(text[:7]) > 0:
        return [int(layer % int(text[:7]) == 0) for layer in range(layers)]
    pattern: list[int] = []
    for term in text.split("+"):
        match = _TERM.fullmatch(term)
        if match is None or len(pattern) > layers:
            return None
        pattern += [int(entry) for entry in match[1].split(",")] * min(int(match[2] or 1), layers + 1)
    return pattern


def _local_layers(config: Config, source: str) -> tuple[bool, ...]:
    """Which layers have the sliding window, as a pattern: a manifest lists all, a run has the text of an option."""
    stated = config.get("layer_types")
    if stated is None:
        return (True,)
    words = stated.replace(",", " ").split() if isinstance(stated, str) else stated
    short = [str(word).removesuffix("_attention") for word in words] if isinstance(words, list | tuple) else []
    if not short or set(short) - {"full", "sliding"}:
        raise UsageError(f"{source}: layer_types {short_repr(stated)}: must be full or sliding by layer")
    return tuple(word == "sliding" for word in short)


def _padded_vocabulary(config: Config, size: int, source: str) -> int:
    """The rows of the word table, which ``dynmo-train`` pads to a multiple."""
    factors = [
        _first_value(config, name, default=1) for name in ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
    ]
    _check_whole(
        dict(zip(("make_vocab_size_divisible_by", "tensor_model_parallel_size"), factors, strict=True)), source
    )
    multiple: int = math.prod(factors)
    return -(-size // multiple) * multiple


def from_config(config: Config, source: str) -> ModelSpec:
    """The shape that a configuration describes.

    Raises:
        UsageError: the family or a key that may change costs is not modelled, or a size is missing.
    """
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return from_hugging_face(config, name, source)
    own = config.get("family")
    if name is None and own in NATIVE_FAMILIES:
        return from_dynmo_train(config, str(own), source)
    known = f"known are model_type {', '.join(FAMILIES)}, and dynmo-train's family {', '.join(NATIVE_FAMILIES)}"
    if name is None and own is None:
        raise UsageError(f"{source}: needs model_type or family; {known}")
    what = f"model_type {short_repr(name)}" if name is not None else f"family {own!r}"
    raise UsageError(f"{source}: {what} is not modelled; {known}")


def load_spec(path: Path) -> ModelSpec:
    """Read a ``config.json``, ``manifest.json`` or ``run.json``, or one of these in a directory.

    Raises:
        UsageError: it is not a JSON object, or ``from_config`` refuses it.
    """
    names = ("config.json", "manifest.json", "run.json")
    file = path
    if path.is_dir():
        file = next((path / name for name in names if (path / name).is_file()), path / names[0])
    document = read_any_json(file, MAX_TABLE_BYTES)
    if not isinstance(document, dict):
        raise UsageError(f"{file}: must be a JSON object")
    if document.get("format") == "dynmo.run" and isinstance(document.get("config"), dict):
        return from_config(_flat(document["config"]), str(file))
    if isinstance(document.get("model"), dict):
        document = document["model"]
    return from_config(document, str(file))


def _flat(config: Config) -> dict[str, Any]:
    """The options of a run without their sections."""
    return {name: value for part in config.values() if isinstance(part, dict) for name, value in part.items()}
