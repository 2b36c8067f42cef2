"""Batches that lead to a loss spike or to NaN: the run returns to its checkpoint, and skips their samples."""

from __future__ import annotations

import math

import pytest

from tests.distributed.whole_runs import (
    arguments,
    check_fields,
    events,
    figures,
    lines,
    manifest_of,
    run_command,
    tensors,
    verify,
    write_data,
)
from tests.distributed.workers import run_workers
from tests.levels import complete_but

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

# Steps of 16 samples in 8 microbatches. Samples of step 10, after the checkpoint of step 8.
POISONED = range(144, 160)
OPTIONS = {
    "train_iters": "14",
    "save_interval": "4",
    "eval_iters": "0",
    "pruning_start_iter": "6",
    "loss_spike_threshold": "10",
    "loss_spike_window": "8",
    "loss_spike_action": "rollback",
    "loss_spike_skip_batches": "1",
}


def poisoned(words: list[str], factor: float, samples: range, limit: int = 10**9) -> tuple[int, str]:
    """A run in which the loss of some samples, which cause it in any step, is multiplied.

    Args:
        words: command line.
        factor: factor of the loss.
        samples: poisoned samples.
        limit: number of steps of this process with a fault; a fault that stays away was no fault of the data.
    """
    from dynmo_train.models.layer_list import ItemOutput
    from dynmo_train.pipeline.stage_module import StageModule

    run, steps = StageModule._run, set()

    def failing(stage, name, module, index, *inputs):
        output = run(stage, name, module, index, *inputs)
        if name != "head" or 2 * index not in samples or not stage.training:
            return output
        steps.add((stage.step, index // 8))
        if len(steps) > limit:
            return output
        return output._replace(output=output.output * factor) if isinstance(output, ItemOutput) else output * factor

    StageModule._run = failing
    return run_command(words)


def train_poisoned(data, run, workers, *extra, factor=3.0, samples=POISONED, code=0, **options):
    words = arguments(data, run, *extra, **{**OPTIONS, **options})
    results = run_workers(poisoned, workers, words, factor, samples, joins=False)
    assert [found for found, _ in results] == [code] * workers, str(results)
    check_fields(run)
    return results[0][1]


def incidents(run):
    """The incidents of the model; a loaded machine adds those of slow workers and steps."""
    return [each for each in events(run, "incident") if each["incident"] in {"loss_spike", "not_finite", "rollback"}]


@pytest.fixture(scope="module")
def skipping(tmp_path_factory):
    """Data, and a run on one rank that skips the samples from its start."""
    folder = tmp_path_factory.mktemp("spikes")
    data = write_data(folder / "data")
    given = {"skip_train_samples": f"{POISONED.start}:{POISONED.stop}"}
    train_poisoned(data, folder / "skipping", 1, **given)
    return folder, data


def assert_same_run(run, expected):
    assert figures(run) == figures(expected)
    assert tensors(run, 14) == tensors(expected, 14)
    assert manifest_of(run, 14)["consumed_train_samples"] == 15 * 16
    spikes = manifest_of(run, 14)["x_loss_spikes"]
    assert spikes == manifest_of(expected, 14)["x_loss_spikes"]
    assert spikes["skipped_samples"] == [[POISONED.start, POISONED.stop]]


@pytest.mark.parametrize("workers", complete_but([1, 2], 2))
def test_loss_spike_is_rolled_back_and_its_batch_is_skipped(skipping, workers):
    folder, data = skipping
    run = folder / f"spike-{workers}"
    train_poisoned(data, run, workers)
    assert_same_run(run, folder / "skipping")
    steps = [line["step"] for line in lines(run / "metrics.jsonl")]
    assert steps == [*range(1, 11), *range(9, 15)]
    spike, rollback = incidents(run)
    assert (spike["incident"], spike["step"], spike["steps_lost"]) == ("loss_spike", 10, 0)
    assert "deviations above the median" in spike["message"]
    assert (rollback["incident"], rollback["step"], rollback["steps_lost"]) == ("rollback", 10, 2)
    assert (rollback["cause"], rollback["skipped_samples"]) == ("loss spike", [POISONED.start, POISONED.stop])
    segments = [line["segment"] for line in lines(run / "profile.jsonl") if line["record"] == "header"]
    assert segments == [0, 1]
    verify(run)


def test_resume_after_rollback_skips_the_same_samples(skipping):
    folder, data = skipping
    run = folder / "resumed"
    train_poisoned(data, run, 2, exit_interval="12")
    assert max(figures(run)) == 12
    train_poisoned(data, run, 1, load=str(run))
    assert_same_run(run, folder / "skipping")
    assert len(incidents(run)) == 2


@pytest.mark.complete
def test_steps_that_are_not_finite_are_rolled_back_after_the_limit(skipping):
    folder, data = skipping
    run, spikes = folder / "not-finite", {"loss_spike_threshold": None, "loss_spike_window": None}
    samples = range(POISONED.start, POISONED.stop + 16)
    train_poisoned(data, run, 2, factor=math.nan, samples=samples, max_skipped_iterations="2", **spikes)
    given = {"skip_train_samples": f"{samples.start}:{samples.stop}"}
    train_poisoned(data, folder / "skipping-two", 1, samples=samples, **given)
    assert figures(run) == figures(folder / "skipping-two")
    assert tensors(run, 14) == tensors(folder / "skipping-two", 14)
    found = incidents(run)
    assert [event["incident"] for event in found] == ["not_finite", "not_finite", "rollback"]
    assert [event["steps_lost"] for event in found] == [1, 1, 1]
    assert found[-1]["skipped_samples"] == [samples.start, samples.stop]


@pytest.mark.complete
def test_rollbacks_to_one_checkpoint_are_bounded(skipping):
    folder, data = skipping
    run = folder / "bounded"
    samples = range(POISONED.start, 10**6)
    message = train_poisoned(data, run, 2, samples=samples, code=3, loss_spike_max_rollbacks="2")
    assert (
        "training ended after step 10: loss spike again after it returned 2 times to the checkpoint of step 8"
        in message
    )
    assert [event["incident"] for event in incidents(run)].count("rollback") == 2
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1] == "step-00000008"
    # The second rollback to the checkpoint skips the samples of the first one, too.
    ends = [line["consumed_train_samples"] for line in lines(run / "metrics.jsonl") if line["step"] == 10]
    assert ends == [160, 176, 192]


@pytest.mark.complete
def test_reported_loss_spike_changes_nothing(skipping):
    folder, data = skipping
    run = folder / "reported"
    train_poisoned(data, run, 1, loss_spike_action="report", loss_spike_skip_batches=None)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(1, 15))
    assert [event["incident"] for event in incidents(run)] == ["loss_spike"]
    assert figures(run)[10][0] > 2 * figures(run)[9][0]


@pytest.mark.complete
def test_replay_step_after_a_rollback_skips_the_same_samples(skipping):
    folder, data = skipping
    run = folder / "replayed"
    train_poisoned(data, run, 1)
    for step in ("10", "14"):
        [(code, text)] = run_workers(run_command, 1, ["replay-step", str(run), step], joins=False)
        assert code == 0, text
