"""Each technique on two stages: two static splits against the exact plan, and what that plan predicts.

For a technique three runs of two real processes: on Megatron's uniform split, on the exact plan of the *dense* model's
profile (the best without balancing), and on the exact plan of the technique's own profile. The measured ratios of step
times are compared with the predictions, and the losses of all runs must be the same bits. The technique ``none`` is the
plain model, to see what each saves.

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
    "experts": [
        *("--num-experts", "4", "--moe-router-topk", "1", "--moe-router-pre-softmax"),
        *("--moe-expert-capacity-factor", "0.5"),
    ],
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


def exact_plan(folder: Path, name: str) -> Path:
    """The exact plan of a run's profile."""
    plan = folder / f"{name}-plan.json"
    run("dynmo_balance", "partition", str(folder / name), "--balancer", "exact", "-o", str(plan))
    return plan


def plan_with_cut_of(other: Path, plan: Path) -> Path:
    """A plan whose second stage begins where that of another plan does; techniques may join the items of a block."""
    begin = json.loads(other.read_text())["stages"][1]["items"][0]
    document = json.loads(plan.read_text())
    items = [item for stage in document["stages"] for item in stage["items"]]
    layer = begin.rpartition(".")[0]
    cut = items.index(begin) if begin in items else items.index(layer)
    for stage, part in zip(document["stages"], (items[:cut], items[cut:]), strict=True):
        stage["items"] = part
    found = plan.with_name("dense-optimal.json")
    # What the planner predicted is of another partition.
    found.write_text(json.dumps(document | {"predicted": None}))
    return found


def predicted_ms(run_dir: Path, plan: Path) -> float:
    """The simulated step of a plan on the costs of a run."""
    text = run("dynmo_balance", "simulate", str(run_dir), "--plan", str(plan), "--format", "json")
    return json.loads(text)["step_ns"] / 1e6


def one(technique: str, steps: int, more: list[str]) -> list[str]:
    """The cells of a row: steps in ms, ratios to the exact plan measured and predicted, and whether bits are equal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data")
        # Frozen layers need a head of their own, which the dense model of that row has, too.
        dense_options = [each for each in TECHNIQUES[technique] if each.startswith("--untie")]
        train(folder, "dense", steps, [*dense_options, *more])
        options = [*TECHNIQUES[technique], *more]
        uniform = train(folder, "uniform", steps, options)
        plan = exact_plan(folder, "uniform")
        static_plan = plan_with_cut_of(exact_plan(folder, "dense"), plan)
        runs = [uniform]
        for each, path in (("static", static_plan), ("balanced", plan)):
            runs.append(train(folder, each, steps, [*options, "--balance", "offline", "--plan", str(path)]))
        plans = (folder / "uniform" / "plans" / "plan-000000.json", static_plan, plan)
        predicted = [predicted_ms(folder / "uniform", each) for each in plans]
    times = [measured(lines) for lines in runs]
    bits = [[(line["lm_loss"], line["grad_norm"]) for line in lines] for lines in runs]
    ratios = [
        f"{time / times[-1]:.2f} ({guess / predicted[-1]:.2f})"
        for time, guess in zip(times[:-1], predicted[:-1], strict=True)
    ]
    same = "same bits" if bits[0] == bits[1] == bits[2] else "DIFFER"
    return [*(f"{time:.0f}" for time in times), *ratios, same]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--technique", action="append", choices=TECHNIQUES)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=14)
    given, more = arguments.parse_known_args()
    emit(
        "| technique | uniform ms | dense-optimal ms | exact ms | x uniform (predicted) | x dense-optimal (predicted)"
        " | losses |"
    )
    emit("|---|---|---|---|---|---|---|")
    for technique in given.technique or TECHNIQUES:
        for _ in range(given.repeats):
            emit(f"| {technique} | {' | '.join(one(technique, given.steps, more))} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
