"""Training over a slow network: hosts as network namespaces, joined by a switch, every port limited to a rate.

Root on Linux, with ip and tc (iproute2). Every rank runs in a namespace of its own; bytes are those of the interfaces'
counters. What was made is taken away again at the end, also after an error.

python tests/benchmarks/train_network.py [--mbit 100,1000] [--schemes baseline,cb,...] [--results FOLDER]
python tests/benchmarks/train_network.py --pipeline 4 --mbit 100,300 --schemes baseline,cb+fe+sc1,cb+fe+sc2,cb+fe+sc3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from dynmo_train._common.console import emit
from tests.distributed.whole_runs import write_data

PREFIX = "dynmo-net"
SWITCH = f"{PREFIX}-switch"
CB = ["--inter-grad-comp", "--inter-grad-comp-rank", "8"]
LEP = ["--use-error-feedback"]
FE = ["--emb-comm-opt"]
SC = ["--grad-comp", "--grad-comp-rank", "8", "--grad-comp-warm-up", "0", "--selective-grad-comp"]
WAYS = range(1, 9)
PLAN_CB = ["--inter-grad-comp-rank", "8"]
SCHEMES = {
    "baseline": ([], []),
    "cb": (CB, PLAN_CB),
    "cb+lep": (CB + LEP, [*PLAN_CB, "--use-error-feedback"]),
    "cb+fe": (CB + FE, [*PLAN_CB, "--emb-comm-opt"]),
    **{
        f"cb+fe+sc{way}": (
            [*CB, *FE, *SC, "--selective-grad-comp-way", str(way)],
            [*PLAN_CB, "--emb-comm-opt", "--grad-comp-rank", "8", "--selective-grad-comp-way", str(way)],
        )
        for way in WAYS
    },
}
DEFAULT_SCHEMES = ("baseline", "cb", "cb+lep", "cb+fe", "cb+fe+sc2")
MODEL = {
    "num-layers": "4",
    "hidden-size": "512",
    "num-attention-heads": "8",
    "seq-length": "128",
    "vocab-size": "2048",
    "micro-batch-size": "1",
    "lr": "1e-3",
    "split": "100,0,0",
    "num-threads": "1",
    "eval-iters": "0",
    "log-interval": "1",
}
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes along each axis."""

    pipeline: int
    data: int
    microbatches: int

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _limit(namespace: str, device: str, mbit: int) -> None:
    burst = max(16 * 1024, mbit * 125)
    words = ["tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "500ms"]
    _ip("netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root", *words)


def _host(rank: int) -> str:
    return f"{PREFIX}-{rank}"


@contextlib.contextmanager
def network(ranks: int, mbit: int | None) -> Iterator[None]:
    """Hosts 10.77.0.1, ... behind a switch; both ends of each wire send at ``mbit`` at most; None: no limit."""
    _remove()
    try:
        _ip("netns", "add", SWITCH)
        _ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "bridge", "up")
        for rank in range(ranks):
            host, port = _host(rank), f"port{rank}"
            _ip("netns", "add", host)
            _ip("-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")
            if mbit is not None:
                _limit(host, "eth0", mbit)
                _limit(SWITCH, port, mbit)
        yield
    finally:
        _remove()


