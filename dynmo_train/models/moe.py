"""A mixture of experts in place of an MLP: a router sends each token to a few of many MLPs (Shazeer et al. 2017).

Shapes in names: B samples, T tokens, N = B*T tokens of a microbatch, M = N*C slots, C experts per token, E experts,
D model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.expert_parallel import TokenDispatcher
from .blocks import FeedForward
from .layer_list import ItemOutput
from .moe_routing import balanced_assignment, expert_choice

if TYPE_CHECKING:
    from ..config import Config

TOPK, EXPERT_CHOICE, BALANCED = "topk", "expert-choice", "balanced"


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Sizes and losses of a mixture of experts.

    Attributes:
        num_experts: experts of a layer.
        top_k: experts of a token.
        aux_loss_coeff: weight of the load-balancing loss (Fedus et al. 2021, arXiv:2101.03961, section 2.2).
        z_loss_coeff: weight of the router's z-loss (Zoph et al. 2022, arXiv:2202.08906, equation 5).
        routing: ``topk`` (each token its likeliest experts), ``expert-choice`` (each expert its likeliest tokens) or
            ``balanced`` (one expert per token, equal numbers of tokens per expert); see ``moe_routing``.
        capacity_factor: an expert's maximum number of tokens of a microbatch, as a multiple of the even share; tokens
            of the lowest probability are dropped. None drops no token.
    """

    num_experts: int
    top_k: int = 2
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    capacity_factor: float | None = None
    routing: str = TOPK

    @property
    def metrics(self) -> tuple[tuple[str, int], ...]:
        """Metrics of a layer: both losses, unweighted, and the number of tokens of each expert."""
        return (("load_balancing_loss", 1), ("z_loss", 1), ("expert_tokens", self.num_experts))

    def manifest(self) -> dict[str, object]:
        """The fields of a manifest's ``model`` object."""
        return {
            "num_experts": self.num_experts,
            "moe_top_k": self.top_k,
            "moe_aux_loss_coeff": self.aux_loss_coeff,
            "moe_z_loss_coeff": self.z_loss_coeff,
            "moe_capacity_factor": self.capacity_factor,
            "moe_routing": self.routing,
        }

    @classmethod
    def from_config(cls, config: Config) -> MoeShape | None:
        """The experts of a run; None where it has none."""
        model = config.model
        if model.num_experts is None:
            return None
        return cls(
            num_experts=model.num_experts,
            top_k=model.moe_router_topk,
            aux_loss_coeff=model.moe_aux_loss_coeff,
            z_loss_coeff=model.moe_z_loss_coeff,
            capacity_factor=model.moe_expert_capacity_factor,
            routing=model.moe_routing,
        )

    @classmethod
    def of_manifest(cls, model: Mapping[str, Any]) -> MoeShape | None:
        """The experts of a manifest's ``model`` object; None where it has none."""
        if model.get("num_experts") is None:
            return None
        return cls(
            num_experts=model["num_experts"],
            top_k=model["moe_top_k"],
            aux_loss_coeff=model.get("moe_aux_loss_coeff", 0.0),
            z_loss_coeff=model.get("moe_z_loss_coeff", 0.0),
            capacity_factor=model.get("moe_capacity_factor"),
            routing=model.get("moe_routing", TOPK),
        )


class Routing(NamedTuple):
    """The assignment of a microbatch's tokens to experts.

    Attributes:
        order_M: int64 slots sorted by expert; slot ``n * C + c`` is choice ``c`` of token ``n``.
        counts: number of slots of each expert, ``E`` integers.
        weights_NC: float32 weights of each token's choices; 0 where the expert dropped the token.
        load_balancing: ``E sum_e f_e P_e`` with f the fraction of slots and P the mean probability: 1 at balance.
        z: mean squared log-sum-exp of the router's logits.
        chosen_E: int64 number of slots of each expert before any token was dropped.
    """

    order_M: torch.Tensor
    counts: list[int]
    weights_NC: torch.Tensor
    load_balancing: torch.Tensor
    z: torch.Tensor
    chosen_E: torch.Tensor


