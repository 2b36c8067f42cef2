"""From a profile line appended to the plan on disk: the online planner's own latency, in one process.

python tests/benchmarks/plan_latency.py [--layers 1000] [--stages 128]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from dynmo_balance._common.console import emit
from dynmo_balance._common.document import append_line, envelope
from dynmo_balance.formats.plan import plan_numbers
from dynmo_balance.online.decision import WatchOptions
from dynmo_balance.online.watch import Watcher


def header(layers: int, stages: int) -> dict[str, object]:
    item = {"kind": "layer", "param_count": 1, "param_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
    worker = {"hosts": ["a"], "device": "cuda", "memory_bytes": None, "relative_speed": 1, "releasable": True}
    return {
        **envelope("dynmo.profile", 1, "plan_latency"),
        "record": "header",
        "run_id": "latency",
        "segment": 0,
        "model": {"family": "gpt", "num_layers": layers, "hidden_size": 1, "sequence_length": 1},
        "schedule": "1f1b",
        "virtual_stages_per_worker": 1,
        "granularity": "layer",
        "microbatches": 1,
        "micro_batch_size": 1,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_parallel_size": 1,
        "link": None,
        "workers": [{"worker": p, "ranks": [p], **worker} for p in range(stages)],
        "items": [
            {
                "name": f"layers.{i}",
                "layer": f"layers.{i}",
                **item,
                "boundary_bytes": 1,
                "cut_before": True,
                "tied_to": None,
            }
            for i in range(layers)
        ],
    }


def initial(layers: int, stages: int) -> dict[str, object]:
    names = [f"layers.{i}" for i in range(layers)]
    cuts = [p * layers // stages for p in range(stages + 1)]
    return {
        **envelope("dynmo.plan", 1, "plan_latency"),
        "plan_id": 0,
        "run_id": "latency",
        "base_plan_id": None,
        "read_to_step": 0,
        "action": "move",
        "apply_at_step": None,
        "balancer": "initial",
        "schedule": "1f1b",
        "virtual_stages_per_worker": 1,
        "stages": [{"stage": p, "worker": p, "items": names[cuts[p] : cuts[p + 1]]} for p in range(stages)],
        "released_workers": [],
        "predicted": None,
        "optimality": None,
        "migration": {"moves": [], "bytes": 0, "max_link_bytes": 0, "pause_ns": None},
        "reason": "initial",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--stages", type=int, default=128)
    options = parser.parse_args()
    rng = random.Random(1)
    for repetition in range(3):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder)
            (run / "plans").mkdir()
            append_line(run / "profile.jsonl", header(options.layers, options.stages))
            append_line(run / "plans" / "plan-000000.json", initial(options.layers, options.stages))
            watcher = Watcher(run, WatchOptions(policy="always", min_records=1, objective="bottleneck"))
            watcher.poll()
            times = [rng.randint(10**6, 5 * 10**6) for _ in range(options.layers)]
            workers = [None] * options.stages
            step = {"record": "step", "step": 1, "plan_id": 0, "step_ns": 10**9, "forward_ns": times}
            step |= {"backward_ns": times, "activation_bytes": [0] * options.layers}
            append_line(run / "profile.jsonl", {**step, "busy_ns": workers, "peak_memory_bytes": workers})
            started = time.perf_counter()
            watcher.poll()
            spent = 1e3 * (time.perf_counter() - started)
            if plan_numbers(run / "plans") != [0, 1]:
                raise SystemExit("no plan was written")
            emit(f"repetition {repetition}: {spent:.1f} ms at {options.layers} layers on {options.stages} stages")


if __name__ == "__main__":
    main()
