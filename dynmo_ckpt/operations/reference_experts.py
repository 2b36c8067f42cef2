"""Weights of a router's experts in numpy: softmax or sigmoid scores, biases of the choice, groups, a factor.

Shapes: T tokens, E experts, G groups, J experts of a group. Sources: Mixtral (arXiv:2401.04088, section 2.1),
DeepSeek-V2 (arXiv:2405.04434, section 2.2), DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def expert_weights(model: Mapping[str, Any], logits_TE: Array, bias_E: Array | None) -> Array:
    """The weight of each expert, ``[T, E]``; 0 for those that a token does not choose.

    Args:
        model: the ``model`` of a manifest.
        logits_TE: the router's output.
        bias_E: biases of the experts, for the choice alone; None: 0.
    """
    top_k, sigmoid = model["moe_top_k"], model.get("moe_router_score_function") == "sigmoid"
    # Without the maximum, exp could overflow; the factor cancels in the divisions below.
    weights_TE: Array = np.exp(-logits_TE if sigmoid else logits_TE - logits_TE.max(-1, keepdims=True))
    if sigmoid:
        weights_TE = np.reciprocal(1 + weights_TE)
    if not sigmoid and model.get("moe_router_pre_softmax"):
        weights_TE /= weights_TE.sum(-1, keepdims=True)
    scores_TE = weights_TE if bias_E is None else weights_TE + bias_E
    if model.get("moe_router_num_groups"):
        scores_TE = _within_groups(model, scores_TE)
    order_TE = np.argsort(-scores_TE, axis=-1, kind="stable")
    np.put_along_axis(weights_TE, order_TE[:, top_k:], 0, axis=-1)
    # The sigmoid of one expert is not normalized: it would be 1.
    if top_k > 1 if sigmoid else not model.get("moe_router_pre_softmax"):
        weights_TE /= weights_TE.sum(-1, keepdims=True)
    result: Array = weights_TE * np.float32(model.get("moe_router_topk_scaling_factor") or 1)
    return result


def _within_groups(model: Mapping[str, Any], scores_TE: Array) -> Array:
    groups, chosen = model["moe_router_num_groups"], model["moe_router_group_topk"]
    summed = model.get("moe_router_group_experts") or model["moe_top_k"] // chosen
    scores_TGJ = scores_TE.reshape(len(scores_TE), groups, -1)
    best_TG = -np.sort(-scores_TGJ, axis=-1)[..., :summed].sum(-1)
    closed_TG = np.argsort(-best_TG, axis=-1, kind="stable")[:, chosen:]
    open_TGJ = scores_TGJ.copy()
    np.put_along_axis(open_TGJ, closed_TG[..., None], -np.inf, axis=1)
    return open_TGJ.reshape(scores_TE.shape)
