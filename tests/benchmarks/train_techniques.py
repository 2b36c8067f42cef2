"""Each technique on two stages: Megatron's uniform split against the exact plan, and what that plan predicts.

For a technique: a static run on the uniform split, ``dynmo-plan`` on its profile, and the same run on the exact plan.
The measured ratio of step times is compared with the prediction, and the losses of both runs must be the same bits. The
technique ``none`` is the plain model, to see what each saves.

    python tests/benchmarks/train_techniques.py [--technique NAME ...] [--repeats 3] [--steps 14] [OPTIONS]

``OPTIONS`` are passed to the trainer after the benchmark's own, for example ``--seq-length 4096``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from dynmo_train._common.console import emit

SHAPE = [
    *("--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "8", "--seq-length", "128"),
    *("--vocab-size", "2048", "--micro-batch-size", "2", "--global-batch-size", "16", "--lr", "1e-5"),
    *("--eval-iters", "0", "--split", "100,0,0", "--granularity", "sublayer", "--log-interval", "1000"),
]
# Each reaches its steady state by step 4.
TECHNIQUES = {
    "none": [],
    "pruning": [
        *("--sparsify", "--pruning-start-iter", "1", "--pruning-end-iter", "3", "--pruning-freq", "1"),
        *("--final-sparsity", "0.95"),
    ],
    "structured pruning": [
        *("--sparsify", "--pruning-mode", "structured", "--pruning-start-iter", "1", "--pruning-end-iter", "3"),
        *("--pruning-freq", "1", "--final-sparsity", "0.75"),
    ],
    "freezing": ["--freeze-schedule", "2:4", "--untie-embeddings-and-output-weights"],
    "experts": ["--num-experts", "4", "--moe-router-topk", "1", "--moe-expert-capacity-factor", "0.5"],
    "depths": ["--mod-capacity", "0.25", "--mod-every", "2"],
    "exits": [
        *("--early-exit-layers", "2", "--early-exit-measure", "saturation", "--early-exit-threshold", "0.865"),
        *("--early-exit-loss-weight", "0"),
    ],
    "sparse attention": ["--sparse-attention", "--sparse-attention-buckets", "8", "--sparse-attention-block", "16"],
}
WARM = 5


def write_data(prefix: Path, vocabulary: int = 2048) -> None:
    """A data set of 200 documents of random tokens."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, vocabulary, 1000).astype("<u2") for _ in range(200)]
    prefix.with_suffix(".bin").write_bytes(b"".join(document.tobytes() for document in documents))
    lengths = np.full(len(documents), 1000)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(documents), len(documents) + 1)
    pointers = np.concatenate([[0], lengths.cumsum()[:-1] * 2])
    arrays = (lengths.astype("<i4"), pointers.astype("<i8"), np.arange(len(documents) + 1).astype("<i8"))
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def train(folder: Path, name: str, steps: int, options: list[str]) -> list[dict]:
    """A run on two stages; its metrics."""
    launch = ["dynmo_train", "launch", "local", "--nproc", "2", "--log-dir", str(folder / f"{name}-logs"), "--"]
    where = ["--data-path", str(folder / "data"), "--run-dir", str(folder / name), "--train-iters", str(steps)]
    run(*launch, "pretrain", "gpt", *SHAPE, *where, *options)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "lm_loss" in line]


def measured(lines: list[dict]) -> float:
    """The median step in ms once the technique is steady."""
    return statistics.median(line["step_ns"] for line in lines if line["step"] > WARM) / 1e6


def one(technique: str, steps: int, more: list[str]) -> tuple[float, float, float, bool]:
    """(ms on the uniform split, ms on the exact plan, predicted ratio, whether the losses are the same bits)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data")
        options = [*TECHNIQUES[technique], *more]
        static = train(folder, "static", steps, options)
        plan = folder / "plan.json"
        run("dynmo_balance", "partition", str(folder / "static"), "--balancer", "exact", "-o", str(plan))
        step_ns = [
            json.loads(
                run("dynmo_balance", "simulate", str(folder / "static"), "--plan", str(each), "--format", "json")
            )
            for each in (folder / "static" / "plans" / "plan-000000.json", plan)
        ]
        balanced = train(folder, "balanced", steps, [*options, "--balance", "offline", "--plan", str(plan)])
        same = [(a["lm_loss"], a["grad_norm"]) for a in static] == [(b["lm_loss"], b["grad_norm"]) for b in balanced]
        uniform, exact = (each["step_ns"] for each in step_ns)
        return measured(static), measured(balanced), uniform / exact, same


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--technique", action="append", choices=TECHNIQUES)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=14)
    given, more = arguments.parse_known_args()
    emit("| technique | uniform ms | exact ms | ratio | predicted | measured / predicted | losses |")
    emit("|---|---|---|---|---|---|---|")
    for technique in given.technique or TECHNIQUES:
        for _ in range(given.repeats):
            uniform, exact, predicted, same = one(technique, given.steps, more)
            ratio = uniform / exact
            bits = "same bits" if same else "DIFFER"
            emit(
                f"| {technique} | {uniform:.0f} | {exact:.0f} | {ratio:.2f} | {predicted:.2f} | {ratio / predicted:.2f}"
                f" | {bits} |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
