"""One small training scenario that has everything that could depend on placement, run on any partition."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from dynmo_train.data.batch import Batch
from dynmo_train.dynamics.freezing import LayerFreezing
from dynmo_train.dynamics.plasticity import AdaptiveFreezing, PlasticityRule
from dynmo_train.dynamics.pruning import CubicSchedule, GradualPruning
from dynmo_train.dynamics.pruning_units import PruningRule
from dynmo_train.dynamics.technique import TechniqueBuilder
from dynmo_train.formats.plan import V_SCHEDULES
from dynmo_train.models.compiled import CompileSettings
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.families.sharded_prediction import with_predictions
from dynmo_train.models.families.vocabulary_family import VocabularyShardedFamily, prediction_depths
from dynmo_train.models.float8 import Float8Settings
from dynmo_train.models.layer_list import HIDDEN, LOSS, BoundaryShape, ModelFamily
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.models.techniques.early_exit import EXITED
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings
from dynmo_train.optim.compression.settings import NO_COMPRESSION, CompressionSettings
from dynmo_train.optim.lr_schedule import LearningRate
from dynmo_train.optim.optimizers.adamw import AdamWSettings
from dynmo_train.optim.optimizers.protocol import OptimizerSettings
from dynmo_train.optim.precision import FLOAT32_PRECISION, LossScaling, Precision
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.partition import Partition, uniform_partition
from dynmo_train.pipeline.schedule import PipelineConfig
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.engine_settings import EngineSettings
from tests.distributed.families import PACKED, SAMPLES

SHAPE = GptShape(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=16,
    vocab_size=50,
    padded_vocab_size=64,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    seed=11,
)
MICROBATCHES, MICRO_BATCH, TOKENS = 4, 2, 16
MODELS = SAMPLES | PACKED
PRECISIONS = {
    "fp32": FLOAT32_PRECISION,
    "bf16": Precision(compute=torch.bfloat16),
    "fp8": Precision(compute=torch.bfloat16, float8=Float8Settings()),
    # It overflows in the first steps, and doubles again later on
    "fp16": Precision(compute=torch.float16, scaling=LossScaling(initial=2.0**24, minimum=1.0, window=6, hysteresis=1)),
}

SPARSITY = CubicSchedule(start=4, end=12, every=4, initial=0.0, final=0.9)
ADAMW = AdamWSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run; everything but ``schedule``, ``virtual``, ``recompute`` and ``moves`` fixes the mathematics."""

    steps: int = 20
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: bool = False
    selective: bool = False
    compiled: str | None = None
    sharded: bool = False  # tensor-parallel slices, for the compiler
    any_length: bool = False  # one graph for all numbers of tokens
    moves: tuple[tuple[int, Partition], ...] = ()
    start: Partition | None = None
    prune: bool = True
    freeze: tuple[tuple[int, int], ...] = ((8, 1), (14, 3))
    freeze_tied: bool = False
    clip: float = 0.2
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float | None = None  # as ``dropout``
    cuda_graphs: bool = False
    precision: str = "fp32"
    dynamic: DynamicSettings | None = None
    model: str = "gpt"
    rule: PruningRule = field(default_factory=PruningRule)
    sparsity: CubicSchedule = SPARSITY
    plasticity: PlasticityRule | None = None
    cache_bytes: int | None = None
    moe: MoeShape | None = None
    operations: tuple[str, ...] | None = None
    compression: CompressionSettings = NO_COMPRESSION
    optimizer: OptimizerSettings = ADAMW
    decoupled_lr: float | None = None
    shards: int | None = None  # of the vocabulary
    shard_parts: int = 1  # tensor-parallel ranks
    epoch: int | None = None  # steps after which the samples come again

    def batch(self, step: int) -> Batch:
        """The step's samples; in each epoch the same ones in another order."""
        if self.epoch is None:
            return batch_of(step, self.model)
        rounds, place = divmod(step - 1, self.epoch)
        again = batch_of(place + 1, self.model)
        inputs = {name: tensor.roll(3 * rounds, 0) for name, tensor in again.inputs.items()}
        return replace(again, inputs=inputs, first_microbatch=(step - 1) * MICROBATCHES, step=step)

    def family(self) -> ModelFamily:
        attention = self.dropout if self.attention_dropout is None else self.attention_dropout
        if self.model != "gpt":
            family = MODELS[self.model].family
            # Latent attention and others have none.
            attention = attention if family.shape.attention_dropout else 0.0
            shape = replace(family.shape, hidden_dropout=self.dropout, attention_dropout=attention)
            return self._sharded(self._changed(type(family)(shape)))
        shape = replace(
            SHAPE, moe=self.moe, tied_embeddings=self.tied, hidden_dropout=self.dropout, attention_dropout=attention
        )
        return self._sharded(self._changed(Gpt(shape)))

    def _sharded(self, family: ModelFamily) -> ModelFamily:
        return family if self.shards is None else VocabularyShardedFamily(family, self.shards, self.shard_parts)

    def _changed(self, plain: ModelFamily) -> ModelFamily:
        if self.dynamic is None:
            return plain
        return DynamicFamily(plain, self.dynamic, seed=SHAPE.seed, width=SHAPE.hidden_size, std=0.02)

    def _techniques(self) -> dict[str, TechniqueBuilder]:
        builders: dict[str, TechniqueBuilder] = {"freezing": partial(LayerFreezing, self.freeze, self.freeze_tied)}
        if self.plasticity is not None:
            builders = {"freezing": partial(AdaptiveFreezing, self.plasticity, self.freeze_tied)}
        if self.prune and self.model != "ict-shared":
            builders = {"pruning": partial(GradualPruning, self.sparsity, self.rule), **builders}
        return builders

    def settings(self) -> EngineSettings:
        precision = PRECISIONS[self.precision]
        if self.model == "gpt":
            shapes = {HIDDEN: (MICRO_BATCH, TOKENS, SHAPE.hidden_size), LOSS: ()}
        else:
            shapes = MODELS[self.model].shapes(MICRO_BATCH)
        boundary = BoundaryShape(shapes=shapes, dtype=precision.compute)
        if self.shards is not None:
            boundary = with_predictions(boundary, prediction_depths(self.family()))
        if self.dynamic is not None and self.dynamic.exits is not None:
            boundary = replace(boundary, shapes={**boundary.shapes, EXITED: (MICRO_BATCH, TOKENS)})
        rate = LearningRate(peak=3e-3, floor=0.0, style="cosine", warmup_steps=3, decay_steps=20)
        return EngineSettings(
            pipeline=PipelineConfig(
                schedule=self.schedule,
                microbatches=MICROBATCHES,
                boundary=boundary,
                seed=SHAPE.seed,
                recompute=self.recompute,
                selective=self.selective,
                frozen_cache_bytes=self.cache_bytes,
                operations=self.operations,
                compiled=None
                if self.compiled is None
                else CompileSettings(
                    backend=self.compiled,
                    selective=self.selective,
                    sharded=self.sharded,
                    any_length=self.any_length,
                ),
                cuda_graphs=self.cuda_graphs,
            ),
            optimizer=self.optimizer,
            rate=rate,
            decoupled_rate=None if self.decoupled_lr is None else replace(rate, peak=self.decoupled_lr),
            clip=self.clip,
            techniques=self._techniques(),
            sparse=SparseTable(structured=self.rule.mode == "structured"),
            precision=precision,
            compression=self.compression,
        )


