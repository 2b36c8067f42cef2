"""Everything apart from the model that determines the numerics of a run, as the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..dynamics.technique import TechniqueBuilder
from ..models.layers.sparse_formats import SparseTable
from ..optim.compression.settings import NO_COMPRESSION, CompressionSettings
from ..optim.lr_schedule import LearningRate, WeightDecay
from ..optim.optimizers.protocol import OptimizerSettings
from ..optim.precision import FLOAT32_PRECISION, Precision
from ..pipeline.schedule import PipelineConfig


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Everything apart from the model that determines the numerics of a run.

    Attributes:
        pipeline: schedule, number of microbatches, and shapes at stage boundaries.
        optimizer: optimizer and its hyperparameters.
        rate: learning-rate schedule over the samples of the run.
        decoupled_rate: learning-rate schedule of word embeddings and output layer; None uses ``rate``.
        weight_decay: weight-decay schedule over the samples of the run; None uses the constant of ``optimizer``.
        clip: maximum global gradient norm; 0 disables clipping.
        techniques: technique name -> builder of the dynamic techniques that are on, in the order of their hooks.
        sparse: sparsity above which a matrix product runs in each sparse format.
        precision: dtypes of the arithmetic; activations at stage boundaries have its ``compute`` dtype.
        fused_adam: the ``FusedAdam`` class of NVIDIA Apex; None uses torch's AdamW.
        fused_norms: torch normalization class to the NVIDIA Apex class that replaces it.
        overlap_reduction: whether gradients are reduced over replicas during the backward.
        reduce_dtype: dtype in which gradients are summed over replicas; their sums over microbatches are float32.
        sequence_parallel: sequence parallelism; the boundary's shape is then that of a shard of the tokens.
        async_tensor_parallel: whether products overlap with the collectives of sequence parallelism.
        zero_stage: 0 replicates parameters and moments; 1 and 2 shard them between steps; 3 shards them always.
        adapters_only: whether checkpoints have the adapters of LoRA alone.
        per_token_loss: whether each token that counts has the same weight in a step; else each microbatch has.
        zero_sync_microbatches: whether ZeRO reduces and shards gradients in every microbatch, or once per step.
        compression: compression of the gradients that are sent to other processes.
        expert_slots: experts and copies of a layer that a rank may have; None: no copies of experts.
        expert_chunk_rows: with ``expert_slots``: rows of an expert that one rank computes together.
    """

    pipeline: PipelineConfig
    optimizer: OptimizerSettings
    rate: LearningRate
    clip: float
    sparse: SparseTable
    techniques: Mapping[str, TechniqueBuilder] = field(default_factory=dict)
    decoupled_rate: LearningRate | None = None
    weight_decay: WeightDecay | None = None
    precision: Precision = FLOAT32_PRECISION
    fused_adam: type[Any] | None = None
    fused_norms: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    overlap_reduction: bool = False
    reduce_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    zero_stage: int = 0
    zero_sync_microbatches: bool = False
    per_token_loss: bool = False
    adapters_only: bool = False
    compression: CompressionSettings = NO_COMPRESSION
    expert_slots: int | None = None
    expert_chunk_rows: int = 128
