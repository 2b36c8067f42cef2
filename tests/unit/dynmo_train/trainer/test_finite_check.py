"""What follows from steps that are not finite: a pure function of the results of the steps."""

from __future__ import annotations

import math

import pytest

from dynmo_train.optim.precision import LossScaler, LossScaling
from dynmo_train.trainer.finite_check import MAX_PIECES, FiniteCheck, batch_detail, end_message
from dynmo_train.trainer.step_result import StepResult

NAN = math.nan


def result(loss=1.0, norm=1.0, *, is_scale_search=False):
    updated = math.isfinite(loss) and math.isfinite(norm)
    return StepResult(
        loss=loss,
        grad_norm=norm,
        rate=0.1,
        next_rate=0.1,
        loss_scale=1.0,
        updated=updated,
        step_ns=1,
        is_scale_search=is_scale_search,
    )


def test_finite_check_counts_in_a_row_and_ends_at_the_limit():
    check = FiniteCheck(limit=3)
    messages = [check.after_step(step, result(loss)) for step, loss in enumerate((1.0, NAN, 1.0, NAN, NAN), start=1)]
    assert [each is None for each in messages] == [True, False, True, False, False]
    assert messages[-1] == "skipped the update of step 5: loss nan, gradient norm 1; 2 in a row, the run ends at 3"
    assert not check.is_over
    check.after_step(6, result(norm=math.inf))
    assert check.is_over
    assert "step 6: 3 steps in a row were not finite; the last good checkpoint is X" in end_message(6, check, "X")


def test_finite_check_ignores_the_loss_scale_search():
    check = FiniteCheck(limit=3)
    assert {check.after_step(n, result(norm=NAN, is_scale_search=True)) for n in range(40)} == {None}
    assert not check.is_over


def test_finite_check_that_is_off_never_ends_a_run():
    check = FiniteCheck(limit=None)
    assert {check.after_step(step, result(NAN)) for step in range(40)} == {None}
    assert not check.is_over


@pytest.mark.parametrize(("window", "scale", "expected"), [(5, 2.0, True), (5, 1.0, False), (0, 2.0, False)])
def test_loss_scale_can_fall_above_its_minimum(window, scale, expected):
    assert LossScaler(LossScaling(initial=scale, minimum=1.0, window=window, hysteresis=1)).can_fall is expected
    assert not LossScaler(None).can_fall


class _Engine:
    def __init__(self, *, state=True, loss=True):
        self.has_finite_state = lambda: state
        self.has_finite_loss = lambda batch: loss


def test_checkpoint_is_refused_until_a_step_is_finite():
    check, sound, batch = FiniteCheck(limit=9), _Engine(), object()
    assert check.refusal(sound, 1, batch) is None
    check.after_step(2, result(NAN))
    assert check.refusal(sound, 2, batch) == "no checkpoint of step 2: the last step was not finite"
    assert check.is_refused
    check.after_step(3, result())
    problem = check.refusal(_Engine(state=False), 3, batch)
    assert problem == "no checkpoint of step 3: weights or moments are not finite"
    problem = check.refusal(_Engine(loss=False), 3, batch)
    assert problem == "no checkpoint of step 3: the loss is not finite after its update"
    assert check.refusal(sound, 3, batch) is None
    assert not check.is_refused


def test_batch_detail_of_a_large_batch_is_bounded():
    piece = {"prefix": "x", "sequences": [0, 1], "tokens": [0, 9]}
    detail = batch_detail(100, MAX_PIECES, [[piece, piece]] * MAX_PIECES)
    assert (len(detail["places"]), detail["places_left_out"]) == (MAX_PIECES // 2, MAX_PIECES // 2)
    assert detail["samples"] == [100, 100 + MAX_PIECES]
    assert detail["places"][1] == {"sample": 101, "pieces": [piece, piece]}