def route(logits_NE: torch.Tensor, moe: MoeShape, *, balanced: bool = False) -> Routing:
    """Choose the experts of highest probability for each token; normalized probabilities weigh their outputs.

    The result is a function of the microbatch alone; ties go to the lower expert and the earlier token.

    Args:
        logits_NE: the router's output, ``[N, E]``.
        moe: number of experts per token, capacity and routing.
        balanced: with the routing ``balanced``, assign one expert per token and equal numbers of tokens per expert;
            the weight is the sigmoid of the logit (Lewis et al. 2021, arXiv:2103.16716, section 2).
    """
    # In float32 in every precision: rounding would make ties, and so choices that depend on the dtype.
    logits_NE = logits_NE.float()
    experts = logits_NE.shape[1]
    probabilities_NE = logits_NE.softmax(-1)
    sorted_NE, ids_NE = probabilities_NE.sort(dim=-1, descending=True, stable=True)
    weights_NC, expert_NC = sorted_NE[:, : moe.top_k], ids_NE[:, : moe.top_k]
    weights_NC = weights_NC / weights_NC.sum(-1, keepdim=True)
    if moe.routing == BALANCED:
        expert_NC = balanced_assignment(logits_NE)[:, None] if balanced else ids_NE[:, :1]
        weights_NC = logits_NE.gather(1, expert_NC).sigmoid()
    expert_M = expert_NC.reshape(-1)
    # Before tokens are dropped: the loss must see the overload that it is to reduce.
    chosen_E = torch.bincount(expert_M, minlength=experts)
    fractions_E = chosen_E.float() / expert_M.numel()
    load_balancing = experts * (fractions_E * probabilities_NE.mean(0)).sum()
    z = logits_NE.logsumexp(-1).square().mean()
    if moe.capacity_factor is not None:
        capacity = math.ceil(moe.capacity_factor * expert_M.numel() / experts)
        within_M = _within_capacity(expert_M, weights_NC.detach().reshape(-1), chosen_E, capacity)
        weights_NC = weights_NC * within_M.view_as(weights_NC)
    order_M = expert_M.argsort(stable=True)
    return Routing(order_M, chosen_E.tolist(), weights_NC, load_balancing, z, chosen_E)


def _within_capacity(
    expert_M: torch.Tensor, weights_M: torch.Tensor, chosen_E: torch.Tensor, capacity: int
) -> torch.Tensor:
    """Whether each slot is among the ``capacity`` slots of largest weight of its expert, bool ``[M]``."""
    # Two stable sorts: by weight, then by expert. So each expert's slots are consecutive, the largest weight first.
    by_weight_M = weights_M.argsort(descending=True, stable=True)
    order_M = by_weight_M[expert_M[by_weight_M].argsort(stable=True)]
    begins_E = chosen_E.cumsum(0) - chosen_E
    rank_M = torch.arange(expert_M.numel(), device=expert_M.device) - begins_E[expert_M[order_M]]
    within_M = torch.zeros_like(expert_M, dtype=torch.bool)
    within_M[order_M] = rank_M < capacity
    return within_M


