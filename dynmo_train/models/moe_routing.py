"""Routing of tokens to experts in which every expert has as much to do: expert choice, and balanced assignment.

Both look at all tokens of a microbatch, so they are for training alone: in evaluation a token takes its likeliest
experts. Everything is deterministic; ties go to the lower expert and the earlier token.

Shapes in names: N tokens of a microbatch, E experts, C tokens of an expert.
"""

from __future__ import annotations

import math

import torch

SINKHORN_ROUNDS = 8


def expert_choice(probabilities_NE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each expert takes its likeliest ``ceil(N top_k / E)`` tokens (Zhou et al. 2022, arXiv:2202.09368, section 3.2).

    Returns:
        Tokens ``[E, C]`` and their probabilities ``[E, C]``, with gradient.
    """
    tokens, experts = probabilities_NE.shape
    capacity = min(tokens, math.ceil(tokens * top_k / experts))
    sorted_EN, order_EN = probabilities_NE.t().sort(dim=1, descending=True, stable=True)
    return order_EN[:, :capacity], sorted_EN[:, :capacity]


def sinkhorn(logits_NE: torch.Tensor, rounds: int = SINKHORN_ROUNDS) -> torch.Tensor:
    """Logits scaled so that every expert gets about as much in all (Clark et al. 2022, arXiv:2202.01169, section 3.1).

    float64, ``[N, E]``: the logarithm of a plan whose rows add up to 1 and whose columns to N/E, nearly.
    """
    plan_NE = logits_NE.detach().to("cpu", torch.float64)
    share = math.log(plan_NE.shape[0] / plan_NE.shape[1])
    for _ in range(rounds):
        plan_NE = plan_NE - plan_NE.logsumexp(0, keepdim=True) + share
        plan_NE = plan_NE - plan_NE.logsumexp(1, keepdim=True)
    return plan_NE


def balanced_assignment(logits_NE: torch.Tensor) -> torch.Tensor:
    """One expert for each token, ``[N]``; no expert gets more than ``ceil(N / E)`` tokens.

    As BASE layers (Lewis et al. 2021, arXiv:2103.16716, section 2.1) assign, with Sinkhorn's plan in place of the
    auction's prices, made exact in rounds: each token without an expert asks the likeliest one with room, and each
    expert takes the likeliest askers up to its room.
    """
    plan_NE = sinkhorn(logits_NE)
    tokens, experts = plan_NE.shape
    room = [math.ceil(tokens / experts)] * experts
    assigned_N = torch.full((tokens,), -1, dtype=torch.int64)
    waiting = torch.arange(tokens)
    while waiting.numel():
        full = torch.tensor([left == 0 for left in room])
        best = plan_NE[waiting].masked_fill(full, float("-inf")).max(1)
        for expert in range(experts):
            asking = (best.indices == expert).nonzero()[:, 0]
            if asking.numel():
                order = best.values[asking].argsort(descending=True, stable=True)
                taken = waiting[asking[order[: room[expert]]]]
                assigned_N[taken] = expert
                room[expert] -= len(taken)
        waiting = (assigned_N < 0).nonzero()[:, 0]
    return assigned_N.to(logits_NE.device)
