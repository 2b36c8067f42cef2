"""Hugging Face configurations: which architecture a family becomes, and the model that a configuration describes. Pure.

Adding an architecture is a table in ``maps/``, two functions here and an entry in ``ARCHITECTURES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .faults import CorruptError, UnsupportedError

Config = Mapping[str, Any]
Model = dict[str, Any]
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
SAME_AS_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
PRE_TRAINING, MASKED = "MegatronBertForPreTraining", "MegatronBertForMaskedLM"
RACE_CHOICES = 4  # of a multiple-choice head, whose weights do not tell it
TASK_HEADS = {
    "classification": "MegatronBertForSequenceClassification",
    "multichoice": "MegatronBertForMultipleChoice",
}
LAYER_NORMS = {"normalization": "layernorm", "position_embedding": "learned"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One ``model_type``: its map, and how a configuration and a model become one another.

    Attributes:
        map: the table of ``maps/``.
        to_config: the configuration's own fields of a model, ``architectures`` among them.
        to_model: the ``model`` of a manifest, without the vocabulary.
    """

    map: str
    to_config: Callable[[Config], dict[str, Any]]
    to_model: Callable[[Config], Model]


def architecture_of_model(model: Config) -> tuple[str, Architecture]:
    """The ``model_type`` that a model of ours becomes; raises ``UnsupportedError`` where there is none."""
    family = model["family"]
    name = {"gpt": "gpt2", "bert": "megatron-bert", "t5": "blenderbot", "llama": "llama"}[family]
    if family == "llama":
        return ("mixtral" if model.get("num_experts") else "llama"), LLAMA
    if model.get("num_experts"):
        raise UnsupportedError(f"no architecture of transformers is a {family} with experts")
    if family == "t5" and model.get("position_embedding") == "relative":
        return "t5", ARCHITECTURES["t5"]
    for field, needed in LAYER_NORMS.items():
        if model.get(field, needed) != needed:
            raise UnsupportedError(f"{name} computes {field} = {needed} only; the model has {model[field]}")
    if model["activation"] not in ACTIVATIONS:
        raise UnsupportedError(f"{name}: no activation function is {model['activation']}")
    if (
        model.get("head_dim", model["hidden_size"] // model["num_attention_heads"]) * model["num_attention_heads"]
        != (model["hidden_size"])
    ):
        raise UnsupportedError(f"{name}: heads of {model['head_dim']} do not add up to the width")
    return name, ARCHITECTURES[name]


def hf_config(model: Config, dtype: str, end_token_id: int | None) -> dict[str, Any]:
    """``config.json`` of a model; ``dtype`` in torch's words."""
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


def hf_model(config: Config, make_vocab_size_divisible_by: int) -> Model:
    """The ``model`` of a manifest from a ``config.json``; code that it may name (``auto_map``) is not looked at.

    Raises:
        CorruptError: a size that is none.
        UnsupportedError: another architecture, or a variant that our model does not compute.
    """
    known = ARCHITECTURES.get(str(config.get("model_type")))
    if known is None:
        raise UnsupportedError(f"model_type {config.get('model_type')!r}: known are {', '.join(ARCHITECTURES)}")
    model = known.to_model(config)
    vocab = size(config, "vocab_size", 50257)
    padded = -(-vocab // make_vocab_size_divisible_by) * make_vocab_size_divisible_by
    return {**model, "vocab_size": vocab, "padded_vocab_size": padded}


def size(config: Config, field: str, default: int) -> int:
    """A size of a configuration; raises ``CorruptError`` where it is none."""
    value = config.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptError(f"config.json: {field} must be an integer of at least 1, is {value!r}")
    return value


def _needs(config: Config, **fields: Any) -> None:
    for field, needed in fields.items():
        if config.get(field, needed) != needed:
            raise UnsupportedError(f"{field} = {config[field]}: our model computes {field} = {needed} only")


def _activation(config: Config, field: str, default: str) -> str:
    name = config.get(field, default)
    if name in SAME_AS_TANH:
        return "gelu_tanh"
    if name not in ("gelu", "relu"):
        raise UnsupportedError(f"{field} {name!r}: known are gelu, relu and {', '.join(SAME_AS_TANH)}")
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
    _needs(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden = size(config, "n_embd", 768)
    return {
        "family": "gpt",
        "num_layers": size(config, "n_layer", 12),
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "num_attention_heads": size(config, "n_head", 12),
        "max_position_embeddings": size(config, "n_positions", 1024),
        "layernorm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(config, "activation_function", "gelu_new"),
        "tied_embeddings": config.get("tie_word_embeddings", True),
    }


def _llama_config(model: Config) -> dict[str, Any]:
    heads = model["num_attention_heads"]
    experts = model.get("num_experts")
    needed = {"normalization": "rmsnorm", "position_embedding": "rotary", "activation": "swiglu"}
    for field, value in needed.items():
        if model.get(field, value) != value:
            raise UnsupportedError(f"a Llama computes {field} = {value} only; the model has {model[field]}")
    base, scaling = float(model.get("rotary_base", 10000.0)), model.get("rotary_scaling")
    config = {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
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
        # Releases of transformers before 5 read the first two, later ones the third.
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": base},
    }
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": model.get("moe_top_k", 2)}
        config |= {"sliding_window": None, "router_aux_loss_coef": model.get("moe_aux_loss_coeff", 0.0)}
    return config


def _llama_model(config: Config) -> Model:
    _needs(config, attention_bias=False, mlp_bias=False, hidden_act="silu", sliding_window=None)
    heads = size(config, "num_attention_heads", 32)
    hidden = size(config, "hidden_size", 4096)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedError(f"rotary positions of the type {kind!r}: known are default and llama3")
    mixtral = config.get("model_type") == "mixtral"
    base = rope.pop("rope_theta", config.get("rope_theta", 1000000.0 if mixtral else 10000.0))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedError("partial_rotary_factor: our heads are rotated as a whole")
    scaling = None if kind == "default" else {"rope_type": kind, **{k: v for k, v in rope.items() if k != "type"}}
    model = {
        "family": "llama",
        "num_layers": size(config, "num_hidden_layers", 32),
        "hidden_size": hidden,
        "ffn_hidden_size": size(config, "intermediate_size", 11008),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "max_position_embeddings": size(config, "max_position_embeddings", 2048),
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-5 if mixtral else 1e-6),
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rotary",
        "rotary_base": base,
        "rotary_scaling": scaling,
        "tied_embeddings": config.get("tie_word_embeddings", False),
    }
    if mixtral:
        model |= {
            "num_experts": size(config, "num_local_experts", 8),
            "moe_top_k": size(config, "num_experts_per_tok", 2),
            "moe_aux_loss_coeff": float(config.get("router_aux_loss_coef", 0.001)),
            "moe_routing": "topk",
        }
    return model


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
    _needs(config, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    names = config.get("architectures") or [PRE_TRAINING]
    known = (PRE_TRAINING, MASKED, *TASK_HEADS.values())
    if names[0] not in known:
        raise UnsupportedError(f"architecture {names[0]}: known are {', '.join(known)}")
    head = next((head for head, name in TASK_HEADS.items() if name == names[0]), None)
    labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))
    task = (
        {} if head is None else {"task_head": head, "num_classes": labels if head == "classification" else RACE_CHOICES}
    )
    return {
        **task,
        "family": "bert",
        "num_layers": size(config, "num_hidden_layers", 24),
        "hidden_size": size(config, "hidden_size", 1024),
        "ffn_hidden_size": size(config, "intermediate_size", 4096),
        "num_attention_heads": size(config, "num_attention_heads", 16),
        "max_position_embeddings": size(config, "max_position_embeddings", 512),
        "layernorm_epsilon": config.get("layer_norm_eps", 1e-12),
        "activation": _activation(config, "hidden_act", "gelu"),
        "num_tokentypes": config.get("type_vocab_size", 2),
        "binary_head": names[0] == PRE_TRAINING,
        "tied_embeddings": head is None and config.get("tie_word_embeddings", True),
    }


def _blenderbot_config(model: Config) -> dict[str, Any]:
    if model["layernorm_epsilon"] != 1e-5:
        raise UnsupportedError(f"Blenderbot's layer norms use 1e-5; the model has {model['layernorm_epsilon']}")
    both = {"attention_heads": model["num_attention_heads"], "ffn_dim": model["ffn_hidden_size"]}
    return {
        "architectures": ["BlenderbotForConditionalGeneration"],
        "activation_function": ACTIVATIONS[model["activation"]],
        "d_model": model["hidden_size"],
        "encoder_layers": model["num_layers"],
        "decoder_layers": model["num_decoder_layers"],
        **{f"{side}_{field}": value for side in ("encoder", "decoder") for field, value in both.items()},
        "max_position_embeddings": model["max_position_embeddings"],
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "forced_eos_token_id": None,
    }


def _blenderbot_model(config: Config) -> Model:
    _needs(config, scale_embedding=False)
    sizes = {}
    for field, default in (("attention_heads", 32), ("ffn_dim", 10240)):
        sides = [size(config, f"{side}_{field}", default) for side in ("encoder", "decoder")]
        if sides[0] != sides[1]:
            raise UnsupportedError(f"encoder_{field} {sides[0]} and decoder_{field} {sides[1]}: ours are the same")
        sizes[field] = sides[0]
    layers = size(config, "encoder_layers", 2)
    return {
        "family": "t5",
        "num_layers": layers,
        "num_encoder_layers": layers,
        "num_decoder_layers": size(config, "decoder_layers", 24),
        "hidden_size": size(config, "d_model", 2560),
        "ffn_hidden_size": sizes["ffn_dim"],
        "num_attention_heads": sizes["attention_heads"],
        "head_dim": size(config, "d_model", 2560) // sizes["attention_heads"],
        "normalization": "layernorm",
        "max_position_embeddings": size(config, "max_position_embeddings", 128),
        "layernorm_epsilon": 1e-5,
        "activation": _activation(config, "activation_function", "gelu"),
        "position_embedding": "learned",
        "tied_embeddings": config.get("tie_word_embeddings", True),
    }


def _t5_config(model: Config) -> dict[str, Any]:
    needed = {"normalization": "rmsnorm", "tied_embeddings": True}
    for field, value in needed.items():
        if model.get(field) != value:
            raise UnsupportedError(f"a T5 computes {field} = {value} only; the model has {model.get(field)}")
    if model["activation"] not in ACTIVATIONS:
        raise UnsupportedError(f"t5: no activation function is {model['activation']}")
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
    _needs(config, tie_word_embeddings=True)
    projection = str(config.get("feed_forward_proj", "relu"))
    if projection.startswith("gated"):
        raise UnsupportedError(f"feed_forward_proj {projection}: gated layers are not mapped")
    layers = size(config, "num_layers", 6)
    return {
        "family": "t5",
        "num_layers": layers,
        "num_encoder_layers": layers,
        "num_decoder_layers": config.get("num_decoder_layers") or layers,
        "hidden_size": size(config, "d_model", 512),
        "ffn_hidden_size": size(config, "d_ff", 2048),
        "num_attention_heads": size(config, "num_heads", 8),
        "head_dim": size(config, "d_kv", 64),
        "normalization": "rmsnorm",
        # Relative positions have no end; the configuration may still tell what the model was trained with.
        "max_position_embeddings": size(config, "n_positions", 512),
        "layernorm_epsilon": config.get("layer_norm_epsilon", 1e-6),
        "activation": _activation({"name": projection}, "name", "relu"),
        "position_embedding": "relative",
        "relative_buckets": size(config, "relative_attention_num_buckets", 32),
        "relative_max_distance": size(config, "relative_attention_max_distance", 128),
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
