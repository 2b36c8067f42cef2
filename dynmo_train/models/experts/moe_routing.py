"""Routing with equal loads of all experts: expert choice, and balanced assignment.

Both read all tokens of a microbatch, so they are for training alone; evaluation routes each token to its experts of the
highest probability. Both are deterministic; ties go to the lower expert and the earlier token.

Shapes in names: N tokens of a microbatch, E experts, C tokens of an expert.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

SINKHORN_ROUNDS = 8


def expert_choice(probabilities_NE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each expert chooses its ``ceil(N top_k / E)`` likeliest tokens (Zhou et al. 2022, arXiv:2202.09368, section 3.2).

    Args:
        probabilities_NE: softmax of the router's logits, ``[N, E]``.
        top_k: mean number of experts per token.

    Returns:
        int64 tokens ``[E, C]`` and their probabilities ``[E, C]``, with gradient.
    """
    tokens, experts = probabilities_NE.shape
    capacity = min(tokens, math.ceil(tokens * top_k / experts))
    sorted_EN, order_EN = probabilities_NE.t().sort(dim=1, descending=True, stable=True)
    return order_EN[:, :capacity], sorted_EN[:, :capacity]


def sinkhorn(logits_NE: torch.Tensor, rounds: int = SINKHORN_ROUNDS) -> torch.Tensor:
    """Logits normalized to nearly equal loads of the experts (Clark et al. 2022, arXiv:2202.01169, section 3.1).

    Args:
        logits_NE: the router's output, ``[N, E]``, on any device.
        rounds: number of normalizations of columns and rows.

    Returns:
        float64 ``[N, E]``: the log of a matrix whose rows sum to 1 and whose columns sum nearly to N/E.
    """
    plan_NE = logits_NE.detach().double()
    share = math.log(plan_NE.shape[0] / plan_NE.shape[1])
    for _ in range(rounds):
        plan_NE = plan_NE - plan_NE.logsumexp(0, keepdim=True) + share
        plan_NE = plan_NE - plan_NE.logsumexp(1, keepdim=True)
    return plan_NE


def balanced_assignment(logits_NE: torch.Tensor) -> torch.Tensor:
    """One expert for each token, int64 ``[N]``; no expert gets more than ``ceil(N / E)`` tokens.

    The assignment of BASE layers (Lewis et al. 2021, arXiv:2103.16716, section 2.1), with Sinkhorn's matrix instead of
    the auction's prices. It is made exact in rounds: each unassigned token requests the likeliest expert with remaining
    capacity, and each expert accepts the likeliest requests up to its capacity.

    Args:
        logits_NE: the router's output, ``[N, E]``, on any device; the assignment has no gradient.
    """
    plan_NE = sinkhorn(logits_NE)
    tokens, experts = plan_NE.shape
    left_E = torch.full((experts,), math.ceil(tokens / experts), device=plan_NE.device)
    assigned_N = torch.full((tokens,), experts, device=plan_NE.device)
    # Each round fills an expert or assigns all tokens, so this many are enough, and none has to be read.
    for _ in range(experts):
        is_waiting_N = assigned_N == experts
        if plan_NE.device.type == "cpu" and not bool(is_waiting_N.any()):
            break
        likeliest = plan_NE.masked_fill(left_E == 0, -math.inf).max(1)
        requested_N = likeliest.indices.where(is_waiting_N, experts)
        accepted_N = is_waiting_N & (_places(requested_N, likeliest.values) < F.pad(left_E, (0, 1))[requested_N])
        assigned_N = torch.where(accepted_N, requested_N, assigned_N)
        left_E = left_E.scatter_add(0, likeliest.indices, -accepted_N.long())
    return assigned_N


def _places(requested_N: torch.Tensor, values_N: torch.Tensor) -> torch.Tensor:
    """Each request's place among those of the same expert, int64 ``[N]`` from 0: highest value first, then token."""
    order_N = values_N.argsort(descending=True, stable=True)
    order_N = order_N[requested_N[order_N].argsort(stable=True)]
    sorted_N = requested_N[order_N]
    first_N = torch.searchsorted(sorted_N, sorted_N)
    places_N = torch.arange(len(order_N), device=order_N.device) - first_N
    return torch.empty_like(places_N).scatter(0, order_N, places_N)
