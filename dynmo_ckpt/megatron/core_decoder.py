"""Decoders of Megatron-core beyond GPT and Llama: the model from arguments and tensors, and the arguments of one. Pure.

::

    common.pt args, names, shapes  --decoder_model-->  model of a manifest  --decoder_args-->  args of common.pt

Biases, norms of queries and keys, experts and multi-token prediction are taken from the tensors; the router, rotary
positions, windows and activations, which no tensor shows, from the arguments. ``maps/core_decoder.json`` has the names,
and the section ``decoder`` of ``maps/megatron_args.json`` the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._common.document import short_repr
from .._common.errors import UsageError
from ..io.errors import UnsupportedError, short_name
from ..maps.decoder_fields import decoder_fields
from ..tensors.views import Tensor
from .arguments import count_of, number_of
from .core_rotary import rotary_args, rotary_of_args
from .core_router import router_args, router_of_args
from .model_sizes import megatron_rows, vocabulary_sizes

Args = Mapping[str, Any]
Model = dict[str, Any]
LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d{1,9})\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)")
FC1, EXPERT_FC1 = "mlp.linear_fc1.weight", "mlp.experts.experts.linear_fc1.weight"
ROUTER, SHARED_FC1 = "mlp.router.weight", "mlp.shared_experts.linear_fc1.weight"
POSITIONS, WORD, OUTPUT = (
    "embedding.position_embeddings.weight",
    "embedding.word_embeddings.weight",
    "output_layer.weight",
)
# Parts of names, and arguments with other values than none, that a Llama of legacy Megatron does not have.
OWN_NAMES = (
    *("self_attention.linear_qkv.bias", "q_layernorm", "k_layernorm", "kv_layernorm", "linear_q_", "linear_kv_"),
    *("softmax_offset", "linear_fc1.weight_", "mlp.router.", "mlp.experts.", "mlp.shared_experts.", "mtp.layers."),
)
OWN_ARGS = ("window_size", "quick_geglu", "activation_func_clamp_value", "rotary_seq_len_interpolation_factor")
LATENT = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
# DynMo and transformers normalize latents with this epsilon, whatever that of the other norms is.
LATENT_EPSILON = 1e-6
QUICK_SLOPE = 1.702


@dataclass(frozen=True, kw_only=True)
class DecoderFile:
    """What is known of a checkpoint before its model.

    Attributes:
        path: the directory, for messages.
        args: its arguments.
        tensors: the weights by name, one for each layer.
    """

    path: str
    args: Args
    tensors: Mapping[str, Tensor]

    def inner(self, layer: int) -> set[str]:
        """The names of the tensors of a layer, without its number.

        Args:
            layer: number of the layer, from 0.
        """
        begin = f"decoder.layers.{layer}."
        return {name.removeprefix(begin) for name in self.tensors if name.startswith(begin)}

    def rows(self, name: str, dim: int = 0) -> int:
        """A size of a tensor.

        Args:
            name: of the tensor.
            dim: number of the dimension, from 0.

        Raises:
            UnsupportedError: it is missing, or has fewer dimensions.
        """
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) <= dim:
            raise UnsupportedError(f"{self.path}: not a decoder of Megatron-core: has no {short_name(name)}")
        return tensor.shape[dim]


def is_decoder(names: Iterable[str], args: Args) -> bool:
    """Whether a checkpoint with rotary positions has parts that GPT and Llama of legacy Megatron do not have."""
    listed = list(names)
    if POSITIONS in listed:
        return False
    stated = any(args.get(name) not in (None, False, 1) for name in OWN_ARGS)
    share = args.get("rotary_percent")
    return stated or share not in (None, 1.0) or any(own in name for name in listed for own in OWN_NAMES)


def decoder_model(file: DecoderFile, given: Mapping[str, int | None], remarks: list[str]) -> Model:
    """The ``model`` of a manifest.

    Args:
        file: the tensors and the checked arguments.
        given: ``vocab_size`` and ``num_attention_heads`` from the command line, or None.
        remarks: remarks for the user are appended to it.

    Raises:
        UnsupportedError: arguments that DynMo's models do not compute, or tensors that contradict them.
        UsageError: a size that is neither recorded nor given.
    """
    args, path = file.args, file.path
    padded, hidden = file.rows(WORD), file.rows(WORD, 1)
    layers = _num_layers(file, "decoder")
    heads = given["num_attention_heads"] or count_of(path, args, "num_attention_heads")
    positions = count_of(path, args, "max_position_embeddings") or count_of(path, args, "seq_length")
    if heads is None or positions is None:
        raise UsageError(
            f"{path}: its args must have num_attention_heads and max_position_embeddings; --config gives them "
            "from the model's config.json of transformers"
        )
    epsilon = number_of(path, args, "norm_epsilon" if "norm_epsilon" in args else "layernorm_epsilon")
    model: Model = {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        **vocabulary_sizes(args, given["vocab_size"], padded, remarks),
        "max_position_embeddings": positions,
        "layernorm_epsilon": 1e-5 if epsilon is None else epsilon,
        "normalization": "rmsnorm",
        "position_embedding": "rotary",
        **_activation(file),
        "tied_embeddings": OUTPUT not in file.tensors,
    }
    model |= _latent(file, model) if args.get("multi_latent_attention") else _heads(file, model)
    model |= rotary_of_args(path, args)
    model |= _mlps(file, layers)
    if further := _num_layers(file, "mtp"):
        model["mtp_num_layers"] = further
    return model | _windows(path, args, layers)


def _num_layers(file: DecoderFile, stack: str) -> int:
    found = (LAYER.fullmatch(name) for name in file.tensors)
    numbers = {int(match[2]) for match in found if match and match[1] == stack}
    # Before lists with an entry per layer are made of the largest number.
    if numbers and max(numbers) >= len(numbers):
        raise UnsupportedError(
            f"{file.path}: has tensors of {len(numbers):,} layers of the {stack}, and one of layer {max(numbers):,}; "
            "the numbers of layers must begin at 0 and have no gap"
        )
    return len(numbers)


def _heads(file: DecoderFile, model: Model) -> Model:
    """Attention with queries, keys and values of heads; its biases and norms are those that are stored."""
    names, heads = file.inner(0), model["num_attention_heads"]
    width = count_of(file.path, file.args, "kv_channels") or max(1, model["hidden_size"] // heads)
    rows = file.rows("decoder.layers.0.self_attention.linear_qkv.weight")
    groups = (rows // width - heads) // 2
    if groups < 1 or heads % groups or (heads + 2 * groups) * width != rows:
        raise UnsupportedError(f"{file.path}: {rows} rows of query, key and value do not fit {heads} heads of {width}")
    found: Model = {"num_key_value_heads": groups, "head_dim": width}
    if "self_attention.linear_qkv.bias" in names:
        found["attention_bias"] = "all" if "self_attention.linear_proj.bias" in names else "qkv"
    if "self_attention.q_layernorm.weight" in names:
        found["qk_norm"] = "head"
    kind = file.args.get("softmax_type") or "vanilla"
    own = {"vanilla": {}, "learnable": {"attention_sinks": True}, "off-by-one": {"softmax_off_by_one": True}}
    return found | own[kind]


def _latent(file: DecoderFile, model: Model) -> Model:
    """Multi-head latent attention."""
    args = file.args
    sizes = {name: count_of(file.path, args, name) for name in LATENT}
    unknown = [name for name, value in sizes.items() if value is None]
    if unknown:
        raise UnsupportedError(f"{file.path}: its args do not record {', '.join(unknown)} of multi_latent_attention")
    if not args.get("qk_layernorm"):
        raise UnsupportedError(
            f"{file.path}: multi_latent_attention without qk_layernorm is not supported: DynMo normalizes the latents "
            "of queries, keys and values; train with --qk-layernorm"
        )
    if args.get("softmax_type") not in (None, "vanilla"):
        raise UnsupportedError(f"{file.path}: softmax_type {args['softmax_type']} with multi_latent_attention")
    if model["layernorm_epsilon"] != LATENT_EPSILON:
        raise UnsupportedError(
            f"{file.path}: norm_epsilon = {model['layernorm_epsilon']:g} with multi_latent_attention: DynMo and "
            f"transformers normalize latents with {LATENT_EPSILON:g} only"
        )
    rank = count_of(file.path, args, "q_lora_rank")
    return {
        "num_key_value_heads": model["num_attention_heads"],
        "head_dim": args["qk_head_dim"] + args["qk_pos_emb_head_dim"],
        **sizes,
        **({"q_lora_rank": rank} if rank else {}),
        "rotary_interleaved": True,
    }


def _mlps(file: DecoderFile, layers: int) -> Model:
    """Widths of the MLPs, which layers have experts, and the router."""
    begin = [f"decoder.layers.{i}." for i in range(layers)]
    pattern = [int(each + ROUTER in file.tensors) for each in begin]
    dense = next((file.rows(begin[i] + FC1) // 2 for i in range(layers) if not pattern[i]), None)
    bias = {"mlp_bias": True} if any(name.endswith("linear_fc1.bias") for name in file.tensors) else {}
    if not any(pattern):
        return {"ffn_hidden_size": dense, **bias}
    first = begin[pattern.index(1)]
    experts, inner = file.rows(first + ROUTER), file.rows(first + EXPERT_FC1, 1) // 2
    found: Model = {"ffn_hidden_size": dense or inner, "num_experts": experts, **bias}
    if dense is not None:
        found["moe_layer_pattern"] = pattern
        found |= {"moe_ffn_hidden_size": inner} if inner != dense else {}
    if first + SHARED_FC1 in file.tensors:
        found["moe_shared_ffn_size"] = file.rows(first + SHARED_FC1) // 2
        found["moe_shared_gate"] = first + "mlp.shared_experts.gate_weight" in file.tensors
    if first + "mlp.router.bias" in file.tensors:
        found["moe_router_bias"] = True
    return found | router_of_args(file.path, file.args, experts)


def _activation(file: DecoderFile) -> Model:
    """The gated activation; ``quick_geglu`` and clamped ones have a slope, an offset and a limit."""
    args = file.args
    quick, clamp = bool(args.get("quick_geglu")), args.get("activation_func_clamp_value")
    if not quick and not args.get("swiglu"):
        raise UnsupportedError(
            f"{file.path}: neither swiglu nor quick_geglu: MLPs without a gate are read with position embeddings only"
        )
    if not quick and clamp is None:
        return {"activation": "swiglu"}
    found: Model = {"activation": "quick_geglu" if clamp is None else "clamped_swiglu"}
    found |= {} if quick else {"swiglu_alpha": 1.0}
    offset = number_of(file.path, args, "glu_linear_offset") or 0.0
    found |= {} if offset == 1.0 else {"swiglu_offset": offset}
    limit = number_of(file.path, args, "activation_func_clamp_value")
    return found if limit in (None, 7.0) else {**found, "swiglu_limit": limit}


def _windows(path: str, args: Args, layers: int) -> Model:
    window, skipped = args.get("window_size"), args.get("window_attn_skip_freq")
    if window is None or window in ((-1, -1), [-1, -1]):
        return {}
    if not _is_list_of_integers(window, 2) or window[0] < 0 or window[1] not in (0, -1):
        raise UnsupportedError(f"{path}: window_size = {short_repr(window)}: must be (LEFT, 0)")
    found: Model = {"sliding_window": window[0] + 1}
    if skipped is not None:
        # Of a number N every N-th layer attends to all tokens; a list has 1 for each layer with the window.
        is_number = isinstance(skipped, int) and skipped > 0
        if not is_number and not _is_list_of_integers(skipped, layers):
            raise UnsupportedError(f"{path}: window_attn_skip_freq = {short_repr(skipped)}: must fit {layers} layers")
        local = [bool((i + 1) % skipped) for i in range(layers)] if is_number else list(skipped)
        found["layer_types"] = ["sliding_attention" if each else "full_attention" for each in local]
    return found


def _is_list_of_integers(value: Any, length: int) -> bool:
    return isinstance(value, tuple | list) and len(value) == length and all(isinstance(each, int) for each in value)


def check_decoder(model: Mapping[str, Any]) -> None:
    """Check that Megatron-core can represent a model.

    Args:
        model: the ``model`` of a manifest.

    Raises:
        UnsupportedError: a field that it does not implement.
    """
    own = decoder_fields(model)
    needed: dict[str, Sequence[Any]] = {
        "normalization": ("rmsnorm",),
        "norm_placement": ("pre",),
        "position_embedding": ("rotary",),
        "qk_norm": (None, "head"),
        "embedding_scale": (1.0,),
        "attention_scale": (None,),
        "local_rotary_base": (None,),
        "no_rope_freq": (None,),
        "residual_multiplier": (1.0,),
        "logits_scaling": (1.0,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
    }
    stated = {**own, **{name: model.get(name) for name in ("activation", "moe_routing", "rotary_interleaved")}}
    needed |= {
        "activation": ("swiglu", "quick_geglu", "clamped_swiglu"),
        "moe_routing": (None, "topk", "expert_choice"),
    }
    if model.get("kv_lora_rank"):
        needed |= {"attention_bias": ("none",), "mlp_bias": (False,), "rotary_interleaved": (None, True)}
        needed["rotary_fraction"] = (1.0,)
    elif own["attention_bias"] == "all" or own["mlp_bias"] or own["moe_router_bias"]:
        # One argument of Megatron adds all of them.
        needed |= {"attention_bias": ("all",), "mlp_bias": (True,)}
        needed["moe_router_bias"] = (bool(model.get("num_experts")),)
    for name, values in needed.items():
        if stated[name] not in values:
            permitted = " or ".join(map(str, values))
            raise UnsupportedError(
                f"Megatron-core: {name} = {stated[name]} is not supported, only {permitted}; use --to hf or native"
            )
    if model.get("kv_lora_rank") and model["layernorm_epsilon"] != LATENT_EPSILON:
        raise UnsupportedError(
            f"Megatron-core: layernorm_epsilon = {model['layernorm_epsilon']:g} with latent attention is unsupported: "
            f"there latents have the same epsilon, and here {LATENT_EPSILON:g}; use --to hf or native"
        )


def decoder_args(model: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-LM that describe a model.

    Args:
        model: the ``model`` of a manifest, which :func:`check_decoder` accepts.

    Raises:
        UnsupportedError: a router or a rotary scaling that Megatron-core does not have.
    """
    own, heads = decoder_fields(model), model["num_attention_heads"]
    groups = model.get("num_key_value_heads", heads)
    latent = bool(model.get("kv_lora_rank"))
    args: dict[str, Any] = {
        "num_layers": model["num_layers"],
        "hidden_size": model["hidden_size"],
        "ffn_hidden_size": model["ffn_hidden_size"],
        "num_attention_heads": heads,
        "kv_channels": model["hidden_size"] // heads
        if latent
        else model.get("head_dim", model["hidden_size"] // heads),
        "group_query_attention": not latent and groups != heads,
        "num_query_groups": heads if latent else groups,
        "seq_length": model["max_position_embeddings"],
        "max_position_embeddings": model["max_position_embeddings"],
        "padded_vocab_size": megatron_rows(model, 1),
        "orig_vocab_size": model["vocab_size"],
        "vocab_size": model["vocab_size"],
        "normalization": "RMSNorm",
        "norm_epsilon": model["layernorm_epsilon"],
        "untie_embeddings_and_output_weights": not model["tied_embeddings"],
        "add_position_embedding": False,
        "add_bias_linear": own["mlp_bias"],
        "add_qkv_bias": own["attention_bias"] != "none",
        "qk_layernorm": latent or own["qk_norm"] is not None,
        "transformer_impl": "transformer_engine",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        **_activation_args(model, own),
        **rotary_args(model, own),
    }
    if latent:
        args |= {"multi_latent_attention": True, "q_lora_rank": model.get("q_lora_rank")}
        args |= {name: model[name] for name in LATENT}
    if own["attention_sinks"] or own["softmax_off_by_one"]:
        args["softmax_type"] = "learnable" if own["attention_sinks"] else "off-by-one"
    if model.get("sliding_window"):
        args["window_size"] = (model["sliding_window"] - 1, 0)
        if own["layer_types"] is not None:
            args["window_attn_skip_freq"] = [int(each == "sliding_attention") for each in own["layer_types"]]
    if model.get("mtp_num_layers"):
        args["mtp_num_layers"] = model["mtp_num_layers"]
    return args | (router_args(model) if model.get("num_experts") else {})


def _activation_args(model: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    if model["activation"] == "swiglu":
        return {"swiglu": True}
    clamped = model["activation"] == "clamped_swiglu"
    slopes = {QUICK_SLOPE: "quick_geglu"} | ({1.0: "swiglu"} if clamped else {})
    if own["swiglu_alpha"] not in slopes:
        raise UnsupportedError(f"Megatron-core: swiglu_alpha = {own['swiglu_alpha']:g}: must be {QUICK_SLOPE} or 1")
    return {
        slopes[own["swiglu_alpha"]]: True,
        "glu_linear_offset": own["swiglu_offset"],
        **({"activation_func_clamp_value": own["swiglu_limit"]} if clamped else {}),
    }
