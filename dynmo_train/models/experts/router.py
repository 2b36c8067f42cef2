"""Scores of a router, the experts that a token chooses by them, and the weights of their outputs.

::

    logits_NE ─▶ scores_NE ─┬─▶ + bias ─▶ best groups ─▶ best experts  expert_NC      no gradient
                            ├─▶ gather by expert_NC ─▶ normalize ─▶ scale  weights_NC
                            └─▶ normalize over all experts  probabilities_NE, for balance losses

A bias of each expert changes the choice and not the weights, so that it has no gradient (Wang et al. 2024,
arXiv:2408.15664). Groups limit a token to the experts of a few of them (DeepSeek-AI 2024, arXiv:2412.19437, section
2.1.2). Everything is float32; ties go to the lower expert.

Shapes in names: N tokens of a microbatch, E experts, C experts per token, G groups, J experts of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .moe_routing import sinkhorn

if TYPE_CHECKING:
    from ...config import Config

SOFTMAX, SIGMOID = "softmax", "sigmoid"
# Sigmoids of very negative logits underflow; the sum of the chosen ones must not be zero. As DeepSeek-V3.
TINY = 1e-20
# The loads of 8 to 256 experts are then equal to 1e-5, for 4,096 tokens with logits of a standard deviation of 3. The
# host would have to read a tolerance in each round.
SINKHORN_ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """How a token chooses its experts, and what weighs their outputs.

    Attributes:
        score_function: ``softmax`` over all experts, or ``sigmoid`` of each logit.
        pre_softmax: whether the weights are the probabilities themselves; False divides them by the sum of the chosen.
        scaling_factor: factor on the weights; None is 1.
        expert_bias: whether the choice adds a bias of each expert, which the training updates by the experts' loads.
        bias_update_rate: change of a bias per step.
        bias: whether the logits have a learned bias, with a gradient.
        num_groups: number of equal groups of consecutive experts; None is one.
        group_topk: number of groups whose experts a token may choose.
        group_experts: number of the best experts of a group whose scores are added to the score of the group; None is
            ``top_k / group_topk``.
    """

    score_function: str = SOFTMAX
    pre_softmax: bool = False
    scaling_factor: float | None = None
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    bias: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    group_experts: int | None = None

    @property
    def chooses_by_scores(self) -> bool:
        """Whether a token chooses its highest scores, without biases and groups."""
        return not self.expert_bias and self.num_groups is None

    def manifest(self) -> dict[str, object]:
        """The fields of a manifest's ``model`` object; the update rate does not change what the model computes."""
        own = {"moe_router_bias": True} if self.bias else {}
        return {
            **own,
            "moe_router_score_function": self.score_function,
            "moe_router_pre_softmax": self.pre_softmax,
            "moe_router_topk_scaling_factor": self.scaling_factor,
            "moe_router_enable_expert_bias": self.expert_bias,
            "moe_router_num_groups": self.num_groups,
            "moe_router_group_topk": self.group_topk,
            # Only where it is stated: most models have the rule.
            **({} if self.group_experts is None else {"moe_router_group_experts": self.group_experts}),
        }

    @classmethod
    def from_config(cls, config: Config) -> RouterShape:
        """The router of a run."""
        model = config.model
        return cls(
            score_function=model.moe_router_score_function,
            pre_softmax=model.moe_router_pre_softmax,
            scaling_factor=model.moe_router_topk_scaling_factor,
            expert_bias=model.moe_router_enable_expert_bias,
            bias_update_rate=model.moe_router_bias_update_rate,
            bias=model.moe_router_bias,
            num_groups=model.moe_router_num_groups,
            group_topk=model.moe_router_group_topk,
            group_experts=model.moe_router_group_experts,
        )

    @classmethod
    def of_manifest(cls, model: Mapping[str, Any]) -> RouterShape:
        """The router of a manifest's ``model`` object; older manifests have none of its fields."""
        return cls(
            score_function=model.get("moe_router_score_function", SOFTMAX),
            pre_softmax=model.get("moe_router_pre_softmax", False),
            scaling_factor=model.get("moe_router_topk_scaling_factor"),
            expert_bias=model.get("moe_router_enable_expert_bias", False),
            bias=model.get("moe_router_bias", False),
            num_groups=model.get("moe_router_num_groups"),
            group_topk=model.get("moe_router_group_topk"),
            group_experts=model.get("moe_router_group_experts"),
        )

    def scores(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """The scores of all experts, float32 ``[N, E]``, of ``logits_NE``."""
        return logits_NE.sigmoid() if self.score_function == SIGMOID else logits_NE.softmax(-1)

    def probabilities(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """``scores_NE`` as a distribution over the experts of each token, ``[N, E]``: what balance losses average."""
        if self.score_function == SIGMOID:
            return scores_NE / (scores_NE.sum(-1, keepdim=True) + TINY)
        return scores_NE

    def choose(self, scores_NE: torch.Tensor, top_k: int, bias_E: torch.Tensor | None) -> torch.Tensor:
        """The experts of each token, best first, int64 ``[N, C]``.

        Args:
            scores_NE: result of :meth:`scores`.
            top_k: experts per token C.
            bias_E: float32 bias of each expert; None is 0.
        """
        scores_NE = scores_NE.detach()
        if bias_E is not None:
            scores_NE = scores_NE + bias_E
        if self.num_groups is not None and self.group_topk is not None:
            summed = self.group_experts or top_k // self.group_topk
            scores_NE = within_groups(scores_NE, self.num_groups, self.group_topk, summed)
        return best(scores_NE, top_k)

    def weights(self, scores_NE: torch.Tensor, expert_NC: torch.Tensor) -> torch.Tensor:
        """The weight of each choice, ``[N, C]``, with gradient.

        Args:
            scores_NE: result of :meth:`scores`.
            expert_NC: chosen experts.
        """
        weights_NC = scores_NE.gather(1, expert_NC)
        if self.score_function == SIGMOID:
            # One sigmoid divided by itself would be 1, without a gradient for the router.
            if expert_NC.shape[1] > 1:
                weights_NC = weights_NC / (weights_NC.sum(-1, keepdim=True) + TINY)
        elif not self.pre_softmax:
            weights_NC = weights_NC / weights_NC.sum(-1, keepdim=True)
        return weights_NC if self.scaling_factor is None else weights_NC * self.scaling_factor


def best(scores_NE: torch.Tensor, top_k: int) -> torch.Tensor:
    """The ``top_k`` experts of the highest ``scores_NE`` ``[N, E]`` of each token, best first, int64 ``[N, C]``."""
    # Not ``topk``, whose order of equal scores differs by device.
    return scores_NE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def within_groups(scores_NE: torch.Tensor, num_groups: int, group_topk: int, summed: int) -> torch.Tensor:
    """The scores ``[N, E]``, minus infinity outside the best groups of each token.

    The score of a group is the sum of its best experts: of two in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), of one
    in DeepSeek-V2 (arXiv:2405.04434, section 2.2.2).

    Args:
        scores_NE: scores, with the biases.
        num_groups: number of groups G, a divisor of E.
        group_topk: number of groups that a token may use.
        summed: number of the best experts of a group whose scores are added.
    """
    scores_NGJ: torch.Tensor = scores_NE.unflatten(1, (num_groups, -1))
    best_NGJ = scores_NGJ.sort(dim=-1, descending=True, stable=True).values
    groups_N = best(best_NGJ[..., :summed].sum(-1), group_topk)
    is_open_NG = torch.zeros(scores_NGJ.shape[:2], dtype=torch.bool, device=scores_NE.device)
    is_open_NG.scatter_(1, groups_N, torch.ones_like(groups_N, dtype=torch.bool))
    return scores_NGJ.masked_fill(~is_open_NG[..., None], -math.inf).flatten(1)


def sinkhorn_choice(logits_NE: torch.Tensor, top_k: int, *, balanced: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by logits that Sinkhorn's algorithm has balanced (Clark et al. 2022, arXiv:2202.01169, section 3.1).

    Args:
        logits_NE: float32 output of the router.
        top_k: experts per token C.
        balanced: False chooses by the logits themselves, as evaluation must: the balance reads later tokens.

    Returns:
        int64 experts ``[N, C]``, without gradient; and their weights ``[N, C]``, the sigmoid of the logit for one
        expert per token, else the softmax over all experts.
    """
    expert_NC = best(sinkhorn(logits_NE, SINKHORN_ROUNDS) if balanced else logits_NE, top_k)
    gates_NE = logits_NE.sigmoid() if top_k == 1 else logits_NE.softmax(-1)
    return expert_NC, gates_NE.gather(1, expert_NC)
