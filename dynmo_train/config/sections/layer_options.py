"""Options of layers that not all models have: experts by block, multi-head latent attention, multi-token prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..._common.document import MAX_EXPERTS
from ..options import option

MAX_PREDICTED = 16


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of the architecture of a model, a part of ``ModelConfig``; Megatron-LM has them under the same names."""

    multi_latent_attention: bool = option("Compress keys and values into a latent per token.", default=False)
    q_lora_rank: int | None = option("Width of the latent of the queries; none: no latent.", default=None, minimum=1)
    kv_lora_rank: int = option("Width of the latent of keys and values.", default=32, minimum=1)
    qk_head_dim: int = option("Size of a head's queries and keys without rotation.", default=128, minimum=1)
    qk_pos_emb_head_dim: int = option("Size of the rotated part of queries and keys.", default=64, minimum=2)
    v_head_dim: int = option("Size of a head's values.", default=128, minimum=1)
    rotary_interleaved: bool = option(
        "Rotate neighboring elements, not halves (multi-latent attention).",
        derive=("--multi-latent-attention", lambda v, _: bool(v["multi_latent_attention"])),
    )
    rope_type: Literal["rope", "yarn"] = option(
        "Rotary frequencies; yarn scales them by --rotary-scaling-factor.",
        derive=(
            "yarn with --multi-latent-attention, else rope",
            lambda v, _: "yarn" if v["multi_latent_attention"] else "rope",
        ),
    )
    rotary_scaling_factor: float = option("Scaling factor of --rope-type yarn; 1: none.", default=1.0, minimum=1)
    mscale: float = option("Factor in the magnitude of --rope-type yarn.", default=1.0, minimum=0)
    mscale_all_dim: float = option("Factor in the attention scale of --rope-type yarn.", default=0.0, minimum=0)
    yarn_original_max_position_embeddings: int = option(
        "Sequence length before --rope-type yarn, in tokens.", default=4096, minimum=1
    )
    yarn_beta_fast: float = option("Turns above which yarn keeps a frequency.", default=32.0, above=0)
    yarn_beta_slow: float = option("Turns below which yarn divides a frequency.", default=1.0, above=0)
    swiglu_offset: float = option(
        "Offset of up in clamped_swiglu and quick_geglu.",
        minimum=0,
        derive=("0 for quick_geglu, else 1", lambda v, _: float(v.get("activation") != "quick_geglu")),
    )
    softmax_off_by_one: bool = option("Add 1 to the denominator of each attention's softmax.", default=False)
    yarn_correction_range_round_to_int: bool = option(
        "Round the planes between which --rope-type yarn interpolates.", default=True
    )
    no_rope_freq: str | None = option("Layers without rotation: every N-th, or a list such as [0,0,0,1].", default=None)
    residual_multiplier: float = option("Factor on the output of each sublayer.", default=1.0, above=0)
    logits_scaling: float = option("Divisor of the output layer's logits.", default=1.0, above=0)
    mtp_num_layers: int = option(
        "Number of further tokens that each position predicts.", default=0, minimum=0, maximum=MAX_PREDICTED
    )
    mtp_loss_scaling_factor: float = option("Weight of the mean loss of the further tokens.", default=0.1, minimum=0)
    moe_ffn_hidden_size: int | None = option(
        "Inner size of an expert; none: --ffn-hidden-size.", default=None, minimum=1
    )
    moe_layer_freq: str = option("Blocks with experts: every N-th, or a list such as [0]*3+[1]*58.", default="1")
    moe_router_force_load_balancing: bool = option(
        "Route by random logits, for benchmarks: the router learns nothing.", default=False
    )
    moe_router_group_experts: int | None = option(
        "Best experts that score a group; none: experts per chosen group.",
        default=None,
        minimum=1,
        maximum=MAX_EXPERTS,
    )

    @property
    def yarn_object(self) -> Mapping[str, Any] | None:
        """The scaling of ``--rope-type yarn`` as Hugging Face's object; None where the frequencies are not scaled."""
        factor = self.rotary_scaling_factor
        if self.rope_type != "yarn" or factor == 1.0:
            return None
        found: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.yarn_original_max_position_embeddings,
            "beta_fast": self.yarn_beta_fast,
            "beta_slow": self.yarn_beta_slow,
            **({} if self.yarn_correction_range_round_to_int else {"truncate": False}),
        }
        if self.mscale and self.mscale_all_dim:
            return {**found, "mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
        # transformers ignores one factor without the other, Megatron-LM takes the quotient of both magnitudes.
        magnitudes = [0.1 * each * math.log(factor) + 1.0 for each in (self.mscale, self.mscale_all_dim)]
        own = {"mscale_all_dim": self.mscale_all_dim} if self.mscale_all_dim else {}
        return {**found, **own, "attention_factor": magnitudes[0] / magnitudes[1]}
