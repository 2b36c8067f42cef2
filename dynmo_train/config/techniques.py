"""The options of the dynamic techniques."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .options import option
from .parse import parse_freeze_schedule, parse_layers

ExitMeasure = Literal["softmax", "saturation"]
PruningMode = Literal["unstructured", "2:4", "block", "structured"]
PruningScope = Literal["global", "layer"]


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """Gradual pruning of the weakest weights, on the cubic curve of Zhu and Gupta (arXiv:1710.01878)."""

    sparsify: bool = option("Prune while training.", default=False)
    pruning_start_iter: int = option("Step of the first pruning.", default=0, minimum=0)
    pruning_end_iter: int = option(
        "Step at which --final-sparsity is reached.",
        minimum=0,
        derive=("--train-iters", lambda v, _: v["train_iters"]),
    )
    pruning_freq: int = option("Steps between prunings.", default=100, minimum=1)
    initial_sparsity: float = option("Fraction of pruned weights at the start.", default=0.0, minimum=0, below=1)
    final_sparsity: float = option("Fraction of pruned weights at the end.", default=0.9, minimum=0, below=1)
    pruning_mode: PruningMode = option(
        "What is pruned: single weights (unstructured), the two weakest of four (2:4), blocks of 32 x 32 (block), or"
        " heads and MLP columns (structured).",
        default="unstructured",
    )
    pruning_scope: PruningScope = option(
        "Where the weakest are sought: in the whole model (global), or in each matrix alone (layer).", default="global"
    )
    sparse_threshold: float = option(
        "Fraction of zeros from which a matrix is multiplied in sparse form on CPU.", default=0.85, minimum=0, maximum=1
    )
    sparse_table: str | None = option(
        "File of thresholds by shape and form that dynmo-train tune-sparse wrote; goes before --sparse-threshold.",
        default=None,
        refers_to="file",
    )


@dataclass(frozen=True, kw_only=True)
class FreezingConfig:
    """Freezing of the front of the model."""

    freeze_schedule: str | None = option(
        "STEP:LAYERS,STEP:LAYERS,...: freeze the embedding and the first LAYERS blocks after STEP.", default=None
    )
    freeze_tied: bool = option("Freeze the weight that embedding and head share as well.", default=False)
    freeze_adaptive: bool = option(
        "Freeze the foremost training block when its plasticity has settled (arXiv:2201.06227).", default=False
    )
    freeze_interval: int = option("Steps between measurements of plasticity.", default=50, minimum=1)
    freeze_window: int = option("Measurements that the slope of plasticity is fitted to.", default=10, minimum=2)
    freeze_tolerance: float = option(
        "Share of its steepest slope below which a block's plasticity is settled.", default=0.2, above=0, below=1
    )
    freeze_patience: int = option("Settled measurements in a row that freeze a block.", default=3, minimum=1)
    freeze_cache_activations: int | None = option(
        "MiB on each worker for the frozen front's outputs, by sample; it runs without dropout then.",
        default=None,
        minimum=1,
    )

    @property
    def freeze_steps(self) -> tuple[tuple[int, int], ...]:
        """``freeze_schedule`` as (step, blocks frozen from then on), in order of step."""
        return parse_freeze_schedule(self.freeze_schedule) if self.freeze_schedule else ()


@dataclass(frozen=True, kw_only=True)
class DepthConfig:
    """Mixture of depths (arXiv:2404.02258): a share of the tokens goes through a block, the others pass it by."""

    mod_capacity: float | None = option(
        "Share of a sample's tokens that go through a routed block; none routes no block.",
        default=None,
        above=0,
        maximum=1,
    )
    mod_every: int = option("Every how many blocks one is routed: with 2 blocks 1, 3, 5, ...", default=2, minimum=1)
    mod_router_loss_weight: float = option(
        "Weight of the loss that teaches routers to decide without looking ahead.", default=0.01, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class ExitConfig:
    """Early exit (arXiv:2207.07061): a token leaves behind a block when the model is sure of it."""

    early_exit_layers: str | None = option(
        "N,N,...: blocks (from 0) behind which tokens may leave; later blocks compute the others only.", default=None
    )
    early_exit_loss_weight: float = option("Weight of the exits' losses together.", default=0.3, minimum=0)
    early_exit_threshold: float = option("Confidence from which a token leaves.", default=0.9, minimum=0, maximum=1)
    early_exit_measure: ExitMeasure = option(
        "Confidence: softmax (difference of the two highest probabilities), or saturation (cosine between the stream"
        " before and behind the block's MLP).",
        default="softmax",
    )

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """``early_exit_layers`` as numbers, ascending."""
        return parse_layers("--early-exit-layers", self.early_exit_layers) if self.early_exit_layers else ()


@dataclass(frozen=True, kw_only=True)
class SparseAttentionConfig:
    """Dynamic sparse attention: queries attend to the keys of their hash bucket, in blocks."""

    sparse_attention: bool = option("Attend within hash buckets, drawn again in each step and layer.", default=False)
    sparse_attention_buckets: int = option("Hash buckets, an even number.", default=16, minimum=2)
    sparse_attention_block: int = option("Queries and keys of a block of scores, in tokens.", default=32, minimum=1)
