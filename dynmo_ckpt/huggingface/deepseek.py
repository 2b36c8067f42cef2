"""DeepSeek-V2 and V3 of transformers: their configurations both ways. Pure.

Both have multi-head latent attention, dense blocks before those with experts, and shared experts. They differ by the
router: V2 takes the softmax over all experts, V3 sigmoids with a bias for the choice. Facts about what transformers
reads of a configuration are in ``maps/config_keys.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._common.document import finite_number, short_repr
from ..io.errors import CorruptError, UnsupportedError
from ..maps.decoder_fields import LLAMA, decoder_fields
from .config_keys import experts_per_token, size
from .decoder_rotary import rotary_config, rotary_fields
from .decoders import ROTARY, SILENT

Config = Mapping[str, Any]
Model = dict[str, Any]
KINDS: Mapping[str, str] = {"deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM"}
# Field of a manifest -> key of a configuration.
LATENT: Mapping[str, str] = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
# Best experts of a group whose scores are added.
GROUP_EXPERTS: Mapping[str, int] = {"deepseek_v2": 1, "deepseek_v3": 2}


def deepseek_model(kind: str, config: Config) -> Model:
    """The ``model`` of a manifest, without the vocabulary.

    Args:
        kind: ``model_type`` of transformers.
        config: a configuration with the defaults of transformers.

    Raises:
        CorruptError: an invalid size.
        UnsupportedError: a variant that DynMo does not implement.
    """
    layers, heads = size(config, "num_hidden_layers"), size(config, "num_attention_heads")
    positions = size(config, "max_position_embeddings")
    if config["num_key_value_heads"] not in (None, heads):
        raise UnsupportedError(
            f"num_key_value_heads {short_repr(config['num_key_value_heads'])}: must be num_attention_heads {heads}"
        )
    rotary = rotary_fields(config, positions, ROTARY)
    sizes = {
        name: size(config, key) for name, key in LATENT.items() if name != "q_lora_rank" or config[key] is not None
    }
    if sizes["qk_pos_emb_head_dim"] % 2:
        raise UnsupportedError(f"qk_rope_head_dim {sizes['qk_pos_emb_head_dim']}: must be even")
    own: dict[str, Any] = {"attention_bias": "all" if config["attention_bias"] else "none"}
    own["mlp_bias"] = bool(config["mlp_bias"]) if kind == "deepseek_v2" else False
    return {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": size(config, "hidden_size"),
        "ffn_hidden_size": size(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"],
        "max_position_embeddings": positions,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rotary",
        "rotary_base": rotary["rotary_base"],
        "rotary_scaling": rotary["rotary_scaling"],
        "tied_embeddings": config["tie_word_embeddings"],
        **{name: value for name, value in own.items() if value != LLAMA[name]},
        **sizes,
        "rotary_interleaved": kind == "deepseek_v2" or bool(config["rope_interleave"]),
        **_experts(kind, config, layers),
    }


def _experts(kind: str, config: Config, layers: int) -> Model:
    """The fields of the experts; empty where all blocks are dense."""
    dense = config["first_k_dense_replace"] or 0
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise CorruptError(f"config.json: first_k_dense_replace must be an integer, found {short_repr(dense)}")
    if dense >= layers:
        return {}
    if kind == "deepseek_v2" and config["mlp_bias"]:
        raise UnsupportedError("mlp_bias = True with experts: DynMo's experts have biases where its MLPs have them")
    inner = size(config, "moe_intermediate_size")
    model: Model = {
        "num_experts": size(config, "n_routed_experts"),
        "moe_top_k": experts_per_token(config, "n_routed_experts"),
        "moe_aux_loss_coeff": 0.0,
        "moe_routing": "topk",
        "moe_shared_ffn_size": inner * size(config, "n_shared_experts"),
        "moe_shared_gate": False,
    }
    if inner != config["intermediate_size"]:
        model["moe_ffn_hidden_size"] = inner
    if dense:
        model["moe_layer_pattern"] = [0] * dense + [1] * (layers - dense)
    scale = config["routed_scaling_factor"]
    if not (finite_number(scale) or 0) > 0:
        raise CorruptError(f"config.json: routed_scaling_factor must be a positive number, found {short_repr(scale)}")
    if scale != 1:
        model["moe_router_topk_scaling_factor"] = float(scale)
    return model | (_softmax(config) if kind == "deepseek_v2" else _sigmoid(config)) | _groups(kind, config, model)


def _softmax(config: Config) -> Model:
    if config["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(
            f"topk_method {short_repr(config['topk_method'])}: must be greedy or group_limited_greedy"
        )
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}


def _sigmoid(config: Config) -> Model:
    if bool(config["norm_topk_prob"]) != (config["num_experts_per_tok"] > 1):
        raise UnsupportedError(
            f"norm_topk_prob = {config['norm_topk_prob']} with num_experts_per_tok {config['num_experts_per_tok']}:"
            " DynMo normalizes the weights of several experts, and not that of one"
        )
    return {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def _groups(kind: str, config: Config, model: Config) -> Model:
    """Groups that limit the choice; empty where a token may choose all experts."""
    if kind == "deepseek_v2" and config["topk_method"] == "greedy":
        return {}
    groups, chosen = (size(config, key) for key in ("n_group", "topk_group"))
    experts, top_k, summed = model["num_experts"], model["moe_top_k"], GROUP_EXPERTS[kind]
    if experts % groups or chosen > groups or experts // groups < summed or top_k > chosen * (experts // groups):
        raise UnsupportedError(
            f"n_group {groups} and topk_group {chosen}: must be groups of at least {summed} of the {experts} experts,"
            f" with {top_k} experts in the chosen ones"
        )
    if chosen == groups:
        return {}
    own = {} if (top_k % chosen, top_k // chosen) == (0, summed) else {"moe_router_group_experts": summed}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen, **own}


def deepseek_kind(model: Config) -> str:
    """The ``model_type`` of transformers that computes a model with latent attention.

    Args:
        model: the ``model`` of a manifest.

    Raises:
        UnsupportedError: transformers has no such model.
    """
    unlike = {kind: _unlike(kind, model) for kind in KINDS}
    found = next((kind for kind, reason in unlike.items() if not reason), None)
    if found is None:
        is_v3 = model.get("moe_router_score_function") == "sigmoid"
        kind = "deepseek_v3" if is_v3 else "deepseek_v2"
        raise UnsupportedError(f"{KINDS[kind]} does not implement {unlike[kind]}; use --to native")
    return found


def _unlike(kind: str, model: Config) -> str:
    """A field by which a model is not what an architecture computes; empty where there is none."""
    own = decoder_fields(model)
    biases = {"attention_bias": ("none", "all"), "mlp_bias": (False, True) if kind == "deepseek_v2" else (False,)}
    for name, value in LLAMA.items():
        if name not in SILENT and own[name] not in biases.get(name, (value,)):
            return f"{name} = {own[name]}"
    needed: dict[str, Any] = {"activation": "swiglu", "sliding_window": None, "embedding_scale": 1.0}
    if kind == "deepseek_v2":
        needed["rotary_interleaved"] = True
    experts = bool(model.get("num_experts"))
    if experts:
        needed |= {"moe_routing": "topk", "moe_shared_gate": False, "mlp_bias": False}
        sigmoid = kind == "deepseek_v3"
        needed["moe_router_score_function"] = "sigmoid" if sigmoid else "softmax"
        needed |= {"moe_router_enable_expert_bias": sigmoid, "moe_router_pre_softmax": not sigmoid}
        if model.get("moe_router_num_groups"):
            summed = model.get("moe_router_group_experts") or model["moe_top_k"] // model["moe_router_group_topk"]
            if summed != GROUP_EXPERTS[kind]:
                return f"the score of a group as the sum of its best {summed} experts"
    defaults = {"rotary_interleaved": True, "moe_routing": "topk", "moe_router_score_function": "softmax"}
    defaults |= dict.fromkeys(("moe_shared_gate", "mlp_bias"), False)
    defaults |= dict.fromkeys(("moe_router_enable_expert_bias", "moe_router_pre_softmax"), False)
    for name, value in needed.items():
        found = model.get(name, defaults.get(name, value))
        if found != value:
            return f"{name} = {found}"
    pattern = model.get("moe_layer_pattern") or []
    if pattern != sorted(pattern):
        return "dense blocks between those with experts"
    shared, inner = model.get("moe_shared_ffn_size", 0), _inner(model)
    if experts and (not shared or shared % inner):
        return f"shared experts of width {shared}, which must be a multiple of that of an expert {inner}"
    return ""


def _inner(model: Config) -> int:
    return int(model.get("moe_ffn_hidden_size", model["ffn_hidden_size"]))


def deepseek_config(kind: str, model: Config) -> dict[str, Any]:
    """The fields of a configuration, ``architectures`` included.

    Args:
        kind: ``model_type`` of transformers.
        model: the ``model`` of a manifest.
    """
    own, layers, inner = decoder_fields(model), model["num_layers"], _inner(model)
    groups = model.get("moe_router_num_groups")
    dense = layers - sum(model.get("moe_layer_pattern", [1] * layers)) if model.get("num_experts") else layers
    config = {
        "architectures": [KINDS[kind]],
        "hidden_act": "silu",
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "moe_intermediate_size": inner,
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_attention_heads"],
        "num_hidden_layers": layers,
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": model["layernorm_epsilon"],
        **rotary_config(own, model, ROTARY),
        "attention_bias": own["attention_bias"] == "all",
        **{key: model.get(name) for name, key in LATENT.items()},
        "first_k_dense_replace": dense,
        "n_routed_experts": model.get("num_experts", 1),
        "n_shared_experts": model.get("moe_shared_ffn_size", inner) // inner,
        "num_experts_per_tok": model.get("moe_top_k", 1),
        "routed_scaling_factor": model.get("moe_router_topk_scaling_factor") or 1.0,
        "n_group": groups or 1,
        "topk_group": model.get("moe_router_group_topk") if groups else 1,
    }
    if kind == "deepseek_v2":
        method = "group_limited_greedy" if groups else "greedy"
        return {**config, "mlp_bias": own["mlp_bias"], "topk_method": method, "norm_topk_prob": False}
    return {
        **config,
        "norm_topk_prob": model.get("moe_top_k", 2) > 1,
        "rope_interleave": model.get("rotary_interleaved", True),
        "num_nextn_predict_layers": model.get("mtp_num_layers", 0),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def prediction_layers(config: Config, names: set[str]) -> int:
    """Number of layers of multi-token prediction in a file, by the names of its tensors.

    Not of the configuration: transformers writes its number, and leaves the layers out.

    Args:
        config: the contents of a ``config.json``.
        names: of the tensors.
    """
    layers, count = config.get("num_hidden_layers"), 0
    if isinstance(layers, int) and config.get("model_type") in KINDS:
        while f"model.layers.{layers + count}.eh_proj.weight" in names:
            count += 1
    return count
