"""The schedules in a checkpoint, and runs that continue with them."""

from __future__ import annotations

import pytest

from dynmo_train.formats.checkpoint import CheckpointError
from dynmo_train.optim.lr_schedule import LearningRate, WeightDecay
from dynmo_train.optim.scheduler_state import scheduler_state, with_stored_schedules
from tests.tables import table

RATE = LearningRate(peak=0.01, floor=0.001, style="cosine", warmup_steps=16, decay_steps=80, initial=0.0)
DECAY = WeightDecay(start=0.01, end=0.1, style="linear", steps=64)
OTHER_RATE = LearningRate(peak=0.5, floor=0.1, style="WSD", warmup_steps=0, decay_steps=9, wsd_steps=3)
OTHER_DECAY = WeightDecay(start=0.7, end=0.7, style="constant", steps=8)


def test_stored_schedules_replace_those_of_the_options():
    stored = {"x_scheduler": scheduler_state(RATE, DECAY, 12)}
    rate, decay = with_stored_schedules(OTHER_RATE, OTHER_DECAY, stored)
    expected = LearningRate(peak=0.01, floor=0.001, style="cosine", warmup_steps=16, decay_steps=80)
    assert [rate.at(step) for step in range(90)] == [expected.at(step) for step in range(90)]
    assert decay == DECAY
    assert rate.wsd_steps == 3


@pytest.mark.parametrize(
    "manifest", [{}, {"x_scheduler": None}, {"x_scheduler": {}}, {"x_scheduler": {"num_steps": 4}}]
)
def test_checkpoint_without_schedules_changes_nothing(manifest):
    assert with_stored_schedules(RATE, DECAY, manifest) == (RATE, DECAY)


@table("name", ["max_lr", "min_lr", "lr_decay_style", "lr_warmup_steps", "lr_decay_steps"])
@table("value", [None, True, "fast", -1, float("nan"), float("inf"), 10**400, [], {}])
def test_invalid_rates_in_a_checkpoint_are_refused(name, value):
    with pytest.raises(CheckpointError, match=f"invalid {name}"):
        with_stored_schedules(RATE, DECAY, {"x_scheduler": {name: value}})


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr_decay_steps", 0), ("lr_decay_steps", 1.5), ("wd_incr_steps", 0), ("wd_incr_style", "WSD"), ("end_wd", "1")],
)
def test_invalid_counts_and_decays_in_a_checkpoint_are_refused(name, value):
    with pytest.raises(CheckpointError, match=f"invalid {name}"):
        with_stored_schedules(RATE, DECAY, {"x_scheduler": {name: value}})
