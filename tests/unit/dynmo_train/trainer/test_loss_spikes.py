"""Which losses are spikes, and which samples a run skips: pure functions of the results of steps."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from dynmo_train.trainer.loss_spikes import LossSpikes, Rollback, end_message, spike_limit
from dynmo_train.trainer.step_result import StepResult, UnloggedStep

STEADY = [2.0, 2.1, 1.9, 2.05]


def spikes(*, action="rollback", last=None, state=None, **options):
    given = {
        "loss_spike_threshold": 10.0,
        "loss_spike_window": 8,
        "loss_spike_action": action,
        "loss_spike_skip_batches": 2,
        "loss_spike_max_rollbacks": 3,
        "max_skipped_iterations": 2,
    }
    return LossSpikes.of(SimpleNamespace(**given | options), state or {}, last)


def record(found, losses, *, first=1, updated=True, norm=1.0):
    """Messages of steps of 16 samples with these losses."""
    messages = []
    for step, loss in enumerate(losses, first):
        launched = UnloggedStep(step=step, size=16, tokens=8, consumed=16 * (step - 1), plan_id=0, problem=None)
        result = StepResult(
            loss=loss,
            grad_norm=norm,
            rate=0.1,
            next_rate=0.1,
            loss_scale=1.0,
            updated=updated,
            step_ns=10**9,
        )
        messages.append(found.after_step(launched, result))
    return messages


@pytest.mark.parametrize(
    ("losses", "limit"), [([1.0, 2.0, 3.0, 4.0, 5.0], 17.826), ([2.0] * 9, 2.2), ([2.0, 2.0, 2.0, 100.0], 2.2)]
)
def test_spike_limit_is_the_median_and_deviations_bounded_below(losses, limit):
    assert spike_limit(losses, 10.0) == pytest.approx(limit)


def test_loss_spike_needs_half_a_window_of_losses():
    found = spikes()
    assert record(found, [*STEADY[:3], 50.0]) == [None] * 4
    found = spikes()
    messages = record(found, [*STEADY, 50.0])
    assert messages[:4] == [None] * 4
    assert messages[4].startswith("loss spike in step 5: 50 is above 2.766, 10 deviations above the median 2.025")
    assert found.found == 5


def test_loss_spike_does_not_hide_the_next_one():
    messages = record(spikes(), [*STEADY, 50.0, 2.0, 50.0])
    assert [message is not None for message in messages] == [False] * 4 + [True, False, True]


def test_lasting_change_of_the_loss_becomes_normal():
    messages = record(spikes(), [*STEADY, *[9.0] * 8])
    assert messages[4] is not None
    assert messages[-1] is None


def test_steps_without_update_are_not_spikes_and_do_not_enter_the_window():
    found = spikes()
    record(found, STEADY)
    assert record(found, [50.0], first=5, updated=False, norm=math.inf) == [None]
    assert record(found, [math.nan], first=6, updated=False) == [None]
    assert list(found.losses) == STEADY
    assert found.found is None


def test_loss_spike_that_is_reported_requests_no_rollback():
    found = spikes(action="report")
    assert record(found, [*STEADY, 50.0])[-1] is not None
    assert found.found is None


def test_rollback_skips_the_last_batches_up_to_the_spike():
    found = spikes()
    # On GPUs step 6 was launched before the loss of step 5 was known.
    record(found, [*STEADY, 50.0, 2.0])
    rollback = found.rollback(checkpoint_step=2, skipped_steps=0)
    assert (rollback.step, rollback.checkpoint_step, rollback.skipped) == (5, 2, (48, 80))
    assert (rollback.cause, rollback.attempts, rollback.seconds) == ("loss spike", 1, 3.0)
    assert rollback.message == (
        "returned from step 5 to the checkpoint of step 2 (loss spike); samples 48 to 79 are skipped"
    )
    detail = rollback.incident(skipped_steps=0).detail
    assert (detail["incident"], detail["steps_lost"], detail["skipped_samples"]) == ("rollback", 3, [48, 80])


def test_rollback_keeps_the_ranges_of_earlier_ones():
    found = spikes()
    record(found, [*STEADY, 50.0])
    assert found.rollback(checkpoint_step=2, skipped_steps=0, ranges=((8, 16), (40, 48))).ranges == ((8, 16), (40, 80))


def test_rollback_skips_no_batch_before_the_checkpoint():
    found = spikes(loss_spike_skip_batches=100)
    record(found, [*STEADY, 50.0])
    assert found.rollback(checkpoint_step=4, skipped_steps=0).skipped == (64, 80)


def test_rollback_of_steps_that_are_not_finite_skips_all_of_them():
    found = spikes(loss_spike_skip_batches=1, max_skipped_iterations=3)
    record(found, STEADY)
    record(found, [math.nan] * 3, first=5, updated=False)
    rollback = found.rollback(checkpoint_step=2, skipped_steps=3)
    assert rollback.skipped == (64, 112)
    assert rollback.cause == "3 steps in a row were not finite"
    assert rollback.incident(skipped_steps=3).detail["steps_lost"] == 2


def test_rollbacks_to_the_same_checkpoint_are_counted():
    before = Rollback(
        step=5, checkpoint_step=2, skipped=(48, 80), ranges=(), cause="loss spike", attempts=2, seconds=1.0
    )
    for checkpoint, attempts in ((2, 3), (4, 1)):
        found = spikes(last=before)
        record(found, [*STEADY, 50.0])
        assert found.rollback(checkpoint_step=checkpoint, skipped_steps=0).attempts == attempts
    message = end_message(before, 1)
    assert "loss spike again after it returned 1 time to the checkpoint of step 2" in message


def test_state_of_the_window_continues_after_a_resume():
    found = spikes()
    record(found, STEADY)
    state = found.state(((48, 80),))
    assert state == {"losses": STEADY, "skipped_samples": [[48, 80]]}
    assert record(spikes(state=state), [50.0], first=5)[0] is not None
    assert spikes(loss_spike_threshold=None).state(()) == {}
