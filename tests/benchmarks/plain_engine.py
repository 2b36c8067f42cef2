"""A plain engine over a small GPT and random batches, which several benchmarks train next to other programs."""

from __future__ import annotations

from typing import Any

import torch

from dynmo_train.data.batch import Batch
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.layer_list import BoundaryShape
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.optim.lr_schedule import LearningRate
from dynmo_train.optim.optimizers.adamw import AdamWSettings
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.partition import Partition, uniform_partition
from dynmo_train.pipeline.schedule import PipelineConfig
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.engine_settings import EngineSettings


def gpt_of(*, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> Gpt:
    """GPT with learned positions and tied embeddings, without dropout."""
    return Gpt(
        GptShape(
            num_layers=layers,
            hidden_size=width,
            ffn_hidden_size=4 * width,
            num_attention_heads=heads,
            max_position_embeddings=tokens,
            vocab_size=vocabulary,
            padded_vocab_size=vocabulary,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    )


def engine_of(
    family: Any,
    world: World,
    *,
    microbatches: int,
    boundary: tuple[int, int, int],
    rate: LearningRate,
    partition: Partition | None = None,
    beta2: float = 0.95,
    build: bool = True,
) -> Engine:
    """An engine: 1F1B, float32, AdamW with decay 0.1, clipping at 1, no technique.

    Args:
        family: what it trains.
        world: its processes.
        microbatches: of a step.
        boundary: samples of a microbatch, tokens of a sample, width.
        rate: of each step.
        partition: of items over workers [default: Megatron's uniform one].
        beta2: of AdamW.
        build: give it fresh weights; without, ``Engine.restore`` follows.
    """
    samples, tokens, width = boundary
    settings = EngineSettings(
        pipeline=PipelineConfig(
            schedule="1f1b",
            microbatches=microbatches,
            boundary=BoundaryShape.hidden(batch=samples, tokens=tokens, width=width),
            seed=1,
            recompute=False,
        ),
        optimizer=AdamWSettings(beta1=0.9, beta2=beta2, eps=1e-8, weight_decay=0.1),
        rate=rate,
        clip=1.0,
        sparse=SparseTable(),
    )
    engine = Engine(family, settings, partition or uniform_partition(family.items, world.size), world)
    if build:
        engine.build()
    return engine


def constant(rate: float) -> LearningRate:
    """The same rate in every step."""
    return LearningRate(peak=rate, floor=rate, style="constant", warmup_steps=0, decay_steps=1)


def engine_batch(rows: tuple[torch.Tensor, torch.Tensor], step: int, microbatches: int) -> Batch:
    """A batch of the engine."""
    return Batch(inputs={"ids": rows[0], "labels": rows[1]}, first_microbatch=step * microbatches, step=step)
