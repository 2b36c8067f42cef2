"""Options of gradient compression; names are those of Optimus-CC (arXiv:2301.09830), with dashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import panels
from ..options import option


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Compressed communication between stages and between replicas."""

    PANEL: ClassVar[str] = panels.COMPRESSION

    inter_grad_comp: bool = option(
        "Compress gradients between stages by low-rank factorization.", default=False, common=True
    )
    inter_grad_comp_rank: int = option("Rank of compressed gradients between stages.", default=12, minimum=1)
    inter_grad_comp_epilogue_only: bool = option(
        "Compress only in the cool-down, after a rank's last forward.", default=False
    )
    grad_comp: bool = option("Compress data-parallel gradient reduction with PowerSGD.", default=False, common=True)
    grad_comp_rank: int = option("Rank of compressed gradients between replicas.", default=128, minimum=1)
    grad_comp_warm_up: float = option(
        "Fraction of --train-iters without --grad-comp at the start.",
        default=0.1,
        minimum=0,
        maximum=1,
    )
    grad_comp_warm_up_iters: int = option(
        "Steps without --grad-comp at the start.",
        minimum=0,
        derive=("--grad-comp-warm-up x --train-iters", lambda v, _: int(v["grad_comp_warm_up"] * v["train_iters"])),
    )
    selective_grad_comp: bool = option(
        "Apply --grad-comp only to the first pipeline ranks, which finish last.",
        default=False,
    )
    selective_grad_comp_way: str | None = option(
        "Number of pipeline ranks that compress; auto: chosen by dynmo-plan.",
        default=None,
    )
    emb_comm_opt: bool = option("Fuse the reductions of tied embedding gradients.", default=False)
    use_error_feedback: bool = option(
        "Add the compression error to the next compressed gradient.",
        default=False,
    )
    error_feedback_across_steps: bool = option(
        "Keep inter-stage error feedback from one step to the next.",
        default=False,
    )
    check_orth_error_acti: bool = option(
        "Log mean and cosine similarity of compression error and activation.", default=False, panel=panels.LOGGING
    )
    check_comp_speed: bool = option("Log time and throughput of compression.", default=False, panel=panels.LOGGING)
    check_comp_ratio: bool = option("Log bytes before and after compression.", default=False, panel=panels.LOGGING)
