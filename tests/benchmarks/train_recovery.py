"""Time and steps lost to the death of a rank, or to a node that joins: by a restart, and without one.

Each run is whole: launcher, processes, data, checkpoints; one process is killed by SIGKILL, after the same step in all
runs. The restart reads a checkpoint of every ``--interval`` steps, continuing reads the copies of the same steps.
Times are those of the incidents of ``events.jsonl``: the pause from the death until training resumes, and the work
since the checkpoint or copy, which is repeated. Also the cost where nobody dies: seconds per copy and per checkpoint.
The processor time is that of the whole run, next to that of an undisturbed run with copies; other programs on the
machine change it less than the other times. Ways take turns; each figure is the minimum of the repetitions.

Then a node joins: two launchers on this machine, of which the second one starts while the first one trains alone. The
pause is the time between the two steps, less the median; it is observed from outside, in the same way for both.

python tests/benchmarks/train_recovery.py [--ranks 2 3] [--layers 12] [--width 256] [--interval 10] [--repeats 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
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
        processor_s: processor time of all processes of the run.
    """

    pause_s: float
    work_s: float
    steps: int
    cost_s: float
    processor_s: float


def command(arguments: argparse.Namespace, run: Path, launch: list[str], steps: int, *, continues: bool) -> list[str]:
    """The command line of a launcher with its own words ``launch``."""
    option = "--peer-checkpoint-interval" if continues else "--save-interval"
    options = {
        "--num-layers": arguments.layers,
        "--hidden-size": arguments.width,
        "--num-attention-heads": 4,
        "--seq-length": TOKENS,
        "--vocab-size": VOCABULARY,
        "--micro-batch-size": MICRO_BATCH,
        "--global-batch-size": 4 * MICRO_BATCH,
        "--train-iters": steps,
        "--lr": 1e-4,
        "--eval-iters": 0,
        "--device": "cpu",
        option: arguments.interval,
        "--run-dir": run,
    }
    words = [str(word) for pair in options.items() for word in pair]
    launch = [*launch, "--max-restarts", "1", "--grace-s", "1", "--log-dir", str(run.parent / "logs")]
    return [sys.executable, "-m", "dynmo_train", "launch", *launch, "--", "pretrain", "gpt", "--mock-data", *words]


def lines_of(path: Path) -> list[dict]:
    """The complete lines of a log; empty before it exists."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def process_of(launcher: int, rank: int) -> int:
    """The process id of a rank, by the environment of the launcher's children."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise RuntimeError(f"no process of rank {rank}")


