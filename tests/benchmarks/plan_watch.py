"""How close the online planner's policies come to hindsight, on scripted traces of the six techniques and pure noise.

    python tests/benchmarks/plan_watch.py [--steps 4000] [--pauses 300,5000] [--seeds 2]

Traces: GPT with 48 layers, hidden size 1024, 2048 tokens, microbatch 2, 32 microbatches, 8 workers, 3 % noise on every
time, by ``dynmo-plan profile build``. The number is total time over that of the offline optimum.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dynmo_balance._common.console import emit

TECHNIQUES = ("pruning", "freezing", "early-exit", "moe", "mod", "sparse-attention", "static")
MODEL = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1024, "n_head": 16, "n_positions": 2048, "vocab_size": 50257}


def plan(*arguments: object) -> str:
    command = [sys.executable, "-m", "dynmo_balance", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--pauses", default="300,5000", help="milliseconds")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    emit("| trace | seed | pause s | never | always | threshold | regret (moves) |")
    emit("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(MODEL))
        for technique in TECHNIQUES:
            for seed in range(options.seeds):
                profile = Path(folder) / f"{technique}-{seed}.jsonl"
                shape = ("--steps", options.steps, "--micro-batch-size", 2, "--noise", 0.03, "--seed", seed)
                plan("profile", "build", config, "-o", profile, "--technique", technique, *shape)
                for pause in options.pauses.split(","):
                    rows = json.loads(plan("replay", profile, "--pause-ms", pause, "--format", "json"))
                    found = {row["policy"]: row for row in rows}
                    ratios = " | ".join(f"{found[name]['ratio']:.4f}" for name in ("never", "always", "threshold"))
                    last = f"{found['regret']['ratio']:.4f} ({found['regret']['moves']})"
                    emit(f"| {technique} | {seed} | {float(pause) / 1000:g} | {ratios} | {last} |")


if __name__ == "__main__":
    main()
