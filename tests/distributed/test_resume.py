"""Stop at any step and resume, also on another number of stages: the bits of a run without a stop."""

from __future__ import annotations

import json

import pytest

from tests.distributed.whole_runs import (
    arguments,
    figures,
    interrupted_command,
    lines,
    run_command,
    tensors,
    train,
    write_data,
)
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Data, and a run of 24 steps on two stages that was never stopped."""
    folder = tmp_path_factory.mktemp("resume")
    data = write_data(folder / "data")
    train(data, folder / "whole", 2)
    return folder, data, figures(folder / "whole"), tensors(folder / "whole", 24)


def test_new_run_starts_from_a_step_of_another(whole):
    folder, data, expected, weights = whole
    train(data, folder / "parent", 2, save_interval="9", train_iters="18", lr_decay_iters="24")
    parent = folder / "parent" / "checkpoints" / "step-00000009"
    train(data, folder / "child", 1, load=str(parent))
    assert figures(folder / "child") == {step: value for step, value in expected.items() if step > 9}
    assert tensors(folder / "child", 24) == weights
    line = arguments(data, folder / "other", load=str(parent), seed="7")
    [(code, printed)] = run_workers(run_command, 1, line, joins=False)
    assert code == 2
    assert "--seed is 1234 there, 7 here" in printed
    assert "--allow-changed-options" in printed


@pytest.mark.complete
def test_async_checkpoints_have_the_state_of_their_step(whole):
    folder, data, expected, weights = whole
    options = {"save_interval": "7", "keep_checkpoints": "3"}
    train(data, folder / "plain", 2, **options)
    train(data, folder / "aside", 2, "--async-save", **options)
    assert figures(folder / "aside") == expected
    names = sorted(path.name for path in (folder / "aside" / "checkpoints").iterdir())
    assert names == ["LATEST", "step-00000014", "step-00000021", "step-00000024"]
    for step in (14, 21, 24):
        assert tensors(folder / "aside", step) == tensors(folder / "plain", step)
    assert tensors(folder / "aside", 24) == weights
    saved = [event for event in lines(folder / "aside" / "events.jsonl") if event["kind"] == "checkpoint"]
    assert [event["step"] for event in saved] == [7, 14, 21, 24]
    assert all(event["stalled_s"] > 0 for event in saved)


GROWING = {
    "train_samples": "300",
    "rampup_batch_size": "4 4 100",  # two microbatches at first, fewer than the three stages
    "lr_warmup_samples": "36",
    "curriculum_shortest": "8",
    "curriculum_steps": "20",
    "eval_interval": "7",
}


@pytest.mark.complete
def test_rampup_and_curriculum_have_the_same_bits_after_a_resume(whole):
    folder, data, _, _ = whole
    train(data, folder / "growing", 1, train_iters=None, **GROWING)
    records = [line for line in lines(folder / "growing" / "metrics.jsonl") if "lm_loss" in line]
    assert [line["global_batch_size"] for line in records[:9]] == [4] * 9
    assert {line["global_batch_size"] for line in records} == {4, 8, 12, 16}
    assert records[-1]["consumed_train_samples"] <= 300 < records[-1]["consumed_train_samples"] + 16
    lengths = [line["tokens"] // line["global_batch_size"] for line in records]
    assert (lengths[0], lengths[-1]) == (8, 32)
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 4
    # The first update's is that after 0 samples, as Megatron's; the warm-up ends after 36.
    assert [records[step]["learning_rate"] for step in (0, 9)] == [0.0, 2e-3]
    train(data, folder / "growing-3", 3, train_iters=None, exit_interval="9", **GROWING)
    train(data, folder / "growing-3", 3, train_iters=None, load=str(folder / "growing-3"), **GROWING)
    assert figures(folder / "growing-3") == figures(folder / "growing")
    step = records[-1]["step"]
    assert tensors(folder / "growing-3", step) == tensors(folder / "growing", step)


# 40 and 100 samples of 32 tokens.
STEPPED = {
    "train_samples": "300",
    "step_batch_size_schedule": "0:4 1.28K:12 3.2K:16",
    "lr_warmup_samples": "36",
    "eval_interval": "7",
}


@pytest.mark.complete
def test_steps_of_the_batch_size_have_the_same_bits_after_a_resume(whole):
    folder, data, _, _ = whole
    train(data, folder / "stepped", 1, train_iters=None, **STEPPED)
    records = [line for line in lines(folder / "stepped" / "metrics.jsonl") if "lm_loss" in line]
    assert [line["global_batch_size"] for line in records] == [4] * 10 + [12] * 5 + [16] * 13
    assert [records[at]["consumed_train_samples"] for at in (9, 14, -2, -1)] == [40, 100, 292, 308]
    # By samples: 36 of warm-up are nine steps of four.
    assert [records[step]["learning_rate"] for step in (0, 9)] == [0.0, 2e-3]
    train(data, folder / "stepped-3", 3, train_iters=None, exit_interval="12", **STEPPED)
    train(data, folder / "stepped-3", 3, train_iters=None, load=str(folder / "stepped-3"), **STEPPED)
    assert figures(folder / "stepped-3") == figures(folder / "stepped")
    assert tensors(folder / "stepped-3", 28) == tensors(folder / "stepped", 28)


@pytest.mark.complete
def test_load_without_optimizer_or_progress_restarts_them(whole):
    folder, data, expected, _weights = whole
    train(data, folder / "tuned", 1, "--finetune", "--no-save-optim", load=str(folder / "whole"), train_iters="2")
    tuned = figures(folder / "tuned")
    assert sorted(tuned) == [1, 2]
    assert tuned[1][0] < expected[1][0]
    assert not [name for name in tensors(folder / "tuned", 2) if "exp_avg" in name]
    parent = folder / "whole"
    train(data, folder / "bare", 1, "--no-load-optim", "--no-load-rng", load=str(parent), train_iters="26")
    assert sorted(figures(folder / "bare")) == [25, 26]
    state = json.loads((folder / "bare" / "checkpoints" / "step-00000026" / "manifest.json").read_text())
    assert set(state["optimizer"]["steps"].values()) == {2}


@pytest.mark.complete
def test_skip_train_only_evaluates(whole):
    folder, data, _, weights = whole
    evaluations = []
    for workers in (1, 2):
        run = folder / f"looked-{workers}"
        train(data, run, workers, "--skip-train", load=str(folder / "whole"), split="60,20,20")
        evaluations.append(
            [{k: v for k, v in line.items() if k.endswith("_loss")} for line in lines(run / "metrics.jsonl")]
        )
        assert not list((run / "checkpoints").glob("step-*"))
    assert [sorted(line) for line in evaluations[0]] == [["validation_loss"], ["test_loss"]]
    assert evaluations[0] == evaluations[1]
    assert tensors(folder / "whole", 24) == weights
    trained = [
        line["validation_loss"] for line in lines(folder / "whole" / "metrics.jsonl") if "validation_loss" in line
    ]
    assert evaluations[0][0]["validation_loss"] == pytest.approx(trained[-1], rel=0.1)


def test_sigusr1_saves_and_sigterm_saves_and_exits(whole):
    folder, data, expected, _ = whole
    run = folder / "interrupted"
    results = run_workers(
        interrupted_command, 2, arguments(data, run, train_iters="100000", lr_decay_iters="24"), str(run), joins=False
    )
    assert [code for code, _ in results] == [143, 143], str(results)
    saved = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert len(saved) == 2
    assert saved[1] == max(figures(run))
    assert all(figures(run)[step] == expected[step] for step in range(1, min(24, saved[1]) + 1))


def test_load_without_a_checkpoint_warns_and_starts(whole, tmp_path):
    _, data, expected, _ = whole
    done = train(data, tmp_path / "fresh", 1, load=str(tmp_path / "fresh"), train_iters="3", lr_decay_iters="24")
    assert "warning: no checkpoint in" in done
    assert figures(tmp_path / "fresh") == {step: expected[step] for step in (1, 2, 3)}


# Another batch size may resume: tests/distributed/test_interrupted.py.
@pytest.mark.complete
@pytest.mark.parametrize(("options", "message"), [({"hidden_size": "64"}, "is a checkpoint of another model")])
def test_checkpoint_that_does_not_fit_is_an_error(whole, tmp_path, options, message):
    folder, data, _, _ = whole
    line = arguments(data, tmp_path / "other", load=str(folder / "whole"), **options)
    [(code, talk)] = run_workers(run_command, 1, line, joins=False)
    assert code == 2
    assert message in talk
    assert "Traceback" not in talk
