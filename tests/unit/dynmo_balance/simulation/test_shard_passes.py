"""The passes S and T of an output layer in shards: closed forms, and the graph of ``verify`` as a second opinion."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from dynmo_balance.analysis.verify.step import Pipeline, PlanWorker, measure
from dynmo_balance.costs.vocabulary import ShardCosts
from dynmo_balance.partition.balance import solve_best
from dynmo_balance.planning.custom_schedule import operation_times, search_custom_schedules
from dynmo_balance.schedules.list_scheduler import list_order
from dynmo_balance.schedules.operations import Kind
from dynmo_balance.schedules.vocabulary import peak_pending
from dynmo_balance.simulation.batched import step_times
from dynmo_balance.simulation.simulator import predict
from tests.tables import table
from tests.unit.dynmo_balance.problems import make_chain, make_problem

ITEMS = 12
VIRTUAL = {"gpipe": 1, "1f1b": 1, "zero-bubble": 1, "interleaved-1f1b": 2, "zb-v": 2, "dualpipe-v": 2}


def costs_of_shards(count=8, forward=800, weight=400, message=0):
    return ShardCosts(
        count=count,
        forward_ns=forward,
        weight_ns=weight,
        static_bytes=80 * count,
        gradient_bytes=20 * count,
        activation_bytes=10 * count,
        stream_bytes=message,
        part_bytes=2 * message,
        sums_bytes=message // 4,
        lookup_bytes=8 * message,
    )


def sharded(workers, schedule="1f1b", microbatches=12, message=0, seed=None, **options):
    random = None if seed is None else Random(seed)
    forward = [100] * ITEMS if random is None else [random.randint(10, 200) for _ in range(ITEMS)]
    backward = [100] * ITEMS if random is None else [random.randint(10, 200) for _ in range(ITEMS)]
    chain = make_chain(forward, backward, list(forward), [7] * ITEMS, [1000] * ITEMS, boundary=message)
    chain = replace(chain, vocabulary=costs_of_shards(message=message))
    return make_problem(chain, workers, schedule, microbatches, virtual_stages=VIRTUAL[schedule], **options)


def boundaries_of(problem):
    return tuple(stage * ITEMS // problem.num_stages for stage in range(problem.num_stages + 1))


def test_one_worker_takes_the_time_of_all_passes():
    problem = sharded(1, microbatches=5)
    assert predict(problem, (0, ITEMS)).step_ns == 5 * (ITEMS * 300 + 800 + 400)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_passes_are_added_once_per_microbatch_and_worker(workers):
    timeline = predict(sharded(workers), boundaries_of(sharded(workers)))
    for row in timeline.spans:
        for kind in (Kind.SHARD_FORWARD, Kind.SHARD_WEIGHT):
            assert [span.microbatch for span in row if span.kind is kind] == list(range(12))


@pytest.mark.parametrize("schedule", VIRTUAL)
def test_last_stage_waits_for_the_parts_of_all_workers(schedule):
    problem = sharded(3, schedule, message=1000, link_bandwidth=10**9, link_latency_ns=5)
    timeline = predict(problem, boundaries_of(problem))
    last, at = problem.num_stages - 1, problem.positions[-1]
    spans = [span for row in timeline.spans for span in row]
    ends = {
        (worker, span.microbatch): span.end_ns
        for worker, row in enumerate(timeline.spans)
        for span in row
        if span.kind is Kind.SHARD_FORWARD
    }
    for span in spans:
        if span.stage == last and span.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            for worker in range(3):
                message = 0 if worker == at else 5 + 2000
                assert span.start_ns >= ends[worker, span.microbatch] + message


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zb-v"])
def test_first_forward_waits_for_the_rows_of_all_workers(schedule):
    """The step ends when the gradient of the last rows has arrived."""
    problem = sharded(3, schedule, message=1000, link_bandwidth=10**9, link_latency_ns=5)
    timeline = predict(problem, boundaries_of(problem))
    # Of 8 shards the workers have 3, 3 and 2.
    rows = 5 + 3000
    first = next(span for row in timeline.spans for span in row if (span.stage, span.kind) == (0, Kind.FORWARD))
    assert first.start_ns == rows
    spans = [span for row in timeline.spans for span in row]
    gradient = max(
        span.end_ns for span in spans if span.stage == 0 and span.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    )
    assert timeline.step_ns == max(gradient + rows, *(span.end_ns for span in spans))


@table("schedule", VIRTUAL)
@table("seed", range(4))
def test_simulated_step_is_the_longest_path_of_verify(schedule, seed):
    problem = sharded(
        3, schedule, seed=seed, message=300, link_bandwidth=10**9, link_latency_ns=3, speeds=[10**6, 8 * 10**5, 10**6]
    )
    boundaries = boundaries_of(problem)
    timeline = predict(problem, boundaries)
    pipeline = Pipeline(
        items=problem.chain.items,
        costs=problem.chain.costs,
        spans=tuple(itertools.pairwise(boundaries)),
        plan_workers=tuple(
            PlanWorker(worker=s.worker, speed_ppm=s.speed_ppm, memory_bytes=None) for s in problem.slots
        ),
        worker_of_stage=problem.positions,
        order=problem.operations,
        bandwidth=problem.link_bandwidth,
        latency_ns=problem.link_latency_ns,
        vocabulary=problem.chain.vocabulary,
    )
    found = measure(pipeline)
    assert found is not None
    assert (found.step_ns, found.busy_ns) == (timeline.step_ns, timeline.busy_ns)
    assert found.peak_memory_bytes == timeline.peak_memory_bytes
    assert found.bubble == pytest.approx(Fraction(timeline.bubble_fraction), abs=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zb-v"])
def test_batched_steps_are_those_of_the_simulator(schedule):
    problem = sharded(3, schedule, seed=1)
    candidates = [boundaries_of(problem), (0, *boundaries_of(problem)[2:], ITEMS)]
    assert step_times(problem, candidates) == [predict(problem, each).step_ns for each in candidates]


def test_one_f_one_b_has_one_more_microbatch_in_flight():
    assert sharded(4).in_flight == (5, 4, 3, 2)
    plain = replace(sharded(4), chain=replace(sharded(4).chain, vocabulary=None))
    assert plain.in_flight == (4, 3, 2, 1)


def test_memory_of_shards_is_taken_off_the_limits():
    problem = sharded(4, memory=[4000] * 4)
    pending = peak_pending(problem.operations)
    assert problem.shard_bytes == tuple(160 + 20 * each for each in pending)
    assert [problem.slot(stage).memory_bytes for stage in range(4)] == [4000 - each for each in problem.shard_bytes]
    assert max(predict(problem, solve_best(problem).boundaries).peak_memory_bytes) <= 4000


def test_uneven_shards_are_placed_as_the_trainer_places_them():
    """Worker by worker, those of ``dynmo_train.models.vocabulary.vocabulary_shards.ranks_of_shards``."""
    shards = costs_of_shards(count=6)
    assert [shards.count_on(worker, 4) for worker in range(4)] == [2, 1, 2, 1]
    assert sum(shards.share(600, worker, 4) for worker in range(4)) == 600


def test_large_output_layer_is_faster_in_shards():
    """A head that costs half of all layers is a bottleneck; in shards it is not."""
    whole = make_problem(
        make_chain([*[100] * ITEMS, 600], [*[100] * ITEMS, 600], [*[100] * ITEMS, 600]), 4, microbatches=32
    )
    best = predict(whole, solve_best(whole).boundaries).step_ns
    chain = make_chain([*[100] * ITEMS, 1], [*[100] * ITEMS, 1], [*[100] * ITEMS, 1])
    chain = replace(chain, vocabulary=costs_of_shards(forward=1200, weight=600))
    shards = make_problem(chain, 4, microbatches=32)
    assert best > 1.25 * predict(shards, solve_best(shards).boundaries).step_ns


def heavy(seed, shards=4000):
    """Uneven layers, and shards that cost more than the stages."""
    random = Random(seed)
    columns = [[random.randint(10, 200) for _ in range(ITEMS)] for _ in range(3)]
    chain = make_chain(*columns, [7] * ITEMS, [1000] * ITEMS, boundary=50)
    chain = replace(chain, vocabulary=costs_of_shards(forward=shards, weight=shards // 2, message=50))
    return make_problem(chain, 2 + seed % 3, "zero-bubble", 8, virtual_stages=1, link_latency_ns=3)


def blind(problem, rounds):
    """The best step of orders that are made for the stages alone; the passes are placed afterwards."""
    without = replace(problem, chain=replace(problem.chain, vocabulary=None))
    found = search_custom_schedules(without, rounds)
    sharded = [(replace(one.problem, chain=problem.chain), one.solution.boundaries) for one in found]
    return min(predict(each, boundaries).step_ns for each, boundaries in sharded)


def test_orders_that_know_the_passes_are_never_slower():
    found = [(blind(heavy(seed), 1), search_custom_schedules(heavy(seed), 1)[0].step_ns) for seed in (0, 1)]
    assert all(aware <= before for before, aware in found)
    # At least one of them is faster by more than 2 percent.
    assert max(before / aware for before, aware in found) > 1.02


def test_step_of_a_list_schedule_has_the_time_of_the_passes():
    """One worker: nothing waits, so that the step is the sum of all operations and passes."""
    problem = sharded(1, microbatches=5)
    _, step = list_order(operation_times(problem, (0, ITEMS), with_passes=True), 5, 5, "backward first")
    assert step == 5 * (ITEMS * 300 + 800 + 400)


def test_orders_made_for_the_costs_have_the_passes():
    problem = sharded(2, "zero-bubble", memory=[20_000] * 2)
    [first, *_] = search_custom_schedules(problem, 2)
    timeline = predict(first.problem, first.solution.boundaries)
    for row in timeline.spans:
        assert [span.microbatch for span in row if span.kind is Kind.SHARD_FORWARD] == list(range(12))
    assert max(timeline.peak_memory_bytes) <= 20_000
