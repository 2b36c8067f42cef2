"""Hugging Face configurations: from a ``config.json`` to the ``model`` of a manifest, and back. Pure.

An architecture is a table in ``maps/``, two functions here, and an entry of ``ARCHITECTURES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._common.document import short_repr
from ..io.errors import CorruptError, UnsupportedError, short_names
from .config_keys import complete_config

Config = Mapping[str, Any]
Model = dict[str, Any]
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
# Three implementations of the same approximation.
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
PRE_TRAINING, MASKED = "MegatronBertForPreTraining", "MegatronBertForMaskedLM"
ROTARY_FIELDS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
RACE_CHOICES = 4  # the weights of a multiple-choice head do not show the number of choices
TASK_HEADS = {
    "classification": "MegatronBertForSequenceClassification",
    "multichoice": "MegatronBertForMultipleChoice",
}
LAYER_NORMS = {"normalization": "layernorm", "position_embedding": "learned"}
# What a Mixtral's router computes: the likeliest experts, weighted by their normalized probabilities.
MIXTRAL_ROUTER: Mapping[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One ``model_type`` of transformers.

    Attributes:
        map: the table of ``maps/``.
        to_config: from a ``model`` to the fields of the configuration, ``architectures`` included.
        to_model: from a configuration to a ``model``, without the vocabulary.
    """

    map: str
    to_config: Callable[[Config], dict[str, Any]]
    to_model: Callable[[Config], Model]


