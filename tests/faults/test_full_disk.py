"""A disk that is full for a while ends no healthy run: saves fail, are removed and retried, lines wait."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from tests.distributed.whole_runs import arguments, lines, run_command, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed]

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_in_steps(words: list[str], first: int, last: int) -> tuple[int, str]:
    """The command, on a disk that takes neither shards nor lines from step ``first`` to ``last``."""
    from dynmo_train.formats import profile, run_lines
    from dynmo_train.trainer.checkpoint import engine_checkpoint
    from dynmo_train.trainer.engine import Engine

    now = {"step": 0}
    launch_step = Engine.launch_step

    def counted(engine, batch, **options):
        now["step"] = batch.step
        return launch_step(engine, batch, **options)

    def refusing(write):
        def or_refuse(*arguments):
            if first <= now["step"] <= last:
                raise FULL
            return write(*arguments)

        return or_refuse

    Engine.launch_step = counted
    engine_checkpoint.write_shard = refusing(engine_checkpoint.write_shard)
    engine_checkpoint.new_staging = (
        refusing(engine_checkpoint.new_staging) if os.environ["RANK"] == "0" else engine_checkpoint.new_staging
    )
    run_lines.append_line = refusing(run_lines.append_line)
    profile.append_lines = refusing(profile.append_lines)
    return run_command(words)


def only_shards(words: list[str], failing: int) -> tuple[int, str]:
    """The command, whose second process cannot write its shard of step ``failing``."""
    from dynmo_train.trainer.checkpoint import engine_checkpoint

    write = engine_checkpoint.write_shard

    def or_refuse(directory, *rest):
        if f"step-{failing:08d}" in directory.name and os.environ["RANK"] == "1":
            (directory / "half-written").write_bytes(b"x")
            raise FULL
        return write(directory, *rest)

    engine_checkpoint.write_shard = or_refuse
    return run_command(words)


def options(data, run, *extra):
    words = arguments(data, run, *extra, train_iters="12", save_interval="3", eval_iters="0", global_batch_size="4")
    words.remove("--sparsify")
    return words


def steps_of(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def test_run_on_a_full_disk_loses_a_save_and_no_line(tmp_path):
    data, run = write_data(tmp_path / "x"), tmp_path / "run"
    [(code, talk)] = run_workers(full_in_steps, 1, options(data, run), 5, 7, joins=False)
    assert code == 0, talk
    assert "cannot write a line" in talk
    assert "wrote the lines that were waiting" in talk
    assert steps_of(run) == [3, 9, 12]
    assert [record["step"] for record in lines(run / "metrics.jsonl")] == list(range(1, 13))
    profile = lines(run / "profile.jsonl")
    assert [record["step"] for record in profile if record["record"] == "step"] == list(range(2, 13))
    [failed] = [event for event in lines(run / "events.jsonl") if event["kind"] == "not_saved"]
    assert failed["step"] == 6
    assert "No space left on device; training continues, and the next save retries" in failed["message"]


@pytest.mark.parametrize("launched", [False, True])
def test_run_whose_messages_cannot_be_written_trains_to_its_end(tmp_path, launched):
    data, run = write_data(tmp_path / "x"), tmp_path / "run"
    launcher = ["launch", "local", "--nproc", "2", "--log-dir", str(tmp_path / "logs"), "--"] if launched else []
    command = [sys.executable, "-m", "dynmo_train", *launcher, *options(data, run)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full, timeout=300).returncode == 0
    assert steps_of(run) == [3, 6, 9, 12]


@pytest.mark.parametrize("extra", [(), ("--async-save",)])
def test_save_that_one_rank_cannot_write_is_removed_and_retried(tmp_path, extra):
    data, run = write_data(tmp_path / "x"), tmp_path / "run"
    outcomes = run_workers(only_shards, 2, options(data, run, *extra), 6, joins=False)
    assert [code for code, _ in outcomes] == [0, 0], str(outcomes)
    assert steps_of(run) == [3, 9, 12]
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")) == []
    assert json.loads((run / "checkpoints" / "step-00000012" / "manifest.json").read_text())["step"] == 12


def test_last_save_that_fails_ends_the_run_with_the_remedy(tmp_path):
    data, run = write_data(tmp_path / "x"), tmp_path / "run"
    outcomes = run_workers(only_shards, 2, options(data, run), 12, joins=False)
    assert [code for code, _ in outcomes] == [1, 1]
    assert "the last checkpoint is step-00000009: free disk space, then resume with --load" in outcomes[0][1]
    assert steps_of(run) == [3, 6, 9]
