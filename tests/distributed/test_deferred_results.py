"""Steps that are launched before the last result is read have the same bits, and a skipped one changes nothing."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynmo_train._common.errors import EXIT_TERMINATED
from dynmo_train.config.resolve import DefaultContext, resolve
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, destroy_world, init_world
from dynmo_train.trainer.loop import Trainer
from dynmo_train.trainer.setup import setup_run
from tests.distributed.scenario import Scenario, engine_of, fingerprint
from tests.distributed.whole_runs import write_data
from tests.distributed.workers import run_workers

pytestmark = pytest.mark.complete

VALUES = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 12,
    "lr": 1e-3,
    "vocab_size": 97,
    "split": "80,20,0",
    "eval_iters": 1,
    "eval_interval": 100,
    "freeze_schedule": "6:1",
    "pipeline_model_parallel_size": 2,
}
STEPS = 6
SKIPPED = 3


def train(world: World, scenario: Scenario, deferred: bool) -> dict:
    engine = engine_of(scenario, world)
    results, late = [], 0
    for step in range(1, STEPS + 1):
        batch = scenario.batch(step)
        if step == SKIPPED:
            batch = replace(batch, problem="a token that is not in the vocabulary")
        if deferred:
            earlier = engine.launch_step(batch, sampled=step == 5)
            late += earlier is not None
            results += [earlier] if earlier is not None else []
            if step % 4 == 0:
                results.append(engine.collect())
        else:
            results.append(engine.train_step(batch, sampled=step == 5))
        engine.after_step(step)
    if (last := engine.collect()) is not None:
        results.append(last)
    return {
        "results": [(str(each.loss), str(each.grad_norm), each.rate, each.updated) for each in results],
        "sampled": [each.costs is not None for each in results],
        "weights": fingerprint(engine),
        "advanced": engine.advanced_samples,
        "late": late,
    }


@pytest.mark.parametrize("scenario", [Scenario(), Scenario(schedule="gpipe", precision="bf16")], ids=["fp32", "bf16"])
def test_deferred_results_have_the_same_bits(scenario):
    now, later = (run_workers(train, 2, scenario, deferred) for deferred in (False, True))
    assert [each.pop("late") for each in now] == [0, 0]
    assert [each.pop("late") for each in later] == [4, 4]
    assert now == later
    assert [updated for *_, updated in now[0]["results"]] == [step != SKIPPED for step in range(1, STEPS + 1)]
    assert now[0]["sampled"] == [step == 5 for step in range(1, STEPS + 1)]
    assert now[0]["advanced"] == STEPS - 1


def scale_is_awaited(world: World) -> tuple[bool, bool]:
    return tuple(engine_of(Scenario(precision=precision), world).can_defer for precision in ("fp32", "fp16"))


def test_dynamic_loss_scale_is_never_deferred():
    assert run_workers(scale_is_awaited, 2) == [(True, False)] * 2
    now, later = (run_workers(train, 2, Scenario(precision="fp16"), deferred) for deferred in (False, True))
    for each in (*now, *later):
        del each["late"]
    assert now == later


def whole_run(values: dict[str, Any], deferred: bool, signaled_at: int | None) -> int:
    """Train from options; ``signaled_at`` is the step at which rank 1 gets SIGTERM."""
    config = resolve(flags=values, file={}, command={"family": "gpt"}, context=DefaultContext(world_size=2))
    world = init_world("cpu", dims=ParallelDims(pipeline=2))
    trainer = Trainer(setup_run(config, world))
    trainer.defers_results = deferred
    train_step = trainer.train_step

    def signaled():
        train_step()
        if trainer.step == signaled_at and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.train_step = signaled
    code = 1
    try:
        code = trainer.train()
    finally:
        trainer.close(code)
        destroy_world()
    return code


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    """Records of a run without times."""
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    times = {"time", "step_ns", "stalled_s", "message", "wall_time", "time_ns"}
    return [{key: value for key, value in record.items() if key not in times} for record in records]


def test_deferred_run_writes_the_same_metrics_and_checkpoint(tmp_path):
    data = write_data(tmp_path / "data")
    runs = {deferred: tmp_path / f"deferred-{deferred}" for deferred in (False, True)}
    for deferred, run in runs.items():
        values = {**VALUES, "data_path": str(data), "run_dir": str(run), "eval_interval": 5, "save_interval": 7}
        assert run_workers(whole_run, 2, values, deferred, None, joins=False) == [0, 0]
    metrics = {deferred: lines(run, "metrics.jsonl") for deferred, run in runs.items()}
    assert metrics[True] == metrics[False]
    assert [record["step"] for record in metrics[True] if "grad_norm" in record] == list(range(1, 13))
    manifests = [json.loads((run / "checkpoints/step-00000012/manifest.json").read_text()) for run in runs.values()]
    assert manifests[0]["tensors"] == manifests[1]["tensors"]
    profiles = [
        [record["step"] for record in lines(run, "profile.jsonl") if "busy_ns" in record] for run in runs.values()
    ]
    assert profiles == [list(range(2, 13))] * 2


def test_deferred_run_moves_layers_and_saves_while_training(tmp_path):
    """Plans, asynchronous saves and techniques act on results: those are collected first."""
    data = write_data(tmp_path / "data")
    extra = {
        "balance": "online",
        "balance_lockstep": True,
        "balance_policy": "always",
        "rebalance_interval": 3,
        "async_save": True,
        "save_interval": 4,
        "sparsify": True,
        "pruning_start_iter": 2,
        "pruning_end_iter": 8,
        "pruning_freq": 2,
    }
    tensors = []
    for deferred in (False, True):
        run = tmp_path / f"deferred-{deferred}"
        values = {**VALUES, **extra, "data_path": str(data), "run_dir": str(run)}
        assert run_workers(whole_run, 2, values, deferred, None, joins=False, fresh=True) == [0, 0]
        assert [record["step"] for record in lines(run, "metrics.jsonl") if "grad_norm" in record] == list(range(1, 13))
        kinds = {record["kind"] for record in lines(run, "events.jsonl")}
        assert {"checkpoint", "pruned", "frozen"} <= kinds
        tensors.append(json.loads((run / "checkpoints/step-00000012/manifest.json").read_text())["tensors"])
    crcs = [{name: sorted(shard["crc32"] for shard in each["shards"]) for name, each in one.items()} for one in tensors]
    # Wherever the layers went, which the measured times decide.
    assert crcs[0] == crcs[1]


def test_signal_to_a_deferred_run_ends_it_one_step_later(tmp_path):
    values = {**VALUES, "data_path": str(write_data(tmp_path / "data")), "run_dir": str(tmp_path / "run")}
    assert run_workers(whole_run, 2, values, True, 4, joins=False) == [EXIT_TERMINATED] * 2
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    # At the boundary after step 4 the flags are sent; all ranks read them after step 5.
    assert saved == ["step-00000005"]
    assert [record["step"] for record in lines(tmp_path / "run", "metrics.jsonl")] == [1, 2, 3, 4, 5]