def _remove() -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _sent(ranks: int) -> list[int]:
    """Bytes that each host has sent."""
    options = []
    for rank in range(ranks):
        command = ["ip", "-n", _host(rank), "-s", "-j", "link", "show", "eth0"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        options.append(int(json.loads(shown)[0]["stats64"]["tx"]["bytes"]))
    return options


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(layout: Layout, data: Path, folder: Path, flags: list[str], steps: int) -> tuple[float, float, list[float]]:
    """One run over the network: its steps' median in s, tokens of a step, and MB that each rank sends in a step."""
    batch = layout.data * layout.microbatches * int(MODEL["micro-batch-size"])
    options = {
        **MODEL,
        "pipeline-model-parallel-size": str(layout.pipeline),
        "global-batch-size": str(batch),
        "train-iters": str(steps),
        "data-path": str(data),
        "run-dir": str(folder / "run"),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "dynmo_train", "pretrain", "gpt", *words, *flags]
    processes = []
    for rank in range(layout.ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(layout.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29577",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        log = (folder / f"rank{rank}.log").open("w")
        inside = ["ip", "netns", "exec", _host(rank), *command]
        processes.append(subprocess.Popen(inside, env=environment, stdout=log, stderr=subprocess.STDOUT))
    counted: dict[int, list[int]] = {}
    metrics = folder / "run" / "metrics.jsonl"
    while any(process.poll() is None for process in processes):
        done = len(_lines(metrics))
        if done not in counted:
            counted[done] = _sent(layout.ranks)
        time.sleep(0.02)  # samples the counters of the links until the run ends
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join((folder / f"rank{rank}.log").read_text() for rank in range(layout.ranks)))
    options = [line for line in _lines(metrics) if "step_ns" in line]
    first = min(at for at in counted if at >= WARM_UP_STEPS)
    last = max(at for at in counted if at <= steps)
    pairs = zip(counted[last], counted[first], strict=True)
    sent = [(after - before) / (last - first) / 1e6 for after, before in pairs]
    step_s = statistics.median(line["step_ns"] for line in options[WARM_UP_STEPS:]) / 1e9
    return step_s, options[-1]["tokens"], sent


def _plan(*words: str) -> Any:
    command = [sys.executable, "-m", "dynmo_balance", *words, "--format", "json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def calibrated(profile: Path) -> float:
    """Microseconds of overhead per operation, without the items' arithmetic, from the run without a limit.

    Ranks that share the cores of this machine wait for each other there as well: this is what a slow link adds to.
    """
    return float(_plan("calibrate", str(profile))["overhead_ns"]) / 1e3


def measured_link(profile: Path) -> float:
    """GB/s between workers 0 and 1, as the run over the limited network measured it at its start."""
    with (profile / "profile.jsonl").open() as lines:
        return float(json.loads(lines.readline())["link"]["bandwidth_bytes_per_s"]) / 1e9


def predicted_s(profile: Path, overhead_us: float, gbps: float, flags: list[str]) -> float:
    """The step that ``dynmo-plan simulate`` expects over a link, from costs that were measured without a limit."""
    rate = str(gbps)
    links = ["--transfers", "serial", "--link-gbps", rate, "--data-parallel-gbps", rate]
    found = _plan("simulate", str(profile), *links, "--overhead-us", str(overhead_us), *flags)
    return float(found["step_with_tail_ns"]) / 1e9


def measured(
    layout: Layout, data: Path, profile: Path, overhead_us: float, case: tuple[int, str], steps: int
) -> dict[str, Any]:
    """One row: a run over the limited network, and what is predicted for it."""
    mbit, scheme = case
    flags, planned = SCHEMES[scheme]
    with tempfile.TemporaryDirectory() as folder, network(layout.ranks, mbit):
        step_s, tokens, sent = run(layout, data, Path(folder), flags, steps)
        gbps = measured_link(Path(folder) / "run")
    expected = predicted_s(profile / "run", overhead_us, gbps, planned)
    return {"step_s": step_s, "tokens": tokens, "sent": sent, "expected_s": expected}


def report(rows: list[dict[str, Any]], rates: list[int], schemes: list[str]) -> None:
    """Of each case the median of its repetitions, which stand behind it."""
    emit(
        "| Mbit/s | scheme | step ms (each) | tokens/s | x baseline | predicted ms | measured/predicted | MB by rank |"
    )
    emit("|---|---|---|---|---|---|---|---|")
    for mbit in rates:
        base = None
        for scheme in schemes:
            found = sorted(
                (row for row in rows if row["case"][:2] == [mbit, scheme]), key=lambda row: float(row["step_s"])
            )
            if not found:
                continue
            middle = found[(len(found) - 1) // 2]
            step_s, expected = middle["step_s"], middle["expected_s"]
            base = base or step_s
            each = ", ".join(f"{row['step_s'] * 1e3:.0f}" for row in found)
            figures = f"{step_s * 1e3:.0f} ({each}) | {middle['tokens'] / step_s:.0f} | {base / step_s:.2f}"
            traffic = ", ".join(f"{one:.2f}" for one in middle["sent"])
            emit(f"| {mbit} | {scheme} | {figures} | {expected * 1e3:.0f} | {step_s / expected:.3f} | {traffic} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="100,300,1000")
    parser.add_argument("--schemes", default=",".join(DEFAULT_SCHEMES), help="cb+fe+scN: the first N workers compress.")
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, help="a folder; what stands in it is not run again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further run behind these")
    options = parser.parse_args()
    layout = Layout(pipeline=options.pipeline, data=options.data, microbatches=options.microbatches)
    rates, schemes = [int(word) for word in options.mbit.split(",") if word], options.schemes.split(",")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        results = options.results or Path(place) / "results"
        profile, lines = results / "unlimited", results / "rows.jsonl"
        data = write_data(Path(place) / "data")
        if not (profile / "run" / "done").exists():
            shutil.rmtree(profile, ignore_errors=True)
            profile.mkdir(parents=True)
            with network(layout.ranks, None):
                step_s, _, _ = run(layout, data, profile, [], 3 * options.steps)
            (profile / "run" / "done").touch()
            emit(f"without a limit: {step_s * 1e3:.0f} ms a step")
        overhead_us = calibrated(profile / "run")
        done = _lines(lines)
        # The repetitions lie far apart in time, so that a disturbance affects one of each
        for repeat, mbit, scheme in product(range(options.repeats), rates, schemes):
            case = [mbit, scheme, repeat]
            if time.monotonic() - begun > options.seconds or any(row["case"] == case for row in done):
                continue
            row = measured(layout, data, profile, overhead_us, (mbit, scheme), options.steps)
            done.append({"case": case, **row})
            with lines.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
        report(done, rates, schemes)


if __name__ == "__main__":
    main()
