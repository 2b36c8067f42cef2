"""What a start takes from its checkpoint's manifest, and what is printed of checkpoints when a run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynmo_train.formats.checkpoint import Checkpoint
from dynmo_train.trainer.monitoring.training_log import stop_line
from dynmo_train.trainer.run_directory import RunDirectory
from dynmo_train.trainer.setup import continued_checkpoint, progress_of

RUN = Path("runs/x")


@pytest.mark.parametrize(
    ("last_saved", "load", "line"),
    [
        ("step-00000007", None, "saved; to resume, run the same command with --load runs/x"),
        ("step-00000007", "runs/x", "saved; to resume, run the same command again"),
        (
            "step-00000005",
            None,
            "not saved (not finite); the last checkpoint is step-00000005; to resume from it, run the same command with"
            " --load runs/x/checkpoints/step-00000005",
        ),
        (
            "step-00000005",
            "runs/x",
            "not saved (not finite); the last checkpoint is step-00000005; to resume from it, run the same command"
            " again",
        ),
        (None, None, "not saved (not finite); no checkpoint was saved"),
        (None, "runs/other", "not saved (not finite); no checkpoint was saved"),
    ],
)
def test_stop_line_names_what_was_saved(last_saved, load, line):
    assert stop_line(RUN, 7, load, last_saved) == f"stopped after iteration 7, {line}"


@pytest.mark.parametrize(
    ("advanced", "step", "consumed", "samples"),
    [
        (100, 100, 1600, 1600),  # steps of 16 samples, whatever the batch size of this start
        (90, 100, 1600, 1440),  # ten steps were skipped
        (1600, 100, 1600, 1600),  # with --train-samples it counted samples
        (0, 0, 0, 0),
    ],
)
def test_progress_of_an_older_checkpoint_counts_in_its_own_batch(advanced, step, consumed, samples):
    manifest = {
        "step": step,
        "consumed_train_samples": consumed,
        "x_progress": {"advanced": advanced, "techniques": {}},
    }
    progress = progress_of(manifest)
    assert progress == {"advanced_samples": samples, "techniques": {}}


def test_continued_checkpoint_is_none_for_another_run(tmp_path):
    run = RunDirectory(path=tmp_path / "run", run_id="r", segment=0)

    def checkpoint(of):
        return Checkpoint(directory=of / "checkpoints" / "step-00000005", manifest={})

    assert continued_checkpoint(checkpoint(tmp_path / "run"), run, 5) == "step-00000005"
    assert continued_checkpoint(checkpoint(tmp_path / "run"), run, 0) is None  # --finetune
    assert continued_checkpoint(checkpoint(tmp_path / "other"), run, 5) is None
    assert continued_checkpoint(None, run, 0) is None
