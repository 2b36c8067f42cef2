"""The options of the dynamic techniques."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .. import panels
from ..options import option
from ..parse import parse_freeze_schedule, parse_layers, parse_weights

ExitMeasure = Literal["softmax", "saturation", "classifier"]
ExitKeyValues = Literal["propagate", "skip"]
PruningMode = Literal["unstructured", "2:4", "2:4-transposable", "block", "structured"]
PruningScope = Literal["global", "layer"]


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """Gradual magnitude pruning on the cubic schedule of Zhu and Gupta (arXiv:1710.01878)."""

    PANEL: ClassVar[str] = panels.TECHNIQUES

    sparsify: bool = option("Prune weights gradually during training.", default=False, common=True)
    pruning_start_iter: int = option("First pruning step.", default=0, minimum=0)
    pruning_end_iter: int = option(
        "Step at which --final-sparsity is reached.",
        minimum=0,
        derive=("--train-iters", lambda v, _: v["train_iters"]),
    )
    pruning_freq: int = option("Steps between prunings.", default=100, minimum=1)
    initial_sparsity: float = option("Initial fraction of pruned weights.", default=0.0, minimum=0, below=1)
    final_sparsity: float = option("Final fraction of pruned weights.", default=0.9, minimum=0, below=1, common=True)
    pruning_mode: PruningMode = option(
        "Pruned unit: weights, 2:4 pattern, blocks, or heads and MLP columns.", default="unstructured", common=True
    )
    pruning_block_size: int = option("Rows and columns of a pruned block: 16, 32, 64 or 128.", default=32, minimum=1)
    pruning_scope: PruningScope = option(
        "Scope of magnitude ranking: whole model (global) or each matrix (layer).", default="global"
    )
    sparse_threshold: float = option("Minimum sparsity for CSR products on CPU.", default=0.85, minimum=0, maximum=1)
    sparse_table: str | None = option(
        "Table of thresholds from dynmo-train tune-sparse; overrides --sparse-threshold.",
        default=None,
        refers_to="file",
    )


@dataclass(frozen=True, kw_only=True)
class FreezingConfig:
    """Layer freezing from the embedding on."""

    PANEL: ClassVar[str] = panels.TECHNIQUES

    freeze_schedule: str | None = option(
        "STEP:LAYERS,...: after STEP, freeze embedding and the first LAYERS blocks.", default=None, common=True
    )
    freeze_tied: bool = option(
        "Freeze weights shared with later layers too, such as the output layer's.", default=False
    )
    freeze_adaptive: bool = option(
        "Freeze blocks when their plasticity converges (arXiv:2201.06227).", default=False, common=True
    )
    freeze_interval: int = option("Steps between plasticity measurements.", default=50, minimum=1)
    freeze_window: int = option("Number of measurements in the plasticity trend.", default=10, minimum=2)
    freeze_tolerance: float = option(
        "Fraction of its peak slope below which plasticity has converged.", default=0.2, above=0, below=1
    )
    freeze_patience: int = option("Consecutive converged measurements before a block is frozen.", default=3, minimum=1)
    freeze_cache_activations: int | None = option(
        "Activation cache of frozen blocks, MiB per rank; disables their dropout.",
        default=None,
        minimum=1,
    )

    @property
    def freeze_steps(self) -> tuple[tuple[int, int], ...]:
        """``freeze_schedule`` as (step, number of frozen blocks) pairs, by step."""
        return parse_freeze_schedule(self.freeze_schedule) if self.freeze_schedule else ()


@dataclass(frozen=True, kw_only=True)
class DepthConfig:
    """Mixture of depths (arXiv:2404.02258): routed blocks process a fraction of the tokens."""

    PANEL: ClassVar[str] = panels.TECHNIQUES

    mod_capacity: float | None = option(
        "Fraction of tokens that a routed block processes; none: off.", default=None, above=0, maximum=1, common=True
    )
    mod_every: int = option("Interval of routed blocks; 2 routes blocks 1, 3, 5, ...", default=2, minimum=1)
    mod_router_loss_weight: float = option("Weight of the auxiliary loss for causal routing.", default=0.01, minimum=0)


@dataclass(frozen=True, kw_only=True)
class ExitConfig:
    """Early exit (arXiv:2207.07061): confident tokens skip the remaining blocks."""

    PANEL: ClassVar[str] = panels.TECHNIQUES

    early_exit_layers: str | None = option(
        "Blocks (from 0) after which tokens may exit, such as 3,7.", default=None, common=True
    )
    early_exit_loss_weight: float = option("Total weight of the exit losses.", default=0.3, minimum=0)
    early_exit_threshold: float = option(
        "Minimum confidence of an exit; 1: no token exits.", default=0.9, minimum=0, maximum=1
    )
    early_exit_measure: ExitMeasure = option(
        "Confidence: top-two probability difference, hidden-state cosine, or a linear estimate.",
        default="softmax",
    )
    early_exit_loss_tokens: float = option(
        "Fraction of active tokens in the loss of an exit.", default=1.0, above=0, maximum=1
    )
    early_exit_loss_vocabulary: int = option(
        "Sampled vocabulary ids in the loss of an exit; 0: all.", default=0, minimum=0
    )
    exit_layer_weight: str = option(
        "Loss weights of exits: equal, depth (arXiv:2404.16710), or W,... for each.", default="equal"
    )
    early_exit_key_values: ExitKeyValues = option(
        "Keys and values of exited tokens: of their exit state, or none.", default="propagate"
    )

    @property
    def layer_weights(self) -> tuple[float, ...]:
        """``exit_layer_weight`` as numbers; empty for the words ``equal`` and ``depth``.

        Raises:
            UsageError: it is neither a word nor a list of nonnegative numbers.
        """
        return parse_weights("--exit-layer-weight", self.exit_layer_weight, words=("equal", "depth"))

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """``early_exit_layers`` as block numbers, ascending."""
        return parse_layers("--early-exit-layers", self.early_exit_layers) if self.early_exit_layers else ()


@dataclass(frozen=True, kw_only=True)
class SparseAttentionConfig:
    """Dynamic sparse attention (arXiv:2306.01160): queries attend to the keys of their hash bucket."""

    PANEL: ClassVar[str] = panels.TECHNIQUES

    sparse_attention: bool = option(
        "Restrict attention to hash buckets, redrawn per step and layer.", default=False, common=True
    )
    sparse_attention_buckets: int = option("Number of hash buckets, even.", default=16, minimum=2)
    sparse_attention_block: int = option(
        "Largest tile of sparse attention in tokens; 128 times N on CUDA.", default=128, minimum=1
    )
