"""Every decoder family of transformers with every dynamic technique: the bits of one worker while layers move.

The techniques are options of the command line, so that the rules over options decide what is refused, as in a run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dynmo_ckpt.huggingface.models import hf_model
from dynmo_train.config import validate
from dynmo_train.models.registry import family_of, family_of_manifest
from tests.distributed.decoder_options import COMMON, FAMILIES
from tests.distributed.option_runs import resolved, train_each, train_experts_each
from tests.distributed.scenario import merged
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS, MOVE_AFTER = 4, 2
RUN: dict[str, Any] = {
    **COMMON,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": STEPS,
    "lr": 3e-3,
    "lr_warmup_fraction": 0.0,
    "clip_grad": 0.3,
    "mock_data": True,
    "num_threads": 1,
}
PRUNING = {"sparsify": True, "pruning_start_iter": 1, "pruning_end_iter": 3, "pruning_freq": 1, "final_sparsity": 0.5}
FREEZING = {"freeze_schedule": "1:1,3:2"}
CACHED = FREEZING | {"freeze_cache_activations": 4}
DEPTHS = {"mod_capacity": 0.5, "mod_every": 2}
EXITS = {"early_exit_layers": "0", "early_exit_loss_weight": 0.3, "early_exit_threshold": 0.03}
SPARSE = {"sparse_attention": True, "sparse_attention_buckets": 4, "sparse_attention_block": 16}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "pruning": PRUNING,
    "structured pruning": PRUNING | {"pruning_mode": "structured"},
    "freezing": FREEZING,
    "adaptive freezing": {"freeze_adaptive": True, "freeze_interval": 1, "freeze_window": 2},
    "cached freezing": CACHED,
    "depths": DEPTHS,
    "exits": EXITS,
    "exits, active keys": EXITS | {"early_exit_key_values": "skip"},
    "sparse attention": SPARSE,
    "all": PRUNING | FREEZING | DEPTHS | EXITS | SPARSE,
}
REFUSED = {("olmo2", "structured pruning"): "--qk-norm"}


SURE = {"gemma": 0.015}
"""Threshold where the other lets all tokens exit, or none: with tied and scaled embeddings a token predicts itself."""


def options(family: str, technique: str) -> dict[str, Any]:
    values = RUN | FAMILIES[family].options | TECHNIQUES[technique]
    if "early_exit_threshold" in values and family in SURE:
        values["early_exit_threshold"] = SURE[family]
    if "freeze_cache_activations" in values and resolved(values).model.shares_embedding:
        values["freeze_tied"] = True
    return values


CASES = {(family, technique): options(family, technique) for family in FAMILIES for technique in TECHNIQUES}


@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_a_family_train_what_conversion_reads(family):
    config = FAMILIES[family].hugging_face
    converted = family_of_manifest(hf_model(config, 1)).manifest()
    trained = family_of(resolved(RUN | FAMILIES[family].options)).manifest()
    # A checkpoint has the further predictions only where it has their tensors.
    assert trained.pop("mtp_num_layers", 0) == config.get("num_nextn_predict_layers", 0)
    assert trained == converted


def test_every_technique_of_a_family_trains_or_is_refused_by_name():
    problems = {case: validate(resolved(values), 1) for case, values in CASES.items()}
    refused = {case: found[0].path for case, found in problems.items() if found}
    assert all(len(found) <= 1 for found in problems.values())
    assert refused == REFUSED


def test_every_technique_of_a_family_has_the_bits_of_one_worker():
    accepted = {case: values for case, values in CASES.items() if case not in REFUSED}
    [expected] = run_workers(train_each, 1, accepted, MOVE_AFTER)
    results = run_workers(train_each, 2, accepted, MOVE_AFTER)
    shares = {
        case: figures["exit_share"][0]
        for case, result in expected.items()
        for figures in result["steps"][-1][2].values()
        if "exit_share" in figures
    }
    assert len(shares) == 3 * len(FAMILIES)
    assert not [case for case, share in shares.items() if not 0 < share < 1], shares
    different = [case for case in accepted if merged([each[case] for each in results]) != expected[case]]
    assert not different


def agreed(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all workers as one; what several have must be equal."""
    weights: dict[str, str] = {}
    for result in results:
        assert all(result[name] == results[0][name] for name in ("steps", "eval_loss"))
        assert all(weights.setdefault(name, value) == value for name, value in result["weights"].items())
    return {**results[0], "weights": weights}


def test_experts_of_every_family_move_and_have_copies_with_the_same_bits():
    """Four processes, with layers that move as well, against two processes whose experts and layers stay."""
    spread = {"expert_model_parallel_size": 2, "moe_expert_slots": 4, "moe_expert_chunk_rows": 3}
    cases = {
        family: RUN | each.options | spread for family, each in FAMILIES.items() if each.options.get("num_experts")
    }
    assert len(cases) == 6
    still = {name: values | {"pipeline_model_parallel_size": 1} for name, values in cases.items()}
    moving = {name: values | {"pipeline_model_parallel_size": 2} for name, values in cases.items()}
    assert not [problem for values in still.values() for problem in validate(resolved(values, 2), 2)]
    expected = run_workers(partial(train_experts_each, moves=False), 2, still, MOVE_AFTER)
    results = run_workers(partial(train_experts_each, moves=True), 4, moving, MOVE_AFTER)
    different = [
        name for name in cases if agreed([each[name] for each in results]) != agreed([each[name] for each in expected])
    ]
    assert not different
