"""Runs that release workers and grow again: same losses, same weights, clean exits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dynmo_train.launch.find_command import program_path
from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS, ScriptedPlanner
from tests.distributed.whole_runs import (
    arguments,
    command,
    events,
    figures,
    lines,
    run_command,
    tensors,
    train,
    write_data,
)
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

LOCKSTEP = ("--balance", "online", "--balance-lockstep")


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """Data, and a run in one process."""
    folder = tmp_path_factory.mktemp("elastic")
    data = write_data(folder / "data")
    train(data, folder / "static", 1)
    return folder, data, figures(folder / "static"), tensors(folder / "static", 24)


def headers(run: Path) -> list[dict]:
    return [record for record in lines(run / "profile.jsonl") if record["record"] == "header"]


def ask(run: Path, text: str) -> None:
    (run / "requests").mkdir(parents=True, exist_ok=True)
    request = run / "requests" / "resize.json"
    request.write_text(text)
    os.utime(request, (0, 0))  # written long ago, so that nobody waits for the rest of it


def test_packed_run_resumes_on_another_size(static):
    folder, data, expected, weights = static
    run = folder / "packed"
    train(data, run, 4, *LOCKSTEP, "--pack-to", "2", exit_interval="15")
    assert [[worker["worker"] for worker in header["workers"]] for header in headers(run)] == [[0, 1, 2, 3], [0, 1]]
    assert [worker["releasable"] for worker in headers(run)[0]["workers"]] == [False, True, True, True]
    (released,) = events(run, "released")
    assert (released["workers"], released["ranks"], released["free_hosts"]) == ([2, 3], [2, 3], [])
    manifest = json.loads((run / "checkpoints" / "step-00000015" / "manifest.json").read_text())
    assert manifest["topology"]["pipeline_parallel_size"] == 2
    verify = [str(program_path("dynmo-ckpt")), "verify", "--level", "full", str(run / "checkpoints" / "step-00000015")]
    assert subprocess.run(verify, check=False, capture_output=True).returncode == 0
    train(data, run, 3, "--load", str(run))
    assert figures(run) == expected
    assert tensors(run, 24) == weights


@pytest.mark.complete
def test_interleaved_run_of_replicas_is_packed(static):
    """Two stages on each worker, two replicas: all processes of the released worker leave."""
    folder, data, _, _ = static
    layout = ("--schedule", "interleaved-1f1b", "--pipeline-model-parallel-size", "2")
    train(data, folder / "two", 4, *layout)
    train(data, folder / "one", 4, *layout, *LOCKSTEP, "--pack-to", "1")
    assert figures(folder / "one") == figures(folder / "two")
    assert tensors(folder / "one", 24) == tensors(folder / "two", 24)
    (released,) = events(folder / "one", "released")
    assert released["ranks"] == [2, 3]


def test_growth_without_a_launcher_exits_with_75(static):
    folder, data, expected, weights = static
    run = folder / "asked"
    ask(run, '{"workers": 3}')
    results = run_workers(run_command, 2, arguments(data, run), joins=False)
    assert [code for code, _ in results] == [75, 75], str(results)
    assert [event["workers"] for event in events(run, "resize")] == [3]
    train(data, run, 3, "--load", str(run))
    assert figures(run) == expected
    assert tensors(run, 24) == weights
    assert not (run / "requests" / "resize.json").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [("{ 4 workers", "json"), ('{"workers": 0}', "workers"), ('{"workers": 99}', "--pipeline-model-parallel-size")],
)
def test_invalid_resize_request_is_logged_once(static, text, words):
    folder, data, expected, _ = static
    run = folder / f"bad {len(text)}"
    ask(run, text)
    train(data, run, 1, train_iters="3", lr_decay_iters="24")
    assert figures(run) == {step: expected[step] for step in (1, 2, 3)}
    (refused,) = events(run, "resize_refused")
    assert words in refused["message"]
    assert (run / "requests" / "resize.refused.json").exists()


@pytest.mark.complete
def test_launched_run_releases_and_grows_again(static):
    """2 workers, 1 of them released, then 3 by request: the launcher starts them, the losses are the same."""
    folder, data, expected, weights = static
    run = folder / "launched"
    process = subprocess.Popen(
        command(data, run, 2, *SCRIPTED_PLANNER_OPTIONS),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    planner = ScriptedPlanner(run)
    planner.wait_for_ask(3, process)
    planner.answer([planner.items()], released=[1])
    planner.wait_for_ask(6, process)
    ask(run, '{"workers": 3}')
    planner.keep_until_end(process)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    assert "processes: 3" in output
    assert [len(header["workers"]) for header in headers(run)] == [2, 1, 3]
    assert figures(run) == expected
    assert tensors(run, 24) == weights