class Experts(nn.ModuleDict):
    """The experts of a layer on this process, by number; ``dispatcher`` reaches those of other processes."""

    dispatcher: TokenDispatcher | None = None

    def forward(self, sorted_MD: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Apply each expert to its rows; returns ``[M, D]``.

        Args:
            sorted_MD: rows sorted by expert, ``[M, D]``.
            counts: number of consecutive rows of each expert, ``E`` integers.
        """
        if self.dispatcher is not None:
            return self.dispatcher.run(sorted_MD, counts, self._apply_own)
        return self._apply_own(sorted_MD, counts)

    def _apply_own(self, sorted_MD: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = sorted_MD.split(counts)
        return torch.cat([expert(part) for expert, part in zip(self.values(), parts, strict=True)])

    def keep(self, dispatcher: TokenDispatcher) -> None:
        """Remove the experts of other processes; ``dispatcher`` reaches them."""
        self.dispatcher = dispatcher
        local = dispatcher.local_experts(len(self))
        # Experts keep their global numbers, so that their parameters have the same names at every size.
        for number in [number for number in self if int(number) not in local]:
            del self[number]


class MoeMlp(nn.Module):
    """``x + weighted sum of the chosen experts of norm(x)``, with auxiliary losses and the experts' loads.

    Args:
        moe: number of experts, routing and losses.
        width: model width D.
        inner: width inside each expert.
        activation: a key of ``blocks.ACTIVATIONS``.
        norm: normalization before the sublayer.
        device: where the parameters are created.
        bias: whether the experts' linear layers have biases; the router has none.
        dropout: dropout probability of the output.
    """

    def __init__(
        self,
        *,
        moe: MoeShape,
        width: int,
        inner: int,
        activation: str,
        norm: nn.Module,
        device: torch.device,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.moe, self.norm, self.dropout = moe, norm, dropout
        self.router = nn.Linear(width, moe.num_experts, bias=False, device=device)
        self.experts = Experts(
            {
                str(number): FeedForward(width=width, inner=inner, activation=activation, bias=bias, device=device)
                for number in range(moe.num_experts)
            }
        )

    def _by_token(self, x_ND: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The weighted sum of the outputs of each token's experts."""
        choices = routing.weights_NC.shape[1]
        # One row per slot: the backward of the indexing then adds no two rows, whose order CUDA does not fix.
        places_MD = x_ND[:, None].expand(-1, choices, -1).reshape(-1, x_ND.shape[-1])
        sorted_MD = self.experts(places_MD[routing.order_M], routing.counts)
        back_M = torch.empty_like(routing.order_M)
        back_M[routing.order_M] = torch.arange(back_M.numel(), device=back_M.device)
        y_NCD = sorted_MD[back_M].view(-1, choices, x_ND.shape[-1])
        y_ND: torch.Tensor = (y_NCD * routing.weights_NC[..., None].to(y_NCD.dtype)).sum(1)
        return y_ND

    def _by_expert(self, x_ND: torch.Tensor, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert choice: the weighted sum, and the number of experts that chose each token."""
        token_EC, weight_EC = expert_choice(logits_NE.float().softmax(-1), self.moe.top_k)
        token_M = token_EC.reshape(-1)
        sorted_MD = self.experts(x_ND.index_select(0, token_M), [token_EC.shape[1]] * self.moe.num_experts)
        weighted_MD = sorted_MD * weight_EC.reshape(-1, 1).to(sorted_MD.dtype)
        return torch.zeros_like(x_ND).index_add(0, token_M, weighted_MD), torch.bincount(token_M, minlength=len(x_ND))

    def forward(self, x_BTD: torch.Tensor) -> ItemOutput:
        """Apply the sublayer with its residual to the stream ``x_BTD`` ``[B, T, D]``.

        Returns:
            The stream ``[B, T, D]``; the weighted losses ``load_balancing`` and ``z``; the metrics of ``MoeShape``.
        """
        moe = self.moe
        x_ND = self.norm(x_BTD).reshape(-1, x_BTD.shape[-1])
        logits_NE = self.router(x_ND)
        # Expert choice and balanced assignment are not causal, so evaluation routes by token.
        routing = route(logits_NE, moe, balanced=self.training)
        loads_E = routing.chosen_E
        if moe.routing == EXPERT_CHOICE and self.training:
            y_ND, chosen_N = self._by_expert(x_ND, logits_NE)
            loads_E = torch.full_like(loads_E, int(chosen_N.sum()) // moe.num_experts)
        else:
            y_ND = self._by_token(x_ND, routing)
        y_BTD = y_ND.view_as(x_BTD)
        losses: dict[str, torch.Tensor] = {}
        if moe.aux_loss_coeff:
            losses["load_balancing"] = moe.aux_loss_coeff * routing.load_balancing
        if moe.z_loss_coeff:
            losses["z"] = moe.z_loss_coeff * routing.z
        return ItemOutput(
            output=x_BTD + F.dropout(y_BTD, self.dropout, self.training),
            metrics={
                "load_balancing_loss": routing.load_balancing,
                "z_loss": routing.z,
                "expert_tokens": loads_E.float(),
            },
            losses=losses,
        )
