"""Ctrl-C saves and prints how to resume; a run without steps left reports it."""

from __future__ import annotations

import os
import signal

import pytest

from dynmo_train.trainer.monitoring.training_log import TrainingLog
from tests.distributed.whole_runs import arguments, figures, lines, run_command, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

SHORT = {"train_iters": "3", "lr_decay_iters": "24", "eval_interval": "24"}


def interrupted_command(words: list[str], step: int) -> tuple[int, str]:
    """A run whose last process gets SIGINT when it logs ``step``."""
    log = TrainingLog.log_step

    def logged(self, number, *rest):
        log(self, number, *rest)
        if number == step and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            os.kill(os.getpid(), signal.SIGINT)

    TrainingLog.log_step = logged
    try:
        return run_command(words)
    finally:
        TrainingLog.log_step = log


def test_ctrl_c_saves_and_prints_the_command_that_resumes(tmp_path):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    results = run_workers(interrupted_command, 2, arguments(data, run, **SHORT), 2, joins=False)
    assert [code for code, _ in results] == [130, 130], str(results)
    assert f"stopped after iteration 2, saved; to resume, run the same command with --load {run}" in results[0][1]
    assert (run / "checkpoints" / "step-00000002").is_dir()
    train(data, run, 2, "--load", str(run), **SHORT)
    assert sorted(figures(run)) == [1, 2, 3]
    last = train(data, run, 1, "--load", str(run), **SHORT)
    assert f"the run in {run} is complete: 3 steps are done, --train-iters is 3" in last
    assert "training from iteration" not in last


def test_ctrl_c_after_a_step_that_is_not_finite_names_the_last_checkpoint(tmp_path):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    options = {"train_iters": "9", "clip_grad": "0", "eval_iters": "0", "save_interval": "1"}
    train(data, run, 1, exit_interval="1", **options)
    broken = arguments(data, run, "--load", str(run), **options, lr="1e30")
    results = run_workers(interrupted_command, 1, broken, 3, joins=False)
    assert results[0][0] == 130, str(results)
    assert (
        "stopped after iteration 3, not saved (not finite); the last checkpoint is step-00000001; to resume from it,"
        " run the same command again"
    ) in results[0][1]


def test_resume_with_another_batch_size_continues_the_samples(tmp_path):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    long = SHORT | {"train_iters": None, "lr_decay_iters": None, "train_samples": "96"}
    train(data, run, 1, exit_interval="4", **long)
    output = train(data, run, 1, "--load", str(run), global_batch_size="8", **long)
    assert "64 samples are consumed after 4 steps; training continues with 8 samples per step" in output
    steps = [line for line in lines(run / "metrics.jsonl") if "step_ns" in line]
    assert [line["consumed_train_samples"] for line in steps] == [16, 32, 48, 64, 72, 80, 88, 96]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    output = train(data, run, 1, "--load", str(run), global_batch_size="8", **long)
    assert (
        "is complete: 8 steps are done, --train-samples is 96; give a larger --train-samples to continue it" in output
    )
