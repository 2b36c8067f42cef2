"""Sizes and losses of a mixture of experts, from options or from a manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .balance_losses import AUX, GLOBAL, SEQUENCE
from .expert_layers import ExpertLayers, layout_of_config, layout_of_manifest
from .moe_dispatch import PROBS, DropPolicy
from .router import RouterShape

if TYPE_CHECKING:
    from ...config import Config

TOPK, EXPERT_CHOICE, BALANCED, SINKHORN = "topk", "expert-choice", "balanced", "sinkhorn"


@dataclass(frozen=True, kw_only=True)
class MoeShape(ExpertLayers):
    """Sizes and losses of a mixture of experts.

    Attributes:
        num_experts: experts of a layer.
        top_k: experts of a token.
        aux_loss_coeff: weight of the balance loss over a microbatch; see ``balance_losses``.
        seq_aux_loss_coeff: weight of that over each sequence.
        global_aux_loss_coeff: weight of that over the batch of a step.
        z_loss_coeff: weight of the router's z-loss (Zoph et al. 2022, arXiv:2202.08906, equation 5).
        routing: ``topk`` (each token its likeliest experts), ``expert-choice`` (each expert its likeliest tokens),
            ``balanced`` (one expert per token, equal numbers of tokens per expert), or ``sinkhorn`` (each token its
            likeliest experts after a balance of the logits); see ``moe_routing`` and ``router``.
        router: scores, biases and groups of ``topk``.
        capacity_factor: an expert's maximum number of tokens of a microbatch, as a multiple of the even share; further
            tokens are dropped before they are computed. None drops no token.
        eval_capacity_factor: that of evaluation; None means ``capacity_factor``.
        min_capacity: lower bound of the capacity, in tokens.
        drop_policy: which tokens are dropped: those of the lowest probability (``probs``) or the last of the microbatch
            (``position``).
        pad_to_capacity: whether every expert computes exactly its capacity, so that all shapes are constant.
        shared_ffn_size: width inside the shared experts of a layer together, which compute every token (Dai et al.
            2024, arXiv:2401.06066, section 3.2); 0 means none.
        shared_gate: whether the output of the shared experts is multiplied by the sigmoid of a learned score.
        random_logits: whether standard normal numbers replace the logits of the router, for benchmarks with even loads;
            not a property of the model.
    """

    num_experts: int
    top_k: int = 2
    aux_loss_coeff: float = 0.0
    seq_aux_loss_coeff: float = 0.0
    global_aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    min_capacity: int = 0
    drop_policy: DropPolicy = PROBS
    pad_to_capacity: bool = False
    routing: str = TOPK
    router: RouterShape = field(default_factory=RouterShape)
    shared_ffn_size: int = 0
    shared_gate: bool = False
    random_logits: bool = False

    def capacity(self, tokens: int, *, training: bool = True) -> int:
        """The maximum number of rows of an expert for ``tokens`` tokens of a microbatch.

        As DeepSpeed's ``sharded_moe._capacity``: the even share times the factor, rounded up, and at least the minimum.

        Example: factor 1.0 and minimum 4 with 8 experts, of which a token has 2: 4 of 8 tokens, 16 of 64.

        Args:
            tokens: tokens of the microbatch.
            training: whether the factor is that of training.

        Raises:
            ValueError: there is no capacity factor.
        """
        if self.capacity_factor is None:
            raise ValueError("the experts have no capacity factor")
        factor = self.capacity_factor
        if not training and self.eval_capacity_factor is not None:
            factor = self.eval_capacity_factor
        share = math.ceil(factor * tokens * self.top_k / self.num_experts)
        # A token has at most one slot of an expert, so that a larger capacity would only add padding.
        return min(tokens, max(share, self.min_capacity))

    @property
    def metrics(self) -> tuple[tuple[str, int], ...]:
        """Metrics of a layer: its losses, unweighted, and the number of tokens of each expert."""
        losses = tuple((f"{name}_loss", 1) for name in sorted(self.measured_losses))
        return (*losses, ("z_loss", 1), ("expert_tokens", self.num_experts))

    @property
    def coefficients(self) -> dict[str, float]:
        """Balance loss -> its weight, of those that have one."""
        weights = {AUX: self.aux_loss_coeff, SEQUENCE: self.seq_aux_loss_coeff, GLOBAL: self.global_aux_loss_coeff}
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def measured_losses(self) -> frozenset[str]:
        """Balance losses that are computed: those with a weight, and that over a microbatch as a measure."""
        return frozenset((AUX, *self.coefficients))

    @property
    def counts_steps(self) -> bool:
        """Whether choices are counted over the microbatches of a step."""
        return self.router.expert_bias or GLOBAL in self.coefficients

    def manifest(self) -> dict[str, object]:
        """The fields of a manifest's ``model`` object."""
        shared = {"moe_shared_ffn_size": self.shared_ffn_size, "moe_shared_gate": self.shared_gate}
        bounds = {"moe_eval_capacity_factor": self.eval_capacity_factor, "moe_min_capacity": self.min_capacity}
        return {
            **(shared if self.shared_ffn_size else {}),
            **{name: value for name, value in bounds.items() if value},
            **self.layout(),
            "num_experts": self.num_experts,
            "moe_top_k": self.top_k,
            "moe_aux_loss_coeff": self.aux_loss_coeff,
            "moe_seq_aux_loss_coeff": self.seq_aux_loss_coeff,
            "moe_global_aux_loss_coeff": self.global_aux_loss_coeff,
            "moe_z_loss_coeff": self.z_loss_coeff,
            "moe_capacity_factor": self.capacity_factor,
            "moe_token_drop_policy": self.drop_policy,
            "moe_routing": self.routing,
            **self.router.manifest(),
        }

    @classmethod
    def from_config(cls, config: Config) -> MoeShape | None:
        """The experts of a run; None where it has none."""
        model = config.model
        if model.num_experts is None:
            return None
        coefficients = model.balance_coefficients
        return cls(
            num_experts=model.num_experts,
            top_k=model.moe_router_topk,
            aux_loss_coeff=coefficients.get("aux_loss", 0.0),
            seq_aux_loss_coeff=coefficients.get("seq_aux_loss", 0.0),
            global_aux_loss_coeff=coefficients.get("global_aux_loss", 0.0),
            z_loss_coeff=model.moe_z_loss_coeff,
            capacity_factor=model.moe_expert_capacity_factor,
            eval_capacity_factor=model.moe_eval_capacity_factor,
            min_capacity=model.moe_min_capacity,
            drop_policy=model.moe_token_drop_policy,
            pad_to_capacity=model.moe_pad_expert_input_to_capacity,
            routing=SINKHORN if SINKHORN in coefficients else model.moe_routing,
            router=RouterShape.from_config(config),
            shared_ffn_size=model.moe_shared_expert_intermediate_size or 0,
            shared_gate=model.moe_shared_expert_gate,
            random_logits=model.moe_router_force_load_balancing,
            **layout_of_config(config),
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
            seq_aux_loss_coeff=model.get("moe_seq_aux_loss_coeff", 0.0),
            global_aux_loss_coeff=model.get("moe_global_aux_loss_coeff", 0.0),
            z_loss_coeff=model.get("moe_z_loss_coeff", 0.0),
            capacity_factor=model.get("moe_capacity_factor"),
            eval_capacity_factor=model.get("moe_eval_capacity_factor"),
            min_capacity=model.get("moe_min_capacity", 0),
            drop_policy=model.get("moe_token_drop_policy", PROBS),
            routing=model.get("moe_routing", TOPK),
            router=RouterShape.of_manifest(model),
            shared_ffn_size=model.get("moe_shared_ffn_size", 0),
            shared_gate=model.get("moe_shared_gate", False),
            **layout_of_manifest(model),
        )
