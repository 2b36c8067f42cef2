"""Hugging Face configurations: from a ``config.json`` to the ``model`` of a manifest, and back. Pure.

An architecture is a table in ``maps/``, two functions here, and an entry of ``ARCHITECTURES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._common.document import short_repr
from ..io.errors import CorruptError, UnsupportedError
from ..maps.decoder_fields import unlike_family
from .config_keys import complete_config, size
from .decoders import DECODERS, Decoder, decoder_config, decoder_kind, decoder_model
from .deepseek import KINDS as DEEPSEEKS
from .deepseek import deepseek_config, deepseek_kind, deepseek_model

Config = Mapping[str, Any]
Model = dict[str, Any]
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
# Three implementations of the same approximation.
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
PRE_TRAINING, MASKED = "MegatronBertForPreTraining", "MegatronBertForMaskedLM"
RACE_CHOICES = 4  # the weights of a multiple-choice head do not show the number of choices
TASK_HEADS = {
    "classification": "MegatronBertForSequenceClassification",
    "multichoice": "MegatronBertForMultipleChoice",
}
LAYER_NORMS = {"normalization": "layernorm", "position_embedding": "learned"}


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


def architecture_of_model(model: Config, preferred: str | None = None) -> tuple[str, Architecture]:
    """The ``model_type`` of transformers that computes a model, and its functions.

    Args:
        model: the ``model`` of a manifest.
        preferred: the ``model_type`` to choose where several decoders compute the model: that of its source.

    Raises:
        UnsupportedError: transformers has no such model.
    """
    family = model["family"]
    # By what is computed, not by name: Megatron's T5 has learned positions, biases and norms before each part, as
    # Blenderbot. The T5 of transformers has relative positions. BertModel has its norms after each part.
    name = {"gpt": "gpt2", "bert": "megatron-bert", "t5": "blenderbot", "llama": "llama"}.get(family)
    if name is None:
        raise UnsupportedError(f"no architecture of transformers is known for the model family {family!r}")
    if model.get("kv_lora_rank"):
        kind = deepseek_kind(model, preferred)
        return kind, ARCHITECTURES[kind]
    if model.get("mtp_num_layers"):
        raise UnsupportedError("transformers has multi-token prediction for DeepSeek alone; use --to native")
    is_other = bool(unlike_family(model)) or model.get("position_embedding") == "rotary"
    if family == "llama" or (family == "gpt" and is_other):
        kind = decoder_kind(model, preferred)
        return kind, ARCHITECTURES[kind]
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


def hf_config(model: Config, dtype: str, end_token_id: int | None, preferred: str | None = None) -> dict[str, Any]:
    """The ``config.json`` of a model.

    Args:
        model: the ``model`` of a manifest.
        dtype: type of the weights, as in torch.
        end_token_id: id of the end token, or None.
        preferred: as of :func:`architecture_of_model`.

    Raises:
        UnsupportedError: no architecture of transformers computes the model.
    """
    name, architecture = architecture_of_model(model, preferred)
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


def _of_decoder(kind: str, decoder: Decoder) -> Architecture:
    return Architecture(map=decoder.map, to_config=partial(decoder_config, kind), to_model=partial(decoder_model, kind))


ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture(map="gpt2", to_config=_gpt2_config, to_model=_gpt2_model),
    **{kind: _of_decoder(kind, decoder) for kind, decoder in DECODERS.items()},
    **{
        kind: Architecture(
            map="deepseek", to_config=partial(deepseek_config, kind), to_model=partial(deepseek_model, kind)
        )
        for kind in DEEPSEEKS
    },
    "megatron-bert": Architecture(map="megatronbert", to_config=_bert_config, to_model=_bert_model),
    "t5": Architecture(map="t5", to_config=_t5_config, to_model=_t5_model),
    "blenderbot": Architecture(map="blenderbot", to_config=_blenderbot_config, to_model=_blenderbot_model),
}
