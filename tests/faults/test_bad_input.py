"""What is wrong with a run's input is told in one message by rank 0; every process ends with code 2, none is left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from whole_runs import arguments, command, figures, run_command, write_data
from workers import run_workers

pytestmark = pytest.mark.dist


def with_high_id(prefix, position):
    """The data set with one id that is beyond the vocabulary of 97."""
    tokens = np.fromfile(prefix.with_suffix(".bin"), "<u2")
    tokens[position] = 97
    tokens.tofile(prefix.with_suffix(".bin"))


def truncate(path, num_bytes):
    path.write_bytes(path.read_bytes()[:-num_bytes])


# What is done to the data set, options, and the line that tells it.
CASES = {
    "ids beyond the vocabulary here and there": (
        lambda p: [with_high_id(p, position) for position in range(0, 10000, 50)],
        {},
        "holds the token id 97; the vocabulary has the ids 0 to 96",
    ),
    "every id is beyond the vocabulary": (None, {"vocab-size": "40"}, "--vocab-size"),
    "the tokens end too early": (lambda p: truncate(p.with_suffix(".bin"), 1000), {}, "the .bin has 20222 [length]"),
    "the tokens end within an id": (lambda p: truncate(p.with_suffix(".bin"), 1), {}, "the .bin has 21221 [length]"),
    "the index ends too early": (lambda p: truncate(p.with_suffix(".idx"), 8), {}, "x.idx"),
    "no data set": (lambda p: p.with_suffix(".idx").unlink(), {}, "x.idx"),
    "more stages than items": (
        None,
        {"num-layers": "1", "granularity": "layer", "schedule": "zero-bubble", "virtual-stages-per-worker": "2"},
        "4 stages are more than the 3 items",
    ),
    "another number of stages than processes": (None, {"pipeline-model-parallel-size": "3"}, "--nproc 3"),
    "heads that do not divide the width": (None, {"num-attention-heads": "5"}, "--hidden-size"),
    "microbatches that do not divide the batch": (None, {"micro-batch-size": "3"}, "--global-batch-size"),
    "fewer samples than a batch": (None, {"global-batch-size": "1000"}, "samples"),
    "a part of the data without documents": (None, {"split": "1,0,0"}, "valid"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_process_ends_with_one_message(tmp_path, case):
    spoil, options, words = CASES[case]
    data = write_data(tmp_path / "x")
    if spoil:
        spoil(data)
    told = arguments(data, tmp_path / "run", **options)
    (first, talk), (second, silence) = run_workers(run_command, 2, told, joins=False)
    errors = [line for line in talk.splitlines() if not line.startswith("apex: ")]
    assert (first, second) == (2, 2), talk
    assert errors[0].startswith("dynmo-train: error: ")
    assert words in talk
    assert "Traceback" not in talk + silence
    assert len(errors) == 1 or errors[0].endswith((" problem", " problems")), talk
    assert "error" not in silence
    assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run" / "checkpoints").iterdir())


def processes_of(run):
    """Ids of the live processes that were told the path of this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:  # it ended while we looked
            continue
        if str(run).encode() in words:
            found.append(path.parent.name)
    return found


def test_an_id_met_in_mid_training_ends_all_processes(tmp_path):
    """Through the launcher, with a planner: one message in all, and no process outlives it."""
    data = write_data(tmp_path / "x")
    with_high_id(data, 3000)
    run = tmp_path / "run"
    done = subprocess.run(
        command(data, run, 2, balance="online"), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("dynmo-train: error: ")
    assert "x.bin holds the token id 97; the vocabulary has the ids 0 to 96" in errors[0]
    assert "Traceback" not in done.stderr
    assert figures(run), "the id was met before the first step"
    assert (run / "planner.log").exists()
    assert processes_of(run) == []
