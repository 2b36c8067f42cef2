"""Training runs from options of the command line, many in one set of processes, each with a move of layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from dynmo_train.config import Config, DefaultContext, config_of
from dynmo_train.data.batch import Batch
from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.layer_list import ModelFamily
from dynmo_train.models.registry import family_of
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from dynmo_train.pipeline.partition import Partition, uniform_partition
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.settings_from_config import engine_settings, parallel_dims
from tests.distributed.scenario import fingerprint

UNEVEN = (1, (0, 1), 1, 1)
SWAPPED = ((1, 0), 1, 0, (0, 1))
"""Ranks of four experts, the owner first."""
EPOCH = 2
"""Steps after which samples come again, for the cache of frozen outputs."""


def resolved(options: Mapping[str, Any], world_size: int = 1) -> Config:
    return config_of(DefaultContext(world_size=world_size), **options)


def partitions(family: ModelFamily, workers: int) -> tuple[Partition, Partition]:
    """The partition that a run starts with, and the one that it moves to."""
    if workers == 1:
        return (uniform_partition(family.items, 1, 1),) * 2
    names = [item.name for item in family.items]
    starts = [at for at, item in enumerate(family.items) if item.cut_before and at]
    cuts = starts[len(starts) // 3], starts[-2]
    first, second = (Partition.looped((tuple(names[:at]), tuple(names[at:])), workers) for at in cuts)
    return first, second


def batch(config: Config, step: int) -> Batch:
    """The samples of a step."""
    samples, tokens = config.training.global_batch_size, config.model.seq_length
    generator = torch.Generator().manual_seed(1 + step % EPOCH)
    ids = torch.randint(0, config.model.vocab_size, (samples, tokens + 1), generator=generator)
    inputs = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    first = (step - 1) * samples // config.training.micro_batch_size
    return Batch(inputs=inputs, first_microbatch=first, step=step)


def train_each(world: World, options: Mapping[Hashable, Mapping[str, Any]], move_after: int) -> dict[Hashable, Any]:
    """Train each run; the losses, gradient norms, metrics and weights."""
    return {name: _train(world, resolved(values, world.size), move_after) for name, values in options.items()}


def train_experts_each(
    world: World, options: Mapping[Hashable, Mapping[str, Any]], move_after: int, *, moves: bool
) -> dict[Hashable, Any]:
    """The same with experts over two ranks; with ``moves`` some experts move, and some get copies."""
    placements = {1: UNEVEN, move_after: SWAPPED} if moves else {}
    return {
        name: _train(world, resolved(values, world.size), move_after, placements) for name, values in options.items()
    }


def _expert_items(engine: Engine) -> list[str]:
    """The MLPs with experts of all stages."""
    modules = {item.name: engine.family.build(item.name, torch.device("meta")) for item in engine.family.items}
    return [name for name, module in modules.items() if isinstance(module, MoeMlp)]


def _train(
    world: World, config: Config, move_after: int, placements: Mapping[int, tuple[Any, ...]] | None = None
) -> dict[str, Any]:
    family = family_of(config)
    if placements is not None:
        world = set_parallel_dims(world, parallel_dims(config), 60)
    start, after = partitions(family, world.dims.pipeline)
    engine = Engine(family, engine_settings(config), start, world)
    engine.build()
    results = []
    for step in range(1, config.training.train_iters + 1):
        result = engine.train_step(batch(config, step), sampled=step == 2)
        results.append((result.loss, result.grad_norm, result.metrics))
        engine.after_step(step)
        if step == move_after:
            engine.repartition(after)
        if placements and step in placements:
            engine.place_experts(dict.fromkeys(_expert_items(engine), placements[step]))
    return {"steps": results, "eval_loss": engine.evaluate([batch(config, 99)]), "weights": fingerprint(engine)}
