"""From a profile line appended to the plan on disk: the online planner's own latency, in one process.

python tests/benchmarks/plan_latency.py [--layers 1000] [--stages 128]

With ``--microbatches`` the command ``dynmo-plan partition`` instead: its processor time, and its peak memory above that
of ``dynmo-plan --version``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
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


def profile(layers: int, stages: int, microbatches: int, virtual_stages: int) -> bytes:
    """A profile of random times, interleaved with several stages per worker."""
    rng = random.Random(1)
    times = [rng.randint(10**6, 5 * 10**6) for _ in range(layers)]
    schedule = "1f1b" if virtual_stages == 1 else "interleaved-1f1b"
    sizes = {"microbatches": microbatches, "virtual_stages_per_worker": virtual_stages, "schedule": schedule}
    step = {"record": "step", "step": 1, "plan_id": 0, "step_ns": 10**9, "forward_ns": times, "backward_ns": times}
    step |= {"activation_bytes": [0] * layers, "busy_ns": [None] * stages, "peak_memory_bytes": [None] * stages}
    return "".join(json.dumps(line) + "\n" for line in (header(layers, stages) | sizes, step)).encode()


# The peak of a process includes that of its parent before ``exec``; ``VmHWM`` is of the program alone.
MEASURED = """
import atexit, runpy, sys, time
from pathlib import Path
def report():
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    sys.stderr.write(f"{time.process_time()} {peak.split()[1]}")
atexit.register(report)
runpy.run_module("dynmo_balance", run_name="__main__", alter_sys=True)
"""


def measure_command(folder: Path, arguments: list[str]) -> tuple[float, int]:
    """Processor time in s and peak memory in bytes of ``dynmo-plan`` with these arguments."""
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], cwd=folder, capture_output=True, check=True)
    spent, peak = done.stderr.split()[-2:]
    return float(spent), int(peak) * 1024


def run_command(options: argparse.Namespace) -> None:
    """Print the costs of three plans."""
    sizes = options.layers, options.stages, options.microbatches, options.virtual_stages
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.jsonl")
        path.write_bytes(profile(*sizes))
        _, idle = measure_command(path.parent, ["--version"])
        for repetition in range(3):
            spent, peak = measure_command(path.parent, ["partition", str(path)])
            emit(
                f"repetition {repetition}: {spent:.2f} s of processor time, {(peak - idle) / 1e6:,.0f} MB at"
                " {} layers on {} workers, {} microbatches, {} stages per worker".format(*sizes)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--stages", type=int, default=128)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--virtual-stages", type=int, default=1)
    options = parser.parse_args()
    if options.microbatches:
        run_command(options)
        return
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