def processor_time() -> float:
    """Seconds of processor time of all ended descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill_in_between(arguments: argparse.Namespace, ranks: int, run: Path, process: subprocess.Popen) -> None:
    """Kill the last rank in the middle between two copies; returns early if the run ends."""
    killed_at = 2 * arguments.interval - arguments.interval // 2
    while (steps := lines_of(run / "metrics.jsonl")[-1:]) == [] or steps[0]["step"] < killed_at:
        if process.poll() is not None:
            return
        time.sleep(POLL_S)
    os.kill(process_of(process.pid, ranks - 1), signal.SIGKILL)


def recovery(arguments: argparse.Namespace, ranks: int, way: str) -> Recovery:
    """Run once, with the death of a rank unless the way is ``undisturbed``."""
    folder, before = Path(tempfile.mkdtemp()), processor_time()
    run = folder / "run"
    try:
        with (folder / "out").open("w") as out:
            launch = ["local", "--nproc", str(ranks)]
            words = command(arguments, run, launch, 3 * arguments.interval, continues=way != "restart")
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
            if way != "undisturbed":
                kill_in_between(arguments, ranks, run, process)
            if process.wait():
                raise RuntimeError((folder / "out").read_text()[-2000:])
        return read_recovery(run, way, processor_time() - before)
    finally:
        shutil.rmtree(folder)


def read_recovery(run: Path, way: str, processor_s: float) -> Recovery:
    """What a run recorded of its death."""
    events, metrics = lines_of(run / "events.jsonl"), lines_of(run / "metrics.jsonl")
    found = {each["incident"]: each for each in events if each["kind"] == "incident"}
    copies = [line["peer_copy_stalled_s"] for line in metrics if "peer_copy_s" in line]
    pause_s, work_s, steps, costs = 0.0, 0.0, 0, copies
    if way == "continue":
        pause_s = float(re.findall(r"paused for ([\d.]+) s", found["continued"]["message"])[0])
        work_s, steps = found["continued"]["seconds_lost"] - pause_s, found["continued"]["steps_lost"]
    elif way == "restart":
        pause_s = found["restart"]["seconds_lost"]
        work_s, steps = found["process_death"]["seconds_lost"], found["process_death"]["steps_lost"]
        costs = [event["stalled_s"] for event in events if event["kind"] == "checkpoint"]
    cost_s = statistics.median(costs)
    return Recovery(pause_s=pause_s, work_s=work_s, steps=steps, cost_s=cost_s, processor_s=processor_s)


class StepWatch(threading.Thread):
    """Records when the line of each step appears in ``metrics.jsonl``.

    Args:
        run: run directory.
    """

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._metrics, self.stopped = run / "metrics.jsonl", threading.Event()
        self.times: dict[int, float] = {}

    def run(self) -> None:
        """Look until ``stopped``."""
        while not self.stopped.wait(POLL_S):
            for line in lines_of(self._metrics)[len(self.times) :]:
                self.times.setdefault(line["step"], time.monotonic())

    def pause_s(self, step: int) -> float:
        """Seconds between a step and the next one, less the median of all steps."""
        times = [self.times[each] for each in sorted(self.times)]
        usual_s = statistics.median(after - before for before, after in itertools.pairwise(times))
        return self.times[step + 1] - self.times[step] - usual_s


def join_pause_s(arguments: argparse.Namespace, way: str) -> float:
    """Seconds for which training was paused because a node joined."""
    folder = Path(tempfile.mkdtemp())
    run, kind = folder / "run", "growth" if way == "grow" else "restart"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes: list[subprocess.Popen] = []
    watch = StepWatch(run)
    try:
        with (folder / "out").open("w") as out:
            for rank in range(2):
                launch = ["node", "--nproc", "1", "--nnodes", "1:2", "--node-rank", str(rank), "--master-port", port]
                words = command(arguments, run, launch, 1000 * arguments.interval, continues=way == "grow")
                nodes.append(subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT))
                if not rank:
                    watch.start()
                    wait_for_steps(nodes[0], watch, 2, folder / "out")
            while not (joined := [each for each in lines_of(run / "events.jsonl") if each.get("incident") == kind]):
                wait_for_steps(nodes[0], watch, len(watch.times) + 1, folder / "out")
            wait_for_steps(nodes[0], watch, len(watch.times) + arguments.interval // 2, folder / "out")
        return watch.pause_s(joined[0]["step"])
    finally:
        watch.stopped.set()
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_steps(process: subprocess.Popen, watch: StepWatch, count: int, out: Path) -> None:
    """Wait until the lines of ``count`` steps have appeared."""
    while len(watch.times) < count:
        if process.poll() is not None:
            raise RuntimeError(out.read_text()[-2000:])
        time.sleep(POLL_S)


def row(ranks: int, way: str, found: list[Recovery]) -> str:
    """A row of the table: minima, and the steps of all repetitions."""
    steps = "-".join(map(str, sorted({each.steps for each in found})))
    pause_s, work_s = min(each.pause_s for each in found), min(each.work_s for each in found)
    cost_s, processor_s = min(each.cost_s for each in found), min(each.processor_s for each in found)
    return f"| {ranks} | {way} | {pause_s:.2f} | {work_s:.2f} | {steps} | {cost_s:.3f} | {processor_s:.1f} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    out = sys.stdout.write
    out("| ranks | way | pause s | repeated work s | repeated steps | pause per copy or checkpoint s | processor s |\n")
    out("|---|---|---|---|---|---|---|\n")
    ways = ("undisturbed", "restart", "continue")
    for ranks in arguments.ranks:
        found: dict[str, list[Recovery]] = {way: [] for way in ways}
        for _ in range(arguments.repeats):
            for way in ways:
                found[way].append(recovery(arguments, ranks, way))
        for way in ways:
            out(row(ranks, way, found[way]))
        sys.stdout.flush()
    out("\n| a node joins | pause s, of each repetition |\n|---|---|\n")
    pauses: dict[str, list[float]] = {"restart": [], "grow": []}
    for _ in range(arguments.repeats):
        for way, of_way in pauses.items():
            of_way.append(join_pause_s(arguments, way))
            sys.stderr.write(f"{way}: {of_way[-1]:.2f} s\n")
    for way, of_way in pauses.items():
        out(f"| {way} | {', '.join(f'{each:.2f}' for each in sorted(of_way))} |\n")


if __name__ == "__main__":
    main()
