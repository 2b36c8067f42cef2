"""Time and steps lost to the death of a rank: restart from a checkpoint on disk, and continuing without restart.

Each run is whole: launcher, processes, data, checkpoints; one process is killed by SIGKILL, after the same step in all
runs. The restart reads a checkpoint of every ``--interval`` steps, continuing reads the copies of the same steps.
Times are those of the incidents of ``events.jsonl``: the pause from the death until training resumes, and the work
since the checkpoint or copy, which is repeated. Also the cost where nobody dies: seconds per copy and per checkpoint.

python tests/benchmarks/train_recovery.py [--ranks 2 3] [--layers 12] [--width 256] [--interval 10] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TOKENS, MICRO_BATCH, VOCABULARY = 64, 2, 1024
POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What one death cost.

    Attributes:
        pause_s: seconds from the death until training resumed.
        work_s: seconds of work that was repeated.
        steps: steps that were repeated.
        cost_s: seconds for which one copy or one checkpoint paused training, median.
    """

    pause_s: float
    work_s: float
    steps: int
    cost_s: float


def command(arguments: argparse.Namespace, ranks: int, run: Path, *, continues: bool) -> list[str]:
    option = "--peer-checkpoint-interval" if continues else "--save-interval"
    options = {
        "--num-layers": arguments.layers,
        "--hidden-size": arguments.width,
        "--num-attention-heads": 4,
        "--seq-length": TOKENS,
        "--vocab-size": VOCABULARY,
        "--micro-batch-size": MICRO_BATCH,
        "--global-batch-size": 4 * MICRO_BATCH,
        "--train-iters": 3 * arguments.interval,
        "--lr": 1e-4,
        "--eval-iters": 0,
        "--device": "cpu",
        option: arguments.interval,
        "--run-dir": run,
    }
    words = [str(word) for pair in options.items() for word in pair]
    launch = ["launch", "local", "--nproc", str(ranks), "--max-restarts", "1", "--grace-s", "1"]
    launch += ["--log-dir", str(run.parent / "logs")]
    return [sys.executable, "-m", "dynmo_train", *launch, "--", "pretrain", "gpt", "--mock-data", *words]


def lines_of(path: Path) -> list[dict]:
    """The complete lines of a log; empty before it exists."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def process_of(launcher: int, rank: int) -> int:
    """The process id of a rank, by the environment of the launcher's children."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise RuntimeError(f"no process of rank {rank}")


def recovery(arguments: argparse.Namespace, ranks: int, *, continues: bool) -> Recovery:
    """Run once, and kill the last rank in the middle between two copies."""
    folder = Path(tempfile.mkdtemp())
    run, killed_at = folder / "run", 2 * arguments.interval - arguments.interval // 2
    try:
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(
                command(arguments, ranks, run, continues=continues), stdout=out, stderr=subprocess.STDOUT
            )
            while (steps := lines_of(run / "metrics.jsonl")[-1:]) == [] or steps[0]["step"] < killed_at:
                if process.poll() is not None:
                    raise RuntimeError((folder / "out").read_text()[-2000:])
                time.sleep(POLL_S)
            os.kill(process_of(process.pid, ranks - 1), signal.SIGKILL)
            if process.wait():
                raise RuntimeError((folder / "out").read_text()[-2000:])
        events, metrics = lines_of(run / "events.jsonl"), lines_of(run / "metrics.jsonl")
        found = {each["incident"]: each for each in events if each["kind"] == "incident"}
        if continues:
            lost = found["continued"]
            pause_s = float(re.findall(r"paused for ([\d.]+) s", lost["message"])[0])
            costs = [line["peer_copy_stalled_s"] for line in metrics if "peer_copy_s" in line]
            work_s = lost["seconds_lost"] - pause_s
        else:
            lost, pause_s = found["process_death"], found["restart"]["seconds_lost"]
            costs = [event["stalled_s"] for event in events if event["kind"] == "checkpoint"]
            work_s = lost["seconds_lost"]
        return Recovery(pause_s=pause_s, work_s=work_s, steps=lost["steps_lost"], cost_s=statistics.median(costs))
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    out = sys.stdout.write
    out("| ranks | way | pause s | repeated work s | repeated steps | pause per copy or checkpoint s |\n")
    out("|---|---|---|---|---|---|\n")
    for ranks in arguments.ranks:
        for continues in (False, True):
            found = [recovery(arguments, ranks, continues=continues) for _ in range(arguments.repeats)]
            pause, work, cost = (
                statistics.median(values)
                for values in zip(*((each.pause_s, each.work_s, each.cost_s) for each in found), strict=True)
            )
            way = "continue" if continues else "restart"
            steps = "-".join(map(str, sorted({each.steps for each in found})))
            out(f"| {ranks} | {way} | {pause:.2f} | {work:.2f} | {steps} | {cost:.3f} |\n")


if __name__ == "__main__":
    main()
