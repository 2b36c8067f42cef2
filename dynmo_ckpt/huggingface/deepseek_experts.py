"""Experts of DeepSeek-V2 and V3, which other models have too: fields of a manifest and keys of a configuration. Pure.

V2 takes the softmax over all experts; V3 takes sigmoids, with a bias for the choice. Shared experts compute all tokens,
and the first blocks may be dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._common.document import finite_number, short_repr
from ..io.errors import CorruptError, UnsupportedError
from .config_keys import experts_per_token, size

Config = Mapping[str, Any]
Model = dict[str, Any]
# Best experts of a group whose scores are added.
GROUP_EXPERTS: Mapping[str, int] = {"deepseek_v2": 1, "deepseek_v3": 2}


def expert_fields(kind: str, config: Config, layers: int, first_dense: Any) -> Model:
    """The fields of the experts; empty where all blocks are dense.

    Args:
        kind: ``deepseek_v2``, or ``deepseek_v3`` for all models with its router.
        config: a configuration with the defaults of transformers.
        layers: number of layers.
        first_dense: number of first blocks without experts, as the configuration has it.

    Raises:
        CorruptError: an invalid value.
        UnsupportedError: a router that DynMo does not implement.
    """
    dense = first_dense or 0
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


def expert_keys(model: Config) -> dict[str, Any]:
    """The keys of the experts that V2, V3 and the models with their routers have.

    Args:
        model: the ``model`` of a manifest.
    """
    layers, inner, groups = model["num_layers"], expert_width(model), model.get("moe_router_num_groups")
    dense = layers - sum(model.get("moe_layer_pattern", [1] * layers)) if model.get("num_experts") else layers
    return {
        "moe_intermediate_size": inner,
        "first_k_dense_replace": dense,
        "n_routed_experts": model.get("num_experts", 1),
        "n_shared_experts": model.get("moe_shared_ffn_size", inner) // inner,
        "num_experts_per_tok": model.get("moe_top_k", 1),
        "routed_scaling_factor": model.get("moe_router_topk_scaling_factor") or 1.0,
        "n_group": groups or 1,
        "topk_group": model.get("moe_router_group_topk") if groups else 1,
    }


def expert_width(model: Config) -> int:
    """The width inside an expert."""
    return int(model.get("moe_ffn_hidden_size", model["ffn_hidden_size"]))


def unlike_experts(kind: str, model: Config) -> str:
    """A field by which the experts of a model are not those of an architecture; empty where there is none.

    Args:
        kind: as of :func:`expert_fields`.
        model: the ``model`` of a manifest with experts.
    """
    if model.get("moe_router_num_groups"):
        summed = model.get("moe_router_group_experts") or model["moe_top_k"] // model["moe_router_group_topk"]
        if summed != GROUP_EXPERTS[kind]:
            return f"the score of a group as the sum of its best {summed} experts"
    pattern = model.get("moe_layer_pattern") or []
    if pattern != sorted(pattern):
        return "dense blocks between those with experts"
    shared = model.get("moe_shared_ffn_size", 0)
    if not shared or shared % expert_width(model):
        return f"shared experts of width {shared}, which must be a multiple of that of an expert"
    return ""
