"""bin/quickstart with a smaller model, which takes a minute."""

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
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--global-batch-size", "8", "--train-iters", "20", "--freeze-schedule", "4:2", "--rebalance-interval", "3"),
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
def test_quickstart_ends_with_one_screen(quickstart):
    work, out, _ = quickstart
    summary = out[out.rindex("\n\n====") :].strip().splitlines()
    assert len(summary) <= 24
    assert max(map(len, summary[:-3])) <= 80
    headline, rows = summary[1], "\n".join(summary)
    assert re.fullmatch(r"  \d+\.\d\d times as fast as the best fixed partition; losses equal bit for bit", headline)
    assert float(re.search(r"logits in transformers\s+differ by at most (\S+)", rows)[1]) < 1e-4
    first, last = re.search(r"loss, first -> last step\s+(\S+) -> ([\d.]+);", rows).groups()
    assert float(last) < float(first)
    assert re.search(r"documents in / out\s+[\d,]+ / [\d,]+ \([\d,]+ tokens\)", rows)
    assert re.search(r"layers moved\s+[1-9]\d* parts of layers", rows)
    assert len(re.findall(r"load of stage [01]\s+#+ +\d+%\s+#+ +\d+%", rows)) == 2
    assert f"Open the report   {(work / 'report.html').as_uri()}" in rows
    assert (work / "report.html").stat().st_size > 10_000


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_output_of_commands_is_in_logs(quickstart):
    work, out, _ = quickstart
    assert re.search(r"plan \d applied after iteration", (work / "logs" / "balanced.log").read_text())
    data = (work / "logs" / "data.log").read_text()
    assert re.search(r"clean: .* documents in .* out; .* dropped", data)
    assert re.search(r"dedup: .* documents in .* out; .* dropped", data)
    assert out.count("    $ dynmo-") == 10


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_runs_start_from_the_planned_partition(quickstart):
    work, _, _ = quickstart
    planned = json.loads((work / "dense-plan.json").read_text())["stages"]
    for run in ("static", "balanced"):
        first = json.loads((work / run / "plans" / "plan-000000.json").read_text())["stages"]
        assert [stage["items"] for stage in first] == [stage["items"] for stage in planned]


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_failed_command_shows_its_last_lines(tmp_path):
    environment = {**os.environ, "DYNMO_SETUP": "no", "DYNMO_QUICKSTART_DIR": str(tmp_path / "work")}
    done = subprocess.run(
        ["bash", str(ROOT / "bin" / "quickstart"), "--num-layers", "none"],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--num-layers" in done.stderr
    assert "failed with exit code 2; its whole output is in" in done.stderr


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_run_directory_has_its_files(quickstart):
    work, _, _ = quickstart
    run = work / "balanced"
    for name in ("run.json", "metrics.jsonl", "profile.jsonl", "events.jsonl", "plans/plan-000000.json", "requests"):
        assert (run / name).exists(), name
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert {"frozen", "plan_applied", "checkpoint"} <= set(kinds)
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
