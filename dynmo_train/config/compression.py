"""Options of compressed communication; names are those of Optimus-CC (arXiv:2301.09830), with dashes."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Compression of gradients between stages and between replicas."""

    inter_grad_comp: bool = option("Send the gradient back to the stage before as low-rank factors.", default=False)
    inter_grad_comp_rank: int = option("Rank of the gradients between stages.", default=12, minimum=1)
    inter_grad_comp_epilogue_only: bool = option(
        "Compress only the microbatches that a worker gets back behind its last forward of a step.", default=False
    )
    grad_comp: bool = option(
        "Add the gradients of matrices over the replicas as low-rank factors (PowerSGD).", default=False
    )
    grad_comp_rank: int = option("Rank of the gradients between replicas.", default=128, minimum=1)
    grad_comp_warm_up: float = option(
        "Share of --train-iters at the start in which replicas add their gradients whole.",
        default=0.1,
        minimum=0,
        maximum=1,
    )
    selective_grad_comp: bool = option(
        "Compress between the replicas of the first workers only, which are the last to end their backward.",
        default=False,
    )
    selective_grad_comp_way: str | None = option(
        "How many workers --selective-grad-comp means; auto: as many as dynmo-plan finds fastest for the measured costs"
        " and links, asked behind the warm-up and again whenever layers have moved.",
        default=None,
    )
    emb_comm_opt: bool = option(
        "Add the gradients of tied embeddings over replicas and copies in one exchange.", default=False
    )
    use_error_feedback: bool = option(
        "Add what compression lost to what is compressed next: at the same stage boundary, of the same parameter.",
        default=False,
    )
    error_feedback_across_steps: bool = option(
        "Between stages, add what the last compressed microbatch of a step lost to the first one of the next step,"
        " where it is dropped otherwise.",
        default=False,
    )
    check_orth_error_acti: bool = option(
        "Log mean and cosine similarity of the compression error and the activation at each boundary.", default=False
    )
    check_comp_speed: bool = option("Log the time and rate of compression and decompression.", default=False)
    check_comp_ratio: bool = option("Log bytes before and after compression, and of its memories.", default=False)
