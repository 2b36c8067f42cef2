"""What the start of a run costs: processes that a server forks, and processes that are executed one by one.

    python tests/benchmarks/train_start.py [--ranks 2 8 --repeats 3 --ways fork spawn]

Each run is whole: launcher, processes, four steps on mock data, a migration after step 2 that shifts every boundary by
one layer, a checkpoint, the end. Both ways take turns. First step and wall time are seconds by the clock from the start
of the launcher, processor time is that of all its processes. Memory is the sum of the proportional set sizes (PSS) of
the launcher and all below it while the processes wait at step 2; a page that N processes share counts 1/N in each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS, ScriptedPlanner

ASK_STEP = 2


@dataclass(frozen=True, kw_only=True)
class Start:
    """One run.

    Attributes:
        first_step_s: seconds until step 1 was logged.
        wall_s: seconds until the launcher ended.
        cpu_s: processor time of all processes, in seconds.
        pss_bytes: memory of all processes.
        moved: number of items that migrated.
    """

    first_step_s: float
    wall_s: float
    cpu_s: float
    pss_bytes: int
    moved: int


def command(ranks: int, way: str, folder: Path) -> list[str]:
    options = {
        "--num-layers": max(4, ranks + ranks // 16),
        "--hidden-size": 32,
        "--num-attention-heads": 2,
        "--seq-length": 16,
        "--vocab-size": 64,
        "--micro-batch-size": 1,
        "--global-batch-size": 4,
        "--train-iters": 2 * ASK_STEP,
        "--rebalance-interval": ASK_STEP,
        "--log-interval": 1,
        "--lr": 0.001,
        "--eval-iters": 0,
        "--device": "cpu",
        "--run-dir": folder / "run",
    }
    words = [str(word) for pair in options.items() for word in pair]
    launch = ["launch", "local", "--worker-start", way, "--nproc", str(ranks), "--log-dir", str(folder / "logs"), "--"]
    return [sys.executable, "-m", "dynmo_train", *launch, "pretrain", "gpt", "--mock-data", *words]


def process_tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in process_tree(int(child)))]


def pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def shifted(stages: list[list[str]]) -> list[list[str]]:
    """The stages with every boundary one layer later: two items, attention and MLP."""
    received = [*(stage[:2] for stage in stages[1:]), []]
    remaining = [stages[0], *(stage[2:] for stage in stages[1:])]
    return [own + more for own, more in zip(remaining, received, strict=True)]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(ranks: int, way: str) -> Start:
    folder, cpu_before, began = Path(tempfile.mkdtemp()), cpu_s(), time.monotonic()
    try:
        with (folder / "out").open("w") as out:
            words = [*command(ranks, way, folder), *SCRIPTED_PLANNER_OPTIONS]
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
            metrics = folder / "run" / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise RuntimeError((folder / "out").read_text()[-2000:])
                time.sleep(0.01)
            first_step_s = time.monotonic() - began
            planner = ScriptedPlanner(folder / "run")
            planner.wait_for_ask(ASK_STEP, process)
            memory = sum(map(pss_bytes, process_tree(process.pid)))
            planner.answer(shifted([stage["items"] for stage in planner.active()["stages"]]))
            planner.keep_until_end(process)
            if process.wait():
                raise RuntimeError((folder / "out").read_text()[-2000:])
        wall_s = time.monotonic() - began
        events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
        moved = sum(len(event.get("moves", ())) for event in events)
        used_s = cpu_s() - cpu_before
        return Start(first_step_s=first_step_s, wall_s=wall_s, cpu_s=used_s, pss_bytes=memory, moved=moved)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["fork", "spawn"])
    arguments = parser.parse_args()
    out = sys.stdout.write
    out("| ranks | start | first step s | wall s | processor s | memory MB | moved items | load |\n")
    out("|---|---|---|---|---|---|---|---|\n")
    for ranks in arguments.ranks:
        for _ in range(arguments.repeats):
            for way in arguments.ways:
                load, found = os.getloadavg()[0], measure(ranks, way)
                times = f"{found.first_step_s:.1f} | {found.wall_s:.1f} | {found.cpu_s:.1f}"
                out(f"| {ranks} | {way} | {times} | {found.pss_bytes / 1e6:,.0f} | {found.moved} | {load:.1f} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
