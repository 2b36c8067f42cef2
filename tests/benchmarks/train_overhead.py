"""What profiling and planning cost the training, on CPU.

    python tests/benchmarks/train_overhead.py [--width 256 --steps 40]

One run on two processes, online, with the planner beside it under the policy ``never``: every other step is
sampled and written to the profile, every tenth boundary looks for plans, as by default; the steps between are as with
``--balance off``. Both kinds alternate, so that whatever else the machine does falls on both. Seconds are those of rank
0, from the begin of the step to the end of its boundary; the share is the median over neighbouring steps of the
difference, over the median of the plain steps. Goal: below 1 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from train_engine_overhead import say

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from whole_runs import write_data
from workers import run_workers

from dynmo_train.config import Facts, resolve
from dynmo_train.loop import _Run
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.world import join_world, leave_world
from dynmo_train.starting import begin


def timed_steps(values: dict[str, Any], steps: int) -> list[float]:
    """Seconds of each step with its boundary; the even ones are sampled."""
    config = resolve(flags=values, file={}, command={"family": "gpt"}, facts=Facts(world_size=2))
    world = join_world("cpu", dims=ParallelDims(pipeline=2))
    run = _Run(config, begin(config, world))
    if run._planner is not None:
        run._planner.start()
    times: list[float] = []
    try:
        for _ in range(steps):
            started = time.perf_counter()
            run._train_step()
            if run._controller is not None:
                run._controller.boundary(run.step)
            times.append(time.perf_counter() - started)
    finally:
        run.close()
        leave_world()
    return times


def main() -> None:
    """Print the share."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 256), ("steps", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Any] = {
            "num_layers": 4,
            "hidden_size": given.width,
            "num_attention_heads": 4,
            "seq_length": 128,
            "micro_batch_size": 2,
            "global_batch_size": 16,
            "train_iters": given.steps + 1,
            "lr": 1e-3,
            "vocab_size": 97,
            "split": "1",
            "eval_iters": 0,
            "log_interval": 10**6,
            "data_path": str(write_data(Path(folder) / "data")),
            "run_dir": str(Path(folder) / "run"),
            "balance": "online",
            "balance_policy": "never",
            "rebalance_interval": 10,
            "profile_interval": 2,
            "pipeline_model_parallel_size": 2,
        }
        os.environ["PYTHONWARNINGS"] = "ignore"
        times = run_workers(timed_steps, 2, values, given.steps, joins=False)[0]
    times = times[4:]  # the first ones build stages
    plain, watched = times[0::2], times[1::2]
    extra = [w - (before + after) / 2 for w, before, after in zip(watched, plain, plain[1:], strict=False)]
    step = statistics.median(plain)
    share = statistics.median(extra) / step
    say(f"| {given.width} | {step * 1e3:.1f} | {statistics.median(extra) * 1e3:.2f} | {share:.2%} |")


if __name__ == "__main__":
    main()
