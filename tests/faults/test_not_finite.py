"""A run whose model breaks: reported, its batch recorded, nothing broken saved, an exit code of its own."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dynmo_train.parallel.process_groups import World
from tests.distributed.scenario import Scenario, batch_of, engine_of
from tests.distributed.whole_runs import arguments, lines, run_command, write_data
from tests.distributed.workers import run_workers

pytestmark = pytest.mark.distributed

PLAIN = {"clip_grad": "0", "eval_iters": "0", "global_batch_size": "4", "save_interval": "1"}


def break_at_once(data, run, size, *extra, **options):
    words = arguments(data, run, *extra, **PLAIN | {"lr": "1e30", "train_iters": "30"} | options)
    words.remove("--sparsify")
    return run_workers(run_command, size, words, joins=False)


def test_run_of_nans_exits_with_3_and_saves_no_broken_model(tmp_path):
    data, run = write_data(tmp_path / "x"), tmp_path / "run"
    outcomes = break_at_once(data, run, 2, max_skipped_iterations="4")
    assert [code for code, _ in outcomes] == [3, 3]
    assert "training ended after step 5: 4 steps in a row were not finite" in outcomes[0][1]
    # The first update leaves finite weights of 1e30: no forward with them is finite, so that they must not be saved.
    assert "no checkpoint was saved" in outcomes[0][1]
    assert not list((run / "checkpoints").glob("*"))
    events = [event for event in lines(run / "events.jsonl") if event["kind"] == "not_finite"]
    assert [event["step"] for event in events] == [2, 3, 4, 5]
    assert events[0]["samples"] == [4, 8]
    # The recorded places are those of the tokens of four samples of 32 tokens and a label.
    tokens = np.fromfile(data.with_suffix(".bin"), "<u2")
    for sample in events[0]["places"]:
        found = np.concatenate([tokens[begin:end] for begin, end in (each["tokens"] for each in sample["pieces"])])
        assert len(found) == 33
    assert [record["updated"] for record in lines(run / "metrics.jsonl")] == [True, *[False] * 4]


@pytest.mark.complete
def test_run_that_ends_not_finite_fails_unless_unchecked(tmp_path):
    data = write_data(tmp_path / "x")
    [(code, talk)] = break_at_once(data, tmp_path / "checked", 1, train_iters="4")
    assert code == 3
    assert "training ended after step 4" in talk
    assert not list((tmp_path / "checked" / "checkpoints").glob("*"))
    unchecked = tmp_path / "unchecked"
    [(code, _)] = break_at_once(data, unchecked, 1, "--no-check-for-nan-in-loss-and-grad", train_iters="4")
    assert code == 0
    assert not [event for event in lines(unchecked / "events.jsonl") if event["kind"] == "not_finite"]


@pytest.mark.complete
def test_update_that_breaks_the_model_is_not_saved(tmp_path):
    data, run = write_data(tmp_path / "x"), tmp_path / "run"
    [(code, _)] = break_at_once(data, run, 1, lr="1e-3", train_iters="2")
    assert code == 0
    for rate, problem in (("1e30", "the loss is not finite after its update"), ("1e39", "weights or moments are not")):
        resumed = ("--load", str(run), "--exit-interval", "3")
        [(code, talk)] = break_at_once(data, run, 1, *resumed, lr=rate, train_iters="4")
        assert code == 3, talk
        assert "the model was not finite; the last good checkpoint is step-00000002" in talk
        assert (run / "checkpoints" / "LATEST").read_text().strip() == "step-00000002"
        assert sorted(each.name for each in (run / "checkpoints").glob("step-*")) == ["step-00000001", "step-00000002"]
        [event] = [
            one for one in lines(run / "events.jsonl") if one["kind"] == "not_saved" and problem in one["message"]
        ]
        assert event["step"] == 3


def train_with_large_weights(world: World, scenario: Scenario, checks: bool) -> list[float]:
    """Losses of three steps; a save between them may ask for the loss of the last batch."""
    engine = engine_of(scenario, world)
    for _, name, parameter in engine.item_store.parameters():
        if name == "embedding.position.weight":
            parameter.data[3] = 2000.0
    losses = []
    for step in (1, 2, 3):
        losses.append(engine.train_step(batch_of(step), sampled=False).loss)
        if checks:
            assert engine.has_finite_loss(batch_of(step))
    return losses


@pytest.mark.complete
@pytest.mark.parametrize("options", [{}, {"schedule": "zb-v", "virtual": 2}, {"precision": "bf16"}], ids=str)
def test_loss_check_of_large_weights_changes_no_bit(options):
    """One weight is above 1,600 at rank 0 alone: the processes agree to run the forward."""
    scenario = Scenario(**options)
    checked, plain = (run_workers(train_with_large_weights, 2, scenario, checks) for checks in (True, False))
    assert checked == plain


def test_all_ranks_agree_on_a_moment_that_is_not_finite():
    assert run_workers(break_moment, 2) == [(True, False)] * 2


def break_moment(world: World) -> tuple[bool, bool]:
    engine = engine_of(Scenario(), world)
    engine.train_step(batch_of(1), sampled=False)
    before = engine.has_finite_state()
    if world.rank == 1:
        _, name, _ = next(iter(engine.item_store.parameters()))
        engine.item_store.optimizers.moments(name)["exp_avg_sq"].view(-1)[0] = math.inf
    return before, engine.has_finite_state()


@pytest.mark.complete
def test_loss_scale_search_does_not_end_a_run(tmp_path):
    data, run = write_data(tmp_path / "x"), tmp_path / "run"
    [(code, _)] = break_at_once(
        data, run, 1, "--fp16", lr="1e-3", max_skipped_iterations="2", hysteresis="1", save_interval="100"
    )
    records = lines(run / "metrics.jsonl")
    assert code == 0
    assert [record["updated"] for record in records[:3]] == [False] * 3
    assert records[-1]["updated"]
    assert json.loads((run / "checkpoints" / "step-00000030" / "manifest.json").read_text())["step"] == 30