def batch_of(step: int, model: str = "gpt") -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)
    if model != "gpt":
        inputs = MODELS[model].inputs(MICROBATCHES * MICRO_BATCH, generator)
        return Batch(inputs=inputs, first_microbatch=(step - 1) * MICROBATCHES, step=step)
    ids = torch.randint(0, SHAPE.vocab_size, (MICROBATCHES * MICRO_BATCH, TOKENS + 1), generator=generator)
    return Batch(
        inputs={"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()},
        first_microbatch=(step - 1) * MICROBATCHES,
        step=step,
    )


def engine_of(scenario: Scenario, world: World) -> Engine:
    family = scenario.family()
    start = scenario.start or uniform_partition(
        family.items, world.size, scenario.virtual, v_shaped=scenario.schedule in V_SCHEDULES
    )
    engine = Engine(family, scenario.settings(), start, world)
    engine.build()
    return engine


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def fingerprint(engine: Engine) -> dict[str, str]:
    """Tensor name -> digest, over parameters, masks and moments of the items held here."""
    return {
        name: digest(tensor)
        for item in engine.local_names
        for name, tensor in engine.item_store.export(item).tensors.items()
    }


def play(world: World, scenario: Scenario) -> dict[str, Any]:
    """Train; returns losses, gradient norms, a validation loss and the fingerprint of the local items."""
    engine = engine_of(scenario, world)
    moves = dict(scenario.moves)
    losses, norms, metrics, scales = [], [], [], []
    for step in range(1, scenario.steps + 1):
        result = engine.train_step(scenario.batch(step), sampled=step % 5 == 0)
        losses.append(result.loss)
        norms.append(result.grad_norm if result.updated else None)
        metrics.append(result.metrics)
        scales.append(result.loss_scale)
        engine.after_step(step)
        if step in moves:
            engine.repartition(moves[step])
    eval_loss = engine.evaluate([batch_of(9999, scenario.model)])
    return {
        "losses": losses,
        "norms": norms,
        "metrics": metrics,
        "scales": scales,
        "eval_loss": eval_loss,
        "weights": fingerprint(engine),
    }


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all workers as one: metrics must be equal, weights are merged."""
    weights: dict[str, str] = {}
    for result in results:
        assert {k: v for k, v in result.items() if k != "weights"} == {
            k: v for k, v in results[0].items() if k != "weights"
        }
        assert not set(weights) & set(result["weights"]), "an item is held twice"
        weights.update(result["weights"])
    return {**results[0], "weights": weights}


def calls_of_front(world: World, scenario: Scenario) -> tuple[list[float], list[int]]:
    """The losses, and the step of each call of the first layer, where it is here."""
    engine = engine_of(scenario, world)
    calls: list[int] = []
    losses: list[float] = []
    now = [0]
    if "layers.0.attention" in engine.item_store.modules:
        engine.item_store.modules["layers.0.attention"].register_forward_hook(lambda *_: calls.append(now[0]))
    for step in range(1, scenario.steps + 1):
        now[0] = step
        losses.append(engine.train_step(scenario.batch(step), sampled=False).loss)
        engine.after_step(step)
    return losses, calls
