"""The simulator: closed forms, the rules of dependencies, a frozen front, memory."""

from __future__ import annotations

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.schedules.registry import Kind, Operation, build_order
from dynmo_balance.simulation.simulator import StageCosts, memory_curves, predict, run
from tests.paths import ROOT
from tests.tables import table

F, B, W = 7, 9, 5
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 8, 16, 32)]


def uniform(stages, forward=F, backward=B, weight=0, send=0):
    costs = StageCosts(forward_ns=forward, backward_input_ns=backward, backward_weight_ns=weight, send_ns=send)
    return [costs] * stages


@table(("workers", "microbatches"), SIZES)
@table("schedule", ["gpipe", "1f1b"])
def test_run_even_stages_equals_closed_form(schedule, workers, microbatches):
    timeline = run(build_order(schedule, workers, 1, microbatches), uniform(workers))
    assert timeline.step_ns == (microbatches + workers - 1) * (F + B)
    assert timeline.bubble_fraction == pytest.approx((workers - 1) / (microbatches + workers - 1))


@table(("workers", "microbatches"), SIZES)
def test_run_uneven_gpipe_equals_closed_form(workers, microbatches, rng):
    stages = [
        StageCosts(forward_ns=rng.randint(1, 50), backward_input_ns=rng.randint(1, 50), backward_weight_ns=0)
        for _ in range(workers)
    ]
    forward = [stage.forward_ns for stage in stages]
    backward = [stage.backward_input_ns for stage in stages]
    expected = sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))
    assert run(build_order("gpipe", workers, 1, microbatches), stages).step_ns == expected


@table("virtual", [1, 2, 3])
@table(("workers", "microbatches"), [(p, m) for p in (2, 4, 8) for m in (p, 2 * p, 4 * p)])
def test_run_interleaved_equals_closed_form(workers, microbatches, virtual):
    timeline = run(build_order("interleaved-1f1b", workers, virtual, microbatches), uniform(workers * virtual))
    assert timeline.step_ns == (microbatches * virtual + workers - 1) * (F + B)


@table(("workers", "microbatches"), [(p, m) for p in (1, 2, 4, 8) for m in (p, 2 * p, 32)])
def test_run_zero_bubble_even_thirds_equals_closed_form(workers, microbatches):
    timeline = run(build_order("zero-bubble", workers, 1, microbatches), uniform(workers, 6, 6, 6))
    assert timeline.step_ns == microbatches * 18 + (workers - 1) * (6 + 6 - 6)


@table("schedule", ["zb-v", "dualpipe-v"])
@table(("workers", "microbatches"), [(p, m) for p in (1, 2, 4, 8) for m in (2 * p, 3 * p, 32)])
def test_run_v_even_thirds_equals_closed_form(schedule, workers, microbatches):
    timeline = run(build_order(schedule, workers, 2, microbatches), uniform(2 * workers, 6, 6, 6))
    assert timeline.step_ns == microbatches * 2 * 18 + (workers - 1) * 6


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zero-bubble", "zb-v", "dualpipe-v"])
def test_bubbles_of_the_pipeline_guide_are_those_of_the_simulator(schedule):
    guide = (ROOT / "dynmo_train" / "pipeline" / "README.md").read_text(encoding="utf-8")
    virtual = 1 if schedule in ("1f1b", "zero-bubble") else 2
    cells = [f"`{schedule}`"]
    for workers, microbatches in ((4, 8), (8, 32)):
        order = build_order(schedule, workers, virtual, microbatches)
        stages = workers * virtual
        even, uneven = (
            run(order, uniform(stages, 120 // virtual, *(part // virtual for part in backward))).bubble_fraction
            for backward in ((120, 120), (180, 60))
        )
        cells.append(f"{even:.1%} ({uneven:.1%})".replace("%", " %"))
    stored = [StageCosts(forward_ns=1, backward_input_ns=1, backward_weight_ns=1, activation_bytes=60 // virtual)]
    order = build_order(schedule, 4, virtual, 8)
    cells.append(f"{max(run(order, stored * (4 * virtual)).peak_memory_bytes) / 60:.1f}")
    assert f"| {' | '.join(cells)} |" in guide


def test_run_transfer_adds_once_per_stage():
    timeline = run(build_order("gpipe", 3, 1, 1), uniform(3, send=100))
    assert timeline.step_ns == 3 * (F + B) + 4 * 100


def test_run_overhead_counts_for_every_operation():
    assert run(build_order("1f1b", 1, 1, 4), uniform(1), overhead_ns=3).step_ns == 4 * (F + B + 6)


def test_run_frozen_stage_has_no_backward(chain_factory, problem_factory):
    chain = chain_factory([10] * 4, backward=[0, 0, 20, 20], boundary=1000)
    problem = problem_factory(chain, 4, microbatches=1, link_bandwidth=10**9, link_latency_ns=0)
    timeline = predict(problem, (0, 1, 2, 3, 4))
    kinds = [{span.kind for span in row} for row in timeline.spans]
    assert kinds[0] == kinds[1] == {Kind.FORWARD}
    assert kinds[2] == kinds[3] == {Kind.FORWARD, Kind.BACKWARD}
    # three transfers forward, one gradient back
    assert timeline.step_ns == 4 * 10 + 3 * 1000 + 20 + 1000 + 20


def test_run_frozen_item_after_trained_one_passes_gradient(chain_factory, problem_factory):
    chain = chain_factory([1, 1, 1], backward=[5, 0, 5])
    timeline = predict(problem_factory(chain, 3, microbatches=1), (0, 1, 2, 3))
    assert [len(row) for row in timeline.spans] == [2, 2, 2]


def test_run_memory_counts_microbatches_in_flight(chain_factory, problem_factory):
    chain = chain_factory([1] * 4, backward=[2] * 4, activation=[10, 20, 30, 40], sizes=[100, 200, 300, 400])
    problem = problem_factory(chain, 4, microbatches=8)
    assert predict(problem, (0, 1, 2, 3, 4)).peak_memory_bytes == (140, 260, 360, 440)
    problem = problem_factory(chain, 4, "gpipe", microbatches=8)
    assert predict(problem, (0, 1, 2, 3, 4)).peak_memory_bytes == (180, 360, 540, 720)


def test_run_split_backward_stores_until_weight_gradient():
    costs = StageCosts(
        forward_ns=1, backward_input_ns=1, backward_weight_ns=1, static_bytes=1_000, activation_bytes=100
    )
    names = ["F0", "F1", "I0", "F2", "W0", "F3", "I1", "I2", "I3", "W1", "W2", "W3"]
    order = (tuple(Operation(0, Kind(name[0]), int(name[1])) for name in names),)
    (curve,) = memory_curves(order, [costs])
    memory = [1_100, 1_200, 1_200, 1_300, 1_300, 1_300, 1_300, 1_300, 1_300, 1_300, 1_200, 1_100]
    assert [size for _, size in curve] == memory
    assert run(order, [costs]).peak_memory_bytes == (1_300,)


def test_run_deadlock_is_refused():
    order = ((Operation(0, Kind.BACKWARD, 0), Operation(0, Kind.FORWARD, 0)),)
    with pytest.raises(UsageError, match="deadlocks: worker 0 never reaches 0B0"):
        run(order, uniform(1))


def test_run_slow_worker_takes_longer(chain_factory, problem_factory):
    problem = problem_factory(chain_factory([10, 10]), 2, "gpipe", microbatches=1, speeds=[1_000_000, 300_000])
    assert predict(problem, (0, 1, 2)).step_ns == 10 + 34
