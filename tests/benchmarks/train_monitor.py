"""Processor time of ``dynmo-train monitor --once`` and memory of ``dynmo-plan watch --once`` on a long run.

    python tests/benchmarks/train_monitor.py --steps 1000000
    python tests/benchmarks/train_monitor.py --profile-gb 10

The first form writes the run directory of a run of that many steps, as rotated by default. The second one writes a
profile of one part. Both remove what they wrote.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from dynmo_balance._common.console import emit
from tests.paths import CONTRACTS

ROTATE_BYTES = 128_000_000
WORKERS, ITEMS = 4, 34


def metrics_line(step: int) -> str:
    """A line as ``dynmo-train`` writes it."""
    return (
        f'{{"step": {step}, "plan_id": 0, "lm_loss": {2 + 8 / (1 + step / 1e4):.6f}, "loss": 2.5, "grad_norm": 0.731'
        f', "learning_rate": 0.00015, "tokens": 524288, "samples": 256, "step_ns": 845123456, "pause_ns": 0'
        f', "model_flops": 123456789012345, "loss_scale": 1.0, "updated": true, "consumed_samples": {step * 256}'
        ', "host_ns": 812345, "input_ns": 12345, "learning_rate_decoupled": null}\n'
    )


def header() -> dict[str, object]:
    """A header with ``ITEMS`` items on ``WORKERS`` workers."""
    document = json.loads((CONTRACTS / "profile/valid/header-only.jsonl").read_text(encoding="utf-8"))
    item, worker = document["items"][0], document["workers"][0]
    items = [{**item, "name": f"layers.{at}", "layer": f"layers.{at}", "tied_to": None} for at in range(ITEMS)]
    return {**document, "items": items, "workers": [{**worker, "worker": at} for at in range(WORKERS)]}


def step_tail() -> str:
    """What follows the number of the step in a line of the profile."""
    times = [1_234_567] * ITEMS
    lists = {"forward_ns": times, "backward_ns": times, "activation_bytes": times}
    workers = {"busy_ns": [800_000_000] * WORKERS, "peak_memory_bytes": [70_000_000_000] * WORKERS}
    return json.dumps({"plan_id": 0, "step_ns": 845_123_456, **lists, **workers})[1:] + "\n"


class Parts:
    """Writes lines into parts of ``ROTATE_BYTES``, each of which begins with ``first``."""

    def __init__(self, path: Path, first: str = "") -> None:
        self.path, self.first, self.number = path, first, 0
        self.handle = path.open("w", encoding="utf-8")
        self.size = self.handle.write(first)

    def write(self, line: str) -> None:
        """Write a line, in a new part if this one is full."""
        if self.size > ROTATE_BYTES:
            self.handle.close()
            self.number += 1
            os.rename(self.path, f"{self.path}.{self.number}")
            self.handle = self.path.open("w", encoding="utf-8")
            self.size = self.handle.write(self.first)
        self.size += self.handle.write(line)


def write_run(run: Path, steps: int) -> None:
    """Write the files of a run, with an incident every 10,000 steps and a checkpoint every 1,000."""
    config = {"model": {"family": "gpt"}, "training": {"train_iters": 2 * steps}}
    (run / "run.json").write_text(json.dumps({"run_id": "a", "segment": 0, "config": config}), encoding="utf-8")
    first = {**header(), "x_continues": True}
    metrics, profile = Parts(run / "metrics.jsonl"), Parts(run / "profile.jsonl", json.dumps(first) + "\n")
    events, tail = Parts(run / "events.jsonl"), step_tail()
    for step in range(1, steps + 1):
        metrics.write(metrics_line(step))
        profile.write(f'{{"record": "step", "step": {step}, {tail}')
        if step % 1000 == 0:
            event = {"time_utc": "2026-01-01T00:00:00Z", "step": step, "kind": "checkpoint", "message": "saved"}
            events.write(json.dumps(event) + "\n")
        if step % 10_000 == 0:
            cost = {"incident": "restart", "cause": "x", "ranks": [], "hosts": [], "seconds_lost": 9, "steps_lost": 3}
            events.write(json.dumps({**event, "kind": "incident", **cost}) + "\n")
    for parts in (metrics, profile, events):
        parts.handle.close()
    numbers = range(1, profile.number - 7)
    for number in numbers:  # as --profile-parts 8
        os.unlink(f"{profile.path}.{number}")


def measured(command: list[str]) -> tuple[float, int, str]:
    """Processor time in s, peak resident memory in MB and output of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if process.returncode:
        raise SystemExit(output)
    return seconds, after.ru_maxrss // 1024, output


def main() -> None:
    """Write, measure, print, remove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--profile-gb", type=float)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dynmo-monitor-"))
    try:
        if options.profile_gb is None:
            write_run(folder, options.steps)
            sizes = {name: sum(p.stat().st_size for p in folder.glob(f"{name}*")) for name in ("metrics", "profile")}
            emit(f"{options.steps:,} steps, {', '.join(f'{n} {s / 1e6:,.0f} MB' for n, s in sizes.items())}")
            for _ in range(options.repeats):
                seconds, memory, output = measured(
                    [sys.executable, "-m", "dynmo_train", "monitor", "--once", str(folder)]
                )
                emit(f"monitor --once: {seconds:.2f} s of processor time, {memory} MB, {output.splitlines()[0]}")
            return
        if shutil.disk_usage(folder).free < 2 * options.profile_gb * 1e9:
            raise SystemExit("not enough free disk space")
        (folder / "plans").mkdir()
        tail, step = step_tail(), 0
        with (folder / "profile.jsonl").open("w", encoding="utf-8") as handle:
            handle.write(json.dumps(header()) + "\n")
            size = 0
            while size < options.profile_gb * 1e9:
                lines = "".join(f'{{"record": "step", "step": {step + at}, {tail}' for at in range(1, 1001))
                size += handle.write(lines)
                step += 1000
        seconds, memory, _ = measured([sys.executable, "-m", "dynmo_balance", "watch", str(folder), "--once"])
        size = (folder / "profile.jsonl").stat().st_size
        emit(f"watch --once: {size / 1e9:.2f} GB, {step:,} steps: {seconds:.1f} s of processor time, {memory} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
