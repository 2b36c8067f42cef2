"""The schedules: every operation once, memory in flight, and torch's own tables operation for operation."""

from __future__ import annotations

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.formats.plan import V_SCHEDULES, position_of
from dynmo_balance.schedules.registry import SCHEDULES, Kind, build_arrays, build_order, count_in_flight, in_flight
from tests.tables import table

SIZES = [(p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3) for m in (p, 2 * p, 4 * p)]
LOOPED = [name for name in SCHEDULES if name not in V_SCHEDULES]
CASES = [(name, *size) for name in LOOPED for size in SIZES]
CASES += [("zb-v", p, 2, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, p, 2 * p - 1, 4 * p + 1)]
DUALPIPE = [(p, m) for p in (1, 2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 3 * p + 2, 4 * p)]
CASES += [("dualpipe-v", p, 2, m) for p, m in DUALPIPE]


@table(("schedule", "workers", "virtual", "microbatches"), CASES)
def test_build_order_any_schedule_has_every_operation_once(schedule, workers, virtual, microbatches):
    order = build_order(schedule, workers, virtual, microbatches)
    whole = {Kind.FORWARD, Kind.BACKWARD}
    split = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    allowed = {"zero-bubble": [split], "zb-v": [split], "dualpipe-v": [whole, split]}.get(schedule, [whole])
    for worker, operations in enumerate(order):
        stages = [s for s in range(workers * virtual) if position_of(schedule, s, workers) == worker]
        kinds = {(s, m): [] for s in stages for m in range(microbatches)}
        for stage, kind, microbatch in operations:
            kinds[stage, microbatch].append(kind)
        assert all(set(found) in allowed and len(found) == len(set(found)) for found in kinds.values())


@table(("schedule", "workers", "virtual", "microbatches"), CASES)
def test_in_flight_closed_forms_equal_the_count(schedule, workers, virtual, microbatches):
    counted = count_in_flight(build_arrays(schedule, workers, virtual, microbatches))
    assert in_flight(schedule, workers, virtual, microbatches) == counted


def test_build_order_unknown_schedule_is_refused():
    with pytest.raises(UsageError, match="unknown schedule"):
        build_order("2f2b", 2, 1, 4)


def test_interleaved_uneven_rounds_are_refused():
    with pytest.raises(UsageError, match="use a multiple of 4"):
        build_order("interleaved-1f1b", 4, 2, 9)


@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_v_schedule_needs_two_stages_per_worker(schedule):
    with pytest.raises(UsageError, match="2 stages per worker, got 3"):
        build_order(schedule, 4, 3, 8)


def test_dualpipe_v_needs_a_microbatch_per_stage():
    with pytest.raises(UsageError, match=r"4 workers needs at least 8 microbatches.* got 7; .*--schedule zb-v"):
        build_order("dualpipe-v", 4, 2, 7)


class Stage:
    """What torch's multi-stage schedules look at when they make their tables."""

    def __init__(self, index, workers, rank, virtual):
        self.stage_index, self.group_size, self.group_rank = index, workers, rank
        self.num_stages, self.is_first, self.is_last = workers * virtual, index == 0, index == workers * virtual - 1
        self.has_backward = True
        self.device = "cpu"
        self.submod = None
        self.stage_index_to_group_rank = {s: s % workers for s in range(workers * virtual)}
        self.group = None


@table("name", ["interleaved-1f1b", "zero-bubble"])
@table(("workers", "virtual", "microbatches"), [(p, v, m) for p, v, m in SIZES if p > 1 and v > 1])
def test_build_order_equals_torch(name, workers, virtual, microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = {"interleaved-1f1b": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble"}[name]
    stages = [Stage(lap * workers, workers, 0, virtual) for lap in range(virtual)]
    table = getattr(schedules, kind)(stages, microbatches, loss_fn=lambda *_: None).pipeline_order
    for worker, operations in enumerate(build_order(name, workers, virtual, microbatches)):
        theirs = [str(action) for action in table[worker] if action is not None]
        assert [str(operation) for operation in operations] == theirs


@table(("workers", "microbatches"), [(p, m) for p in (2, 3, 4, 8) for m in (1, p, 2 * p - 1, 4 * p)])
def test_zb_v_equals_torch(workers, microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [Stage(0, workers, 0, 2), Stage(2 * workers - 1, workers, 0, 2)]
    table = schedules.ScheduleZBVZeroBubble(stages, microbatches, loss_fn=lambda *_: None).pipeline_order
    for worker, operations in enumerate(build_order("zb-v", workers, 2, microbatches)):
        theirs = [str(action) for action in table[worker] if action is not None]
        assert [str(operation) for operation in operations] == theirs


@table(("workers", "microbatches"), DUALPIPE)
def test_dualpipe_v_equals_torch(workers, microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [Stage(0, workers, 0, 2), Stage(2 * workers - 1, workers, 0, 2)]
    table = schedules.ScheduleDualPipeV(stages, microbatches, loss_fn=lambda *_: None).pipeline_order
    for worker, operations in enumerate(build_order("dualpipe-v", workers, 2, microbatches)):
        # torch's runtime executes the two operations of a pair one after the other.
        theirs = [str(one) for action in table[worker] for one in action.sub_actions or (action,)]
        assert [str(operation) for operation in operations] == theirs


@table(("workers", "microbatches"), [(p, m) for p in (2, 4, 8) for m in (p, 2 * p, 4 * p)])
def test_1f1b_equals_torch_except_last_rank(workers, microbatches):
    """torch 2.13's table of the last rank leaves out the first forward; its own runs do not use that table."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = schedules.Schedule1F1B._get_pipeline_order(
        type("Schedule", (), {"_n_microbatches": microbatches, "_num_stages": workers})()
    )
    for worker, operations in enumerate(build_order("1f1b", workers, 1, microbatches)[:-1]):
        expected = [str(action) for action in theirs[worker] if action and action.microbatch_index is not None]
        assert [str(operation) for operation in operations] == expected


@table(("workers", "microbatches"), [(p, m) for p in (2, 4, 8) for m in (1, p, 4 * p)])
def test_gpipe_equals_torch(workers, microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = schedules.ScheduleGPipe._get_pipeline_order(
        type("Schedule", (), {"_n_microbatches": microbatches, "_num_stages": workers})()
    )
    for worker, operations in enumerate(build_order("gpipe", workers, 1, microbatches)):
        expected = [str(action) for action in theirs[worker] if action and action.microbatch_index is not None]
        assert [str(operation) for operation in operations] == expected
