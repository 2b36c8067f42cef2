"""All pairs of dynamic techniques: each trains with the same bits on any placement, or is refused with one reason.

The techniques are options of the command line, so that the rules over options decide what is refused, as in a run.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from dynmo_train.config import Config, DefaultContext, config_of, validate
from dynmo_train.data.batch import Batch
from dynmo_train.models.layer_list import ModelFamily
from dynmo_train.models.registry import family_of
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.partition import Partition, uniform_partition
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.settings_from_config import engine_settings
from tests.distributed.scenario import fingerprint, merged
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS, MOVE_AFTER, EPOCH = 5, 3, 2
SAMPLES, TOKENS, VOCABULARY = 8, 32, 61
MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": TOKENS,
    "max_position_embeddings": TOKENS,
    "vocab_size": VOCABULARY,
    "micro_batch_size": 2,
    "global_batch_size": SAMPLES,
    "train_iters": STEPS,
    "lr": 3e-3,
    "lr_warmup_fraction": 0.0,
    "clip_grad": 0.3,
    "untie_embeddings_and_output_weights": True,
    "mock_data": True,
    "num_threads": 1,
}
PRUNING = {
    "sparsify": True,
    "pruning_start_iter": 2,
    "pruning_end_iter": 4,
    "pruning_freq": 2,
    "final_sparsity": 0.5,
}
EXPERTS = {"num_experts": 4, "moe_aux_loss_coeff": 0.01}
FREEZING = {"freeze_schedule": "2:1,4:2"}
EXITS = {"early_exit_layers": "0", "early_exit_loss_weight": 0.3, "early_exit_threshold": 0.01}
TECHNIQUES: dict[str, dict[str, dict[str, Any]]] = {
    "pruning": {
        "pruning": PRUNING,
        "pruning by layer": PRUNING | {"pruning_scope": "layer"},
        "pruning 2:4": PRUNING | {"pruning_mode": "2:4"},
        "pruning of blocks": PRUNING | {"pruning_mode": "block"},
        "structured pruning": PRUNING | {"pruning_mode": "structured"},
    },
    "freezing": {
        "freezing": FREEZING,
        "adaptive freezing": {"freeze_adaptive": True, "freeze_interval": 1, "freeze_window": 2},
        "cached freezing": FREEZING | {"freeze_cache_activations": 4},
    },
    "experts": {
        "experts": EXPERTS,
        "one expert per token": EXPERTS | {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        "capacity": EXPERTS | {"moe_expert_capacity_factor": 1.0},
        "expert choice": EXPERTS | {"moe_routing": "expert-choice"},
        "balanced experts": EXPERTS | {"moe_routing": "balanced", "moe_router_topk": 1},
        "shared experts": EXPERTS | {"moe_shared_expert_intermediate_size": 32},
    },
    "depths": {"mixture of depths": {"mod_capacity": 0.5, "mod_every": 2}},
    "exits": {
        "softmax exits": EXITS,
        "saturation exits": EXITS | {"early_exit_measure": "saturation", "early_exit_threshold": 0.9},
    },
    "attention": {
        "sparse attention": {"sparse_attention": True, "sparse_attention_buckets": 4, "sparse_attention_block": 8}
    },
}
REFUSED = {
    ("cached freezing", "mixture of depths"): "--freeze-cache-activations",
    ("cached freezing", "softmax exits"): "--freeze-cache-activations",
    ("cached freezing", "saturation exits"): "--freeze-cache-activations",
}


def pairs() -> dict[tuple[str, str], dict[str, Any]]:
    """The options of each pair of forms of two techniques."""
    return {
        (first, second): MODEL | options | more
        for left, right in combinations(TECHNIQUES.values(), 2)
        for first, options in left.items()
        for second, more in right.items()
    }


def resolved(options: dict[str, Any]) -> Config:
    return config_of(DefaultContext(world_size=1), **options)


def partitions(family: ModelFamily, workers: int) -> tuple[Partition, Partition]:
    """The partition that a run starts with, and the one that it moves to."""
    if workers == 1:
        return (uniform_partition(family.items, 1, 1),) * 2
    names = [item.name for item in family.items]
    starts = [at for at, item in enumerate(family.items) if item.cut_before and at]
    cuts = starts[len(starts) // 3], starts[-2]
    first, second = (Partition.looped((tuple(names[:at]), tuple(names[at:])), workers) for at in cuts)
    return first, second


def batch(step: int) -> Batch:
    """The samples of a step; they come again after ``EPOCH`` steps, for the cache of frozen outputs."""
    generator = torch.Generator().manual_seed(1 + step % EPOCH)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS + 1), generator=generator)
    inputs = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return Batch(inputs=inputs, first_microbatch=(step - 1) * SAMPLES // 2, step=step)


def train_pairs(world: World, options: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Train each pair; the losses, gradient norms, metrics and weights."""
    return {pair: _train(world, resolved(values)) for pair, values in options.items()}


def _train(world: World, config: Config) -> dict[str, Any]:
    family = family_of(config)
    start, after = partitions(family, world.size)
    engine = Engine(family, engine_settings(config), start, world)
    engine.build()
    results = []
    for step in range(1, STEPS + 1):
        result = engine.train_step(batch(step), sampled=step == 2)
        results.append((result.loss, result.grad_norm, result.metrics))
        engine.after_step(step)
        if step == MOVE_AFTER:
            engine.repartition(after)
    return {"steps": results, "eval_loss": engine.evaluate([batch(99)]), "weights": fingerprint(engine)}


def test_every_pair_trains_or_is_refused_with_one_reason():
    refused = {}
    for pair, options in pairs().items():
        problems = validate(resolved(options), 1)
        assert len(problems) <= 1, (pair, problems)
        if problems:
            refused[pair] = problems[0]
            assert len(problems[0].message.splitlines()) == 1, pair
    assert {pair: problem.path for pair, problem in refused.items()} == REFUSED


def test_every_pair_has_the_bits_of_one_worker():
    accepted = {pair: options for pair, options in pairs().items() if pair not in REFUSED}
    assert len(accepted) > 100
    [expected] = run_workers(train_pairs, 1, accepted)
    results = run_workers(train_pairs, 2, accepted)
    different = [pair for pair in accepted if merged([each[pair] for each in results]) != expected[pair]]
    assert not different