def architecture_of_model(model: Config) -> tuple[str, Architecture]:
    """The ``model_type`` of transformers that computes a model, and its functions.

    Args:
        model: the ``model`` of a manifest.

    Raises:
        UnsupportedError: transformers has no such model.
    """
    family = model["family"]
    # By what is computed, not by name: Megatron's T5 has learned positions, biases and norms before each part, as
    # Blenderbot. The T5 of transformers has relative positions. BertModel has its norms after each part.
    name = {"gpt": "gpt2", "bert": "megatron-bert", "t5": "blenderbot", "llama": "llama"}.get(family)
    if name is None:
        raise UnsupportedError(f"no architecture of transformers is known for the model family {family!r}")
    if family == "llama":
        if model.get("moe_shared_ffn_size"):
            raise UnsupportedError("transformers' Mixtral has no shared experts; use --to native")
        if unlike := unlike_mixtral(model):
            fields = ", ".join(f"{field} = {value}" for field, value in unlike.items())
            raise UnsupportedError(f"transformers' Mixtral implements no router with {fields}; use --to native")
        dense = "mistral" if model.get("sliding_window") else "llama"
        return ("mixtral" if model.get("num_experts") else dense), LLAMA
    if model.get("sliding_window"):
        raise UnsupportedError(f"transformers has no {family} with a sliding window; use --to native")
    if model.get("num_experts"):
        raise UnsupportedError(f"transformers has no {family} with experts; use --to native")
    if family == "t5" and model.get("position_embedding") == "relative":
        return "t5", ARCHITECTURES["t5"]
    for field, needed in LAYER_NORMS.items():
        if model.get(field, needed) != needed:
            raise UnsupportedError(f"{name} implements {field} = {needed} only; the model has {model[field]}")
    if model["activation"] not in ACTIVATIONS:
        raise UnsupportedError(f"{name}: does not implement the activation {model['activation']}")
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    if model.get("head_dim", hidden // heads) * heads != hidden:
        raise UnsupportedError(
            f"{name}: head_dim {model['head_dim']} times the number of heads must be the hidden size"
        )
    return name, ARCHITECTURES[name]


def unlike_mixtral(model: Config) -> dict[str, Any]:
    """The fields of a model by which its router computes something else than a Mixtral's, with their values."""
    unlike = {field: model[field] for field, value in MIXTRAL_ROUTER.items() if model.get(field, value) != value}
    # Training by expert choice ends in a model that routes as a Mixtral; that by an assignment has other weights.
    if model.get("moe_routing") in ("balanced", "sinkhorn"):
        unlike["moe_routing"] = model["moe_routing"]
    return unlike


def hf_config(model: Config, dtype: str, end_token_id: int | None) -> dict[str, Any]:
    """The ``config.json`` of a model.

    Args:
        model: the ``model`` of a manifest.
        dtype: type of the weights, as in torch.
        end_token_id: id of the end token, or None.

    Raises:
        UnsupportedError: no architecture of transformers computes the model.
    """
    name, architecture = architecture_of_model(model)
    return {
        **architecture.to_config(model),
        "model_type": name,
        "vocab_size": model["vocab_size"],
        "tie_word_embeddings": model["tied_embeddings"],
        "bos_token_id": end_token_id,
        "eos_token_id": end_token_id,
        "torch_dtype": dtype,
    }


def hf_model(config: Config, make_vocab_size_divisible_by: int, ignored: Sequence[str] = ()) -> Model:
    """The ``model`` of a manifest from a ``config.json``; remote code (``auto_map``) is ignored.

    Args:
        config: the contents of a ``config.json``.
        make_vocab_size_divisible_by: the padded vocabulary size is a multiple of this number of rows.
        ignored: shell patterns of keys that are not checked.

    Raises:
        CorruptError: an invalid size.
        UnsupportedError: another architecture, a variant that DynMo does not implement, or an unknown key.
    """
    complete = complete_config(config, ignored)
    model = ARCHITECTURES[config["model_type"]].to_model(complete)
    vocab = size(complete, "vocab_size")
    padded = -(-vocab // make_vocab_size_divisible_by) * make_vocab_size_divisible_by
    return {**model, "vocab_size": vocab, "padded_vocab_size": padded}


def size(config: Config, field: str) -> int:
    """A size of a configuration.

    Args:
        config: the configuration.
        field: its key; the unit is that of the key (layers, heads, elements, tokens).

    Raises:
        CorruptError: the value is not a positive integer.
    """
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptError(f"config.json: {field} must be a positive integer, found {short_repr(value)}")
    return value


def _activation(config: Config, field: str) -> str:
    name = config[field]
    if name in TANH_GELUS:
        return "gelu_tanh"
    if name not in ("gelu", "relu"):
        raise UnsupportedError(f"{field} {short_repr(name)}: must be one of gelu, relu, {', '.join(TANH_GELUS)}")
    return str(name)


def _gpt2_config(model: Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": ACTIVATIONS[model["activation"]],
        "n_embd": model["hidden_size"],
        "n_head": model["num_attention_heads"],
        "n_inner": model["ffn_hidden_size"],
        "n_layer": model["num_layers"],
        "n_positions": model["max_position_embeddings"],
        "n_ctx": model["max_position_embeddings"],
        "layer_norm_epsilon": model["layernorm_epsilon"],
    }


def _gpt2_model(config: Config) -> Model:
    hidden = size(config, "n_embd")
    return {
        "family": "gpt",
        "num_layers": size(config, "n_layer"),
        "hidden_size": hidden,
        "ffn_hidden_size": config["n_inner"] or 4 * hidden,
        "num_attention_heads": size(config, "n_head"),
        "max_position_embeddings": size(config, "n_positions"),
        "layernorm_epsilon": config["layer_norm_epsilon"],
        "activation": _activation(config, "activation_function"),
        "tied_embeddings": config["tie_word_embeddings"],
    }


def _llama_config(model: Config) -> dict[str, Any]:
    heads = model["num_attention_heads"]
    experts = model.get("num_experts")
    needed = {"normalization": "rmsnorm", "position_embedding": "rotary", "activation": "swiglu"}
    for field, value in needed.items():
        if model.get(field, value) != value:
            raise UnsupportedError(f"a Llama implements {field} = {value} only; the model has {model[field]}")
    base, scaling = float(model.get("rotary_base", 10000.0)), model.get("rotary_scaling")
    window = model.get("sliding_window")
    dense = "MistralForCausalLM" if window else "LlamaForCausalLM"
    config = {
        "architectures": ["MixtralForCausalLM" if experts else dense],
        "hidden_act": "silu",
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("num_key_value_heads", heads),
        "head_dim": model.get("head_dim", model["hidden_size"] // heads),
        "num_hidden_layers": model["num_layers"],
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": model["layernorm_epsilon"],
        "attention_bias": False,
        "mlp_bias": False,
        # transformers reads the first two before release 5, the third since then.
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": base},
    }
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": model.get("moe_top_k", 2)}
        config |= {"router_aux_loss_coef": model.get("moe_aux_loss_coeff", 0.0)}
    if experts or window:
        config["sliding_window"] = window
    return config


def _llama_model(config: Config) -> Model:
    heads = size(config, "num_attention_heads")
    hidden = size(config, "hidden_size")
    positions = size(config, "max_position_embeddings")
    window = _window(config, positions)
    base, scaling = _rotary(config, positions)
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
        "activation": "swiglu",
        "position_embedding": "rotary",
        "rotary_base": base,
        "rotary_scaling": scaling,
        "tied_embeddings": config["tie_word_embeddings"],
    }
    if window is not None:
        model["sliding_window"] = window
    if "num_local_experts" in config:
        model |= {
            "num_experts": size(config, "num_local_experts"),
            "moe_top_k": size(config, "num_experts_per_tok"),
            "moe_aux_loss_coeff": config["router_aux_loss_coef"],
            "moe_routing": "topk",
        }
    return model


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


def _rotary(config: Config, positions: int) -> tuple[Any, dict[str, Any] | None]:
    """The base of the rotary frequencies, and their scaling as an object of transformers, or None."""
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
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", positions)
        if config["original_max_position_embeddings"] is not None:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    unlike = sorted(rope.keys() ^ set(ROTARY_FIELDS[kind]))
    if unlike:
        raise UnsupportedError(f"rope_type {kind}: missing or unknown fields: {short_names(unlike)}")
    if not all(isinstance(value, int | float) and value > 0 for value in rope.values()):
        raise CorruptError(
            f"config.json: the fields of rope_scaling must be positive numbers, found {short_repr(rope)}"
        )
    return base, None if kind == "default" else {"rope_type": kind, **rope}


def _bert_config(model: Config) -> dict[str, Any]:
    return {
        "architectures": [
            TASK_HEADS.get(model.get("task_head", "")) or (PRE_TRAINING if model.get("binary_head") else MASKED)
        ],
        **({"num_labels": model["num_classes"]} if model.get("task_head") == "classification" else {}),
        "hidden_act": ACTIVATIONS[model["activation"]],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_attention_heads": model["num_attention_heads"],
        "num_hidden_layers": model["num_layers"],
        "max_position_embeddings": model["max_position_embeddings"],
        "layer_norm_eps": model["layernorm_epsilon"],
        "type_vocab_size": model.get("num_tokentypes", 0),
    }


def _bert_model(config: Config) -> Model:
    names = config["architectures"] or [PRE_TRAINING]
    known = (PRE_TRAINING, MASKED, *TASK_HEADS.values())
    if not isinstance(names, list) or names[0] not in known:
        raise UnsupportedError(f"architectures {short_repr(names)}: must be one of {', '.join(known)}")
    if config["id2label"] is not None and not isinstance(config["id2label"], dict):
        raise CorruptError(f"config.json: id2label must be an object, found {short_repr(config['id2label'])}")
    head = next((head for head, name in TASK_HEADS.items() if name == names[0]), None)
    if head is None and config["tie_word_embeddings"] is not True:
        raise UnsupportedError("tie_word_embeddings = False: DynMo's BERT ties its head to the embedding")
    # 2 is the default of transformers.
    labels = len(config["id2label"] or ()) or config["num_labels"] or 2
    task = (
        {} if head is None else {"task_head": head, "num_classes": labels if head == "classification" else RACE_CHOICES}
    )
    return {
        **task,
        "family": "bert",
        "num_layers": size(config, "num_hidden_layers"),
        "hidden_size": size(config, "hidden_size"),
        "ffn_hidden_size": size(config, "intermediate_size"),
        "num_attention_heads": size(config, "num_attention_heads"),
        "max_position_embeddings": size(config, "max_position_embeddings"),
        "layernorm_epsilon": config["layer_norm_eps"],
        "activation": _activation(config, "hidden_act"),
        "num_tokentypes": config["type_vocab_size"],
        "binary_head": names[0] == PRE_TRAINING,
        "tied_embeddings": head is None,
    }


def _blenderbot_config(model: Config) -> dict[str, Any]:
    # Blenderbot has no key for it, and uses the default of torch.nn.LayerNorm.
    if model["layernorm_epsilon"] != 1e-5:
        raise UnsupportedError(
            f"blenderbot: layernorm_epsilon must be 1e-5; the model has {model['layernorm_epsilon']}"
        )
    both = {"attention_heads": model["num_attention_heads"], "ffn_dim": model["ffn_hidden_size"]}
    return {
        "architectures": ["BlenderbotForConditionalGeneration"],
        "activation_function": ACTIVATIONS[model["activation"]],
        "d_model": model["hidden_size"],
        "encoder_layers": model["num_layers"],
        "decoder_layers": model["num_decoder_layers"],
        **{f"{side}_{field}": value for side in ("encoder", "decoder") for field, value in both.items()},
        "max_position_embeddings": model["max_position_embeddings"],
        # Megatron does not multiply embeddings by the square root of their width.
        "scale_embedding": False,
        "is_encoder_decoder": True,
        # Blenderbot's default would end each text with token 2 of its own vocabulary.
        "forced_eos_token_id": None,
    }


def _blenderbot_model(config: Config) -> Model:
    sizes = {}
    for field in ("attention_heads", "ffn_dim"):
        sides = [size(config, f"{side}_{field}") for side in ("encoder", "decoder")]
        if sides[0] != sides[1]:
            raise UnsupportedError(f"encoder_{field} {sides[0]} and decoder_{field} {sides[1]}: must be equal")
        sizes[field] = sides[0]
    layers = size(config, "encoder_layers")
    return {
        "family": "t5",
        "num_layers": layers,
        "num_encoder_layers": layers,
        "num_decoder_layers": size(config, "decoder_layers"),
        "hidden_size": size(config, "d_model"),
        "ffn_hidden_size": sizes["ffn_dim"],
        "num_attention_heads": sizes["attention_heads"],
        "head_dim": size(config, "d_model") // sizes["attention_heads"],
        "normalization": "layernorm",
        "max_position_embeddings": size(config, "max_position_embeddings"),
        "layernorm_epsilon": 1e-5,
        "activation": _activation(config, "activation_function"),
        "position_embedding": "learned",
        "tied_embeddings": config["tie_word_embeddings"],
    }


def _t5_config(model: Config) -> dict[str, Any]:
    needed = {"normalization": "rmsnorm", "tied_embeddings": True}
    for field, value in needed.items():
        if model.get(field) != value:
            raise UnsupportedError(f"t5 implements {field} = {value} only; the model has {model.get(field)}")
    if model["activation"] not in ACTIVATIONS:
        raise UnsupportedError(f"t5: does not implement the activation {model['activation']}")
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": model["hidden_size"],
        "d_ff": model["ffn_hidden_size"],
        "d_kv": model["head_dim"],
        "num_heads": model["num_attention_heads"],
        "num_layers": model["num_layers"],
        "num_decoder_layers": model["num_decoder_layers"],
        "relative_attention_num_buckets": model.get("relative_buckets", 32),
        "relative_attention_max_distance": model.get("relative_max_distance", 128),
        "n_positions": model["max_position_embeddings"],
        "layer_norm_epsilon": model["layernorm_epsilon"],
        "feed_forward_proj": ACTIVATIONS[model["activation"]],
        "is_encoder_decoder": True,
        "scale_decoder_outputs": True,
        "decoder_start_token_id": 0,
    }


def _t5_model(config: Config) -> Model:
    projection = str(config["feed_forward_proj"])
    if projection.startswith("gated"):
        raise UnsupportedError(f"feed_forward_proj {short_repr(projection)}: gated layers are not supported")
    layers = size(config, "num_layers")
    return {
        "family": "t5",
        "num_layers": layers,
        "num_encoder_layers": layers,
        "num_decoder_layers": config["num_decoder_layers"] or layers,
        "hidden_size": size(config, "d_model"),
        "ffn_hidden_size": size(config, "d_ff"),
        "num_attention_heads": size(config, "num_heads"),
        "head_dim": size(config, "d_kv"),
        "normalization": "rmsnorm",
        # Relative positions have no limit; the configuration may record the training length.
        "max_position_embeddings": size(config, "n_positions"),
        "layernorm_epsilon": config["layer_norm_epsilon"],
        "activation": _activation(config, "dense_act_fn" if config["dense_act_fn"] else "feed_forward_proj"),
        "position_embedding": "relative",
        "relative_buckets": size(config, "relative_attention_num_buckets"),
        "relative_max_distance": size(config, "relative_attention_max_distance"),
        "tied_embeddings": True,
    }


LLAMA = Architecture(map="llama", to_config=_llama_config, to_model=_llama_model)
ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture(map="gpt2", to_config=_gpt2_config, to_model=_gpt2_model),
    "llama": LLAMA,
    "mixtral": LLAMA,
    "mistral": LLAMA,
    "megatron-bert": Architecture(map="megatronbert", to_config=_bert_config, to_model=_bert_model),
    "t5": Architecture(map="t5", to_config=_t5_config, to_model=_t5_model),
    "blenderbot": Architecture(map="blenderbot", to_config=_blenderbot_config, to_model=_blenderbot_model),
}
