"""bin/quickstart with a smaller model, which takes half a minute."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "64",
    "--global-batch-size",
    "8",
    "--train-iters",
    "30",
    "--pruning-start-iter",
    "5",
    "--pruning-end-iter",
    "15",
    "--pruning-freq",
    "5",
    "--freeze-schedule",
    "8:2",
    "--lr-warmup-iters",
    "4",
    "--eval-interval",
    "10",
    "--log-interval",
    "5",
    "--rebalance-interval",
    "3",
]
# The balanced run waits for each answer of the planner and takes it, so that no measured time decides what is seen.
LOCKSTEP = """#!/bin/sh
case "$*" in *"--balance online"*) set -- "$@" --balance-lockstep --balance-policy always --balance-min-gain 0 ;; esac
exec {command} "$@"
"""


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    work, shims = folder / "work", folder / "bin"
    shims.mkdir()
    (shims / "dynmo-train").write_text(LOCKSTEP.format(command=shutil.which("dynmo-train")))
    (shims / "dynmo-train").chmod(0o755)
    environment = {
        **os.environ,
        "DYNMO_SETUP": "no",
        "DYNMO_QUICKSTART_DIR": str(work),
        "PATH": f"{shims}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "bin" / "quickstart"), *SMALL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return work, done.stdout, done.stderr


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_prints_its_summary(quickstart):
    _, out, talk = quickstart
    summary = out[out.index("== Summary") :]
    assert "losses, static and balanced   identical, bit for bit" in summary
    difference = re.search(r"logits against transformers\s+(\S+) at most", summary)
    assert float(difference[1]) < 1e-4
    first, last = re.search(r"training loss, first / last\s+(\S+) / (\S+)", summary).groups()
    assert float(last) < float(first)
    assert re.search(r"documents in / out\s+[\d,]+ / [\d,]+ \([\d,]+ tokens\)", summary)
    assert re.search(r"layers moved\s+[1-9]\d* parts of layers", summary)
    assert "plan 1 applied after iteration" in out
    assert re.search(r"clean: .* documents in .* out; .* dropped", out + talk)
    assert re.search(r"dedup: .* documents in .* out; .* dropped", out + talk)


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_run_directory_has_its_files(quickstart):
    work, _, _ = quickstart
    run = work / "balanced"
    for name in ("run.json", "metrics.jsonl", "profile.jsonl", "events.jsonl", "plans/plan-000000.json", "requests"):
        assert (run / name).exists(), name
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert {"pruned", "frozen", "plan_applied", "checkpoint"} <= set(kinds)
    moved = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if "plan_applied" in line]
    assert all(event["bytes"] > 0 and event["pause_ns"] > 0 and event["moves"] for event in moved)
    static = [json.loads(line)["kind"] for line in (work / "static" / "events.jsonl").read_text().splitlines()]
    assert "plan_applied" not in static


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_foreign_folder_is_not_deleted(tmp_path):
    (tmp_path / "precious").write_text("x")
    environment = {**os.environ, "DYNMO_SETUP": "no", "DYNMO_QUICKSTART_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(ROOT / "bin" / "quickstart")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert (tmp_path / "precious").exists()


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_checkpoints_verify(quickstart):
    work, _, _ = quickstart
    for path in (work / "static", work / "balanced", work / "merged"):
        done = subprocess.run(["dynmo-ckpt", "verify", str(path), "--level", "full"], check=False, capture_output=True)
        assert done.returncode == 0, done.stderr
