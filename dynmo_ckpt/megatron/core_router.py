"""The router of a decoder with experts, from Megatron-core's arguments and to them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._common.document import finite_number, short_repr
from ..io.errors import UnsupportedError
from .arguments import count_of, number_of

Args = Mapping[str, Any]


def router_of_args(path: str, args: Args, experts: int) -> dict[str, Any]:
    """The fields of a manifest's ``model``.

    Args:
        path: the checkpoint, for messages.
        args: its arguments.
        experts: number of experts, by the tensors.

    Raises:
        UnsupportedError: a number of experts that contradicts the tensors, or no recorded number of chosen ones.
    """
    top_k, recorded = count_of(path, args, "moe_router_topk"), args.get("num_experts", experts)
    if top_k is None or top_k > experts or recorded != experts:
        raise UnsupportedError(
            f"{path}: moe_router_topk = {short_repr(top_k)} and num_experts = {short_repr(recorded)} do not fit the "
            f"{experts} rows of the router"
        )
    coefficient = args.get("moe_aux_loss_coeff")
    if isinstance(coefficient, list | tuple):  # one for each of several losses
        coefficient = sum(filter(None, map(finite_number, coefficient)))
    found: dict[str, Any] = {
        "moe_top_k": top_k,
        "moe_aux_loss_coeff": finite_number(coefficient) or 0.0,
        "moe_routing": "topk",
    }
    sigmoid = args.get("moe_router_score_function") == "sigmoid"
    if sigmoid:
        found["moe_router_score_function"] = "sigmoid"
    elif args.get("moe_router_pre_softmax"):
        found["moe_router_pre_softmax"] = True
    if args.get("moe_router_enable_expert_bias"):
        found["moe_router_enable_expert_bias"] = True
    if (factor := number_of(path, args, "moe_router_topk_scaling_factor")) not in (None, 0.0, 1.0):
        found["moe_router_topk_scaling_factor"] = factor
    groups, chosen = (count_of(path, args, f"moe_router_{name}") for name in ("num_groups", "group_topk"))
    # All groups together limit nothing.
    if groups and chosen and groups != chosen:
        if experts % groups or chosen > groups or top_k % chosen or top_k // chosen > experts // groups:
            raise UnsupportedError(
                f"{path}: moe_router_num_groups = {groups} and moe_router_group_topk = {chosen} do not fit {experts} "
                f"experts, of which a token has {top_k}"
            )
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return found


def router_args(model: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-LM.

    Args:
        model: the ``model`` of a manifest with experts.

    Raises:
        UnsupportedError: groups whose score is not the one that Megatron-core computes.
    """
    top_k, inner = model["moe_top_k"], model.get("moe_ffn_hidden_size", model["ffn_hidden_size"])
    groups, chosen = model.get("moe_router_num_groups"), model.get("moe_router_group_topk")
    summed = model.get("moe_router_group_experts")
    if groups and summed is not None and summed != top_k // chosen:
        raise UnsupportedError(
            f"Megatron-core: moe_router_group_experts = {summed}: its score of a group is that of the best "
            f"{top_k // chosen}, moe_top_k by moe_router_group_topk; use --to hf or native"
        )
    sigmoid = model.get("moe_router_score_function") == "sigmoid"
    args: dict[str, Any] = {
        "num_experts": model["num_experts"],
        "moe_ffn_hidden_size": inner,
        "moe_layer_freq": model.get("moe_layer_pattern", 1),
        "moe_router_topk": top_k,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": bool(model.get("moe_router_pre_softmax")) and not sigmoid,
        "moe_router_topk_scaling_factor": model.get("moe_router_topk_scaling_factor"),
        "moe_router_enable_expert_bias": bool(model.get("moe_router_enable_expert_bias")),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen if groups else None,
        "moe_router_load_balancing_type": "aux_loss" if model.get("moe_aux_loss_coeff") else "none",
        "moe_aux_loss_coeff": model.get("moe_aux_loss_coeff", 0.0),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    if model.get("moe_shared_ffn_size"):
        args["moe_shared_expert_intermediate_size"] = model["moe_shared_ffn_size"]
        args["moe_shared_expert_gate"] = bool(model.get("moe_shared_gate"))
    return args
