"""All pairs of dynamic techniques: each trains with the same bits on any placement, or is refused with one reason.

The techniques are options of the command line, so that the rules over options decide what is refused, as in a run.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from dynmo_train.config import validate
from tests.distributed.option_runs import resolved, train_each
from tests.distributed.scenario import merged
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS, MOVE_AFTER = 5, 3
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
    ("cached freezing", "capacity"): "--freeze-cache-activations",
    ("cached freezing", "expert choice"): "--freeze-cache-activations",
    ("cached freezing", "balanced experts"): "--freeze-cache-activations",
}


def pairs() -> dict[tuple[str, str], dict[str, Any]]:
    """The options of each pair of forms of two techniques."""
    return {
        (first, second): MODEL | options | more
        for left, right in combinations(TECHNIQUES.values(), 2)
        for first, options in left.items()
        for second, more in right.items()
    }


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
    [expected] = run_workers(train_each, 1, accepted, MOVE_AFTER)
    results = run_workers(train_each, 2, accepted, MOVE_AFTER)
    different = [pair for pair in accepted if merged([each[pair] for each in results]) != expected[pair]]
    assert not different
