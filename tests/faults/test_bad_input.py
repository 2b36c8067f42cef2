"""Rank 0 reports invalid input in one message; every process ends with code 2, none is left."""

from __future__ import annotations

import subprocess
from functools import cache
from itertools import dropwhile
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.whole_runs import arguments, command, figures, run_command, write_data
from tests.distributed.workers import run_workers
from tests.waiting import wait_for

pytestmark = [pytest.mark.complete, pytest.mark.distributed]


def with_high_id(prefix, position):
    """The data set with one id that is beyond the vocabulary of 97."""
    tokens = np.fromfile(prefix.with_suffix(".bin"), "<u2")
    tokens[position] = 97
    tokens.tofile(prefix.with_suffix(".bin"))


def truncate(path, num_bytes):
    path.write_bytes(path.read_bytes()[:-num_bytes])


# What is done to the data set, options, and the line that reports it. The rules of options have their tests in
# tests/unit/dynmo_train/config; one that needs the processes, and one that needs none, show how they are reported.
CASES = {
    "ids beyond the vocabulary here and there": (
        lambda p: [with_high_id(p, position) for position in range(0, 10000, 50)],
        {},
        "contains the token id 97; the vocabulary has the ids 0 to 96",
    ),
    "every id is beyond the vocabulary": (None, {"vocab-size": "40"}, "--vocab-size"),
    "the tokens end too early": (lambda p: truncate(p.with_suffix(".bin"), 1000), {}, "the .bin has 20222 [length]"),
    "the index is of other tokens": (lambda p: p.with_suffix(".bin").write_bytes(b"\1\0" * 9000), {}, "[length]"),
    "the index is a text": (lambda p: p.with_suffix(".idx").write_bytes(b"no index at all"), {}, "x.idx"),
    "no data set": (lambda p: p.with_suffix(".idx").unlink(), {}, "x.idx"),
    "a width that does not divide": (None, {"num-attention-heads": "3"}, "--hidden-size"),
    "another number of stages than processes": (None, {"pipeline-model-parallel-size": "3"}, "--nproc 3"),
    "more stages than items": (
        None,
        {"num-layers": "1", "granularity": "layer", "schedule": "zero-bubble", "virtual-stages-per-worker": "2"},
        "makes 4 stages; must be at most",
    ),
    "fewer samples than a batch": (None, {"global-batch-size": "1000"}, "samples"),
    "a part of the data without documents": (None, {"split": "1,0,0"}, "valid"),
}


@pytest.mark.parametrize("case", CASES)
def test_pretrain_bad_input_ends_every_process_with_one_message(tmp_path, case):
    spoil, options, words = CASES[case]
    data = write_data(tmp_path / "x")
    if spoil:
        spoil(data)
    ends_with_one_message(arguments(data, tmp_path / "run", **options), 2, words)
    assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run" / "checkpoints").iterdir())


def without_notices(talk):
    """The lines of a run without the notice of apex and without the warning of options that have no effect."""
    lines = [line for line in talk.splitlines() if not line.startswith("apex: ")]
    if lines and lines[0] == "warning: options without effect:":
        return list(dropwhile(lambda line: line.startswith("  "), lines[1:]))
    return lines


def ends_with_one_message(options, processes, words):
    """Every process exits with 2, and only rank 0 prints the reason, in one message."""
    (code, talk), *others = run_workers(run_command, processes, options, joins=False)
    errors = without_notices(talk)
    assert [code, *(each for each, _ in others)] == [2] * processes, talk
    assert errors[0].startswith("dynmo-train: error: ")
    assert words in talk
    assert len(errors) == 1 or errors[0].endswith((" problem", " problems")), talk
    silence = "".join(each for _, each in others)
    assert "Traceback" not in talk + silence
    assert "error" not in silence


@cache
def finished(folder):
    """A data set and a run of one step over it."""
    data, run = write_data(folder / "x"), folder / "run"
    [(code, talk)] = run_workers(run_command, 1, arguments(data, run, train_iters="1", lr_decay_iters="1"), joins=False)
    assert code == 0, talk
    return data, run


# What another model has than the checkpoint, and the words that report it.
OTHER_MODELS = {
    "wider": ({"hidden-size": "64"}, "hidden_size"),
    "deeper": ({"num-layers": "5"}, "num_layers"),
    "another vocabulary": ({"vocab-size": "200"}, "vocab_size"),
}


@pytest.mark.parametrize(("case", "processes"), [("wider", 1), ("deeper", 2), ("another vocabulary", 2)])
def test_load_checkpoint_of_another_model_is_one_error(tmp_path_factory, case, processes):
    data, run = finished(tmp_path_factory.getbasetemp())
    options, words = OTHER_MODELS[case]
    ends_with_one_message(arguments(data, run.with_name("other"), load=str(run), **options), processes, words)


# Found by each process before they join, and found by rank 0 in the data.
LAUNCHED = {
    "no tokenizer": {"tokenizer-model": "nowhere.json", "vocab-size": None},
    "fewer samples than a batch": {"global-batch-size": "1000"},
}


@pytest.mark.parametrize("case", LAUNCHED)
def test_launch_error_of_all_ranks_is_printed_once(tmp_path, case):
    data = write_data(tmp_path / "x")
    launched = command(data, tmp_path / "run", 2, **LAUNCHED[case])
    done = subprocess.run(launched, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    assert processes_of(tmp_path / "run") == []


def processes_of(run):
    """Ids of the live processes that were started with the path of this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:  # it ended while we looked
            continue
        if str(run).encode() in words:
            found.append(path.parent.name)
    return found


@pytest.mark.parametrize(
    "axes", [{"balance": "online"}, {"pipeline_model_parallel_size": "1"}], ids=["pipeline with a planner", "replicas"]
)
def test_pretrain_invalid_token_id_ends_all_processes(tmp_path, axes):
    """Through the launcher: one message in all, and no process outlives it. One replica alone reads the id."""
    data = write_data(tmp_path / "x")
    with_high_id(data, 3000)
    run = tmp_path / "run"
    done = subprocess.run(command(data, run, 2, **axes), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("dynmo-train: error: ")
    assert "x.bin contains the token id 97; the vocabulary has the ids 0 to 96" in errors[0]
    assert "Traceback" not in done.stderr
    assert figures(run), "the id was met before the first step"
    assert (run / "planner.log").exists() == ("balance" in axes)
    # A planner whose trainer was killed ends at its next poll.
    wait_for(lambda: not processes_of(run), "all processes of the run end", seconds=10)
