"""A run directory for tests of the monitor, written without training."""

from __future__ import annotations

import json
import math
from pathlib import Path


def write(path: Path, *records: dict) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def append(path: Path, *records: dict) -> None:
    with open(path, "a", encoding="utf-8") as handle:
        handle.write("".join(json.dumps(record) + "\n" for record in records))


def header(workers: int | list[int], segment: int = 0) -> dict:
    ids = list(range(workers)) if isinstance(workers, int) else workers
    return {
        "record": "header",
        "segment": segment,
        "workers": [{"worker": worker, "ranks": [worker], "memory_bytes": 80 * 10**9} for worker in ids],
    }


def step_line(step: int, **fields: object) -> dict:
    return {
        "step": step,
        "lm_loss": 2 + 8 * math.exp(-step / 100),
        "step_ns": 800_000_000 + step * 100_000,
        "tokens": 65536,
        "model_flops": int(1.1e15),
        "learning_rate": 1e-4,
        "updated": step != 3,
        "plan_id": int(step > 100),
        **fields,
    }


def cost_line(step: int, workers: int) -> dict:
    return {
        "record": "step",
        "step": step,
        "step_ns": 1000,
        "busy_ns": [950 - 100 * worker % 900 for worker in range(workers)],
        "peak_memory_bytes": [(30 + worker) * 10**9 for worker in range(workers)],
    }


def plan(number: int, workers: int, **fields: object) -> dict:
    return {
        "plan_id": number,
        "balancer": "exact" if number else "initial",
        "read_to_step": number * 100,
        "action": "move",
        "apply_at_step": None,
        "released_workers": [],
        "reason": f"predicted step time {1000 - number * 50} ms",
        "stages": [
            {"stage": worker, "worker": worker, "items": [f"layers.{worker * 6 + item}" for item in range(6)]}
            for worker in range(workers)
        ],
        "predicted": {"gain_fraction": 0.05},
        "migration": {"moves": [{}, {}], "bytes": 9_500_000, "pause_ns": 10**7},
        **fields,
    }


def write_run(folder: Path, *, steps: int = 340, train_iters: int = 1000, workers: int = 4) -> Path:
    """A run of a GPT on H100s that balances every 50 steps, with a plan that waits for the next boundary."""
    (folder / "plans").mkdir(parents=True)
    config = {
        "training": {"train_iters": train_iters},
        "model": {"family": "gpt"},
        "precision": {"bf16": True},
        "balance": {"balance": "online", "rebalance_interval": 50},
    }
    engine = {"device": "cuda", "device_name": "NVIDIA H100 80GB HBM3"}
    document = {"run_id": "first", "world_size": workers, "engine": engine, "config": config}
    (folder / "run.json").write_text(json.dumps(document))
    validation = {"step": 300, "validation_loss": 2.5}
    write(folder / "metrics.jsonl", *map(step_line, range(1, steps + 1)), validation)
    write(
        folder / "profile.jsonl",
        header(workers),
        *(cost_line(step, workers) for step in range(1, 30)),
        {"record": "plan_result", "plan_id": 1, "step": 100, "result": "applied", "reason": "r"},
        {"record": "event", "kind": "pruned", "step": 300, "detail": {}, "next_expected_step": 400},
    )
    for number in range(3):
        (folder / "plans" / f"plan-{number:06d}.json").write_text(json.dumps(plan(number, workers)))
    saved = ({"message": f"saved step-{step:08d} in 0.42 s", "kind": "checkpoint"} for step in (100, 200, 300))
    write(folder / "events.jsonl", *saved)
    return folder
