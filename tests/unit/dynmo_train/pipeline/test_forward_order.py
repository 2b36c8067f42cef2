"""Forwards of a stage run in the order of the microbatches, which the balance loss over a batch counts on."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import _ComputationType

from dynmo_train._common.errors import UsageError
from dynmo_train.pipeline.schedule import LOOPED, _check_forward_order


def stages_of(name, ranks):
    last = 2 * ranks - 1
    indices = (0, last) if name in ("zb-v", "dualpipe-v") else (0, ranks)
    common = {"num_stages": 2 * ranks, "group_size": ranks, "group_rank": 0, "submod": None, "group": None}
    return [SimpleNamespace(stage_index=at, is_first=at == 0, is_last=at == last, **common) for at in indices]


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("name", LOOPED)
def test_schedules_run_forwards_in_order(name, microbatches):
    schedule = LOOPED[name](stages_of(name, 2), microbatches, loss_fn=lambda output, _: output, scale_grads=False)
    for row in schedule.pipeline_order.values():
        actions = [one for action in row if action for one in action.sub_actions or (action,)]
        forwards = [one for one in actions if one.computation_type == _ComputationType.FORWARD]
        for stage in {one.stage_index for one in forwards}:
            order = [one.microbatch_index for one in forwards if one.stage_index == stage]
            assert len(order) == microbatches
            assert all(before < after for before, after in pairwise(order))


def test_plan_with_forwards_in_order_passes():
    _check_forward_order(["0F0 0F1 0B1 0B0", "1F0 1I0 1F1 1I1 1W0 1W1"])


def test_plan_with_another_order_is_refused():
    with pytest.raises(UsageError, match="microbatch 1 of stage 1 before 0; global_aux_loss needs their order"):
        _check_forward_order(["0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"])
