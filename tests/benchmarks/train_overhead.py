"""What profiling and planning cost the training, on CPU.

    python tests/benchmarks/train_overhead.py [--width 256 --steps 80]

One run on two processes, online, with the planner under the policy ``never``: every other step is
sampled and written to the profile, every tenth boundary looks for plans, as by default; the steps between are as with
``--balance off``. Both kinds alternate, so that whatever else the machine does falls on both. Seconds are from the
begin of the step to the end of its boundary: those of rank 0 by the clock, and those that the processors of both ranks
worked, which no waiting for another process or another program gets into. A share is the median over neighbouring steps
of the difference, over the median of the plain steps; it counts sampled steps alone. The planner is a process of its
own; its share is the processor time of its whole life after its start-up over that of the run. Goal: below 1 %.
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

from train_engine_overhead import log

sys.path.insert(0, str(Path(__file__).parents[2]))
from dynmo_train.config import DefaultContext, resolve
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import destroy_world, init_world
from dynmo_train.trainer.loop import Trainer
from dynmo_train.trainer.setup import setup_run
from tests.distributed.whole_runs import write_data
from tests.distributed.workers import run_workers

PLAIN_START = 4
"""The first steps build stages."""


def work_of(pid: int | None) -> float:
    """Processor seconds of a process; 0 without one."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed_steps(values: dict[str, Any], steps: int) -> tuple[list[tuple[float, float]], float]:
    """Seconds of each step with its boundary, by the clock and of this process's work, and the planner's share.

    The even steps are sampled. The planner's share is of the steps behind the first four.
    """
    config = resolve(flags=values, file={}, command={"family": "gpt"}, context=DefaultContext(world_size=2))
    world = init_world("cpu", dims=ParallelDims(pipeline=2))
    run = Trainer(setup_run(config, world))
    if run.planner is not None:
        run.planner.start()
    times: list[tuple[float, float]] = []
    planner = None if run.planner is None else run.planner.pid
    begun = begun_planning = planned = 0.0
    try:
        for step in range(steps):
            if step == PLAIN_START:
                begun, begun_planning = time.perf_counter(), work_of(planner)
            started, working = time.perf_counter(), time.process_time()
            run.train_step()
            if run.controller is not None:
                run.controller.at_boundary(run.step)
            times.append((time.perf_counter() - started, time.process_time() - working))
        planned = (work_of(planner) - begun_planning) / (time.perf_counter() - begun)
    finally:
        run.close(0)
        destroy_world()
    return times, planned


def main() -> None:
    """Print the share."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 256), ("steps", 80)):
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
        ranks = run_workers(timed_steps, 2, values, given.steps, joins=False)
    clock = [seconds for seconds, _ in ranks[0][0]]
    work = [sum(each) for each in zip(*([seconds for _, seconds in times] for times, _ in ranks), strict=True)]
    figures = [str(given.width), *share_of(clock), *share_of(work), f"{ranks[0][1]:.2%}"]
    log(f"| {' | '.join(figures)} |")


def share_of(times: list[float]) -> list[str]:
    """Milliseconds of a plain step, what a sampled one takes more, and its share."""
    times = times[PLAIN_START:]
    plain, watched = times[0::2], times[1::2]
    extra = [w - (before + after) / 2 for w, before, after in zip(watched, plain, plain[1:], strict=False)]
    step, more = statistics.median(plain), statistics.median(extra)
    return [f"{step * 1e3:.1f}", f"{more * 1e3:.2f}", f"{more / step:.2%}"]


if __name__ == "__main__":
    main()
