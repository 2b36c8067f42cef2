"""Emulated runs: items take the times of a trace, on any schedule; the mathematics is that of the plain run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.formats.plan import V_SCHEDULES
from dynmo_train.parallel import device_clock
from dynmo_train.pipeline import emulated_profiler
from dynmo_train.pipeline.emulated_profiler import EmulatedProfiler
from dynmo_train.pipeline.emulation_trace import read_trace
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.trainer.engine import Engine
from tests.distributed.scenario import MICROBATCHES, Scenario, engine_of
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

MS = 1_000_000
PLAIN = Scenario(steps=3, prune=False, freeze=(), dropout=0.0)
NAMES = [item.name for item in PLAIN.family().items]


def write_trace(path, steps, names=NAMES, events=()):
    """A trace: step -> (forward, backward of the input, backward of the weights) of every item, in ms."""
    header = {"format": "dynmo.profile", "version": 1, "record": "header", "items": [{"name": name} for name in names]}
    fields = ("forward_ns", "backward_input_ns", "backward_weight_ns")
    lines = [
        {"record": "step", "step": step, **{f: [t * MS] * len(names) for f, t in zip(fields, times, strict=True)}}
        for step, times in steps.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *events, *lines]))
    return path


class VirtualTime:
    """A clock that only sleeping moves: what is measured by it does not depend on the load of the machine."""

    def __init__(self):
        self.now = 0

    def perf_counter_ns(self):
        return self.now

    def sleep(self, seconds):
        self.now += round(seconds * 1e9)


def emulated_in_virtual_time(world, scenario, path):
    """As ``emulated``; the profiler measures and sleeps by a virtual clock."""
    emulated_profiler.time = VirtualTime()
    device_clock.CpuClock.stamp = lambda _self: emulated_profiler.time.perf_counter_ns()
    return emulated(world, scenario, path)


def emulated(world, scenario, path):
    """Losses, each step's wall time in ms, and the costs of the last step."""
    family, settings = scenario.family(), scenario.settings()
    start = uniform_partition(family.items, world.size, scenario.virtual, v_shaped=scenario.schedule in V_SCHEDULES)
    engine = Engine(family, settings, start, world, EmulatedProfiler(read_trace(path, NAMES)))
    engine.build()
    results = [engine.train_step(scenario.batch(step), sampled=step > 1) for step in range(1, scenario.steps + 1)]
    kinds = [event.kind for step in range(scenario.steps) for event in engine.after_step(step)]
    return [r.loss for r in results], [r.step_ns / MS for r in results], results[-1].costs, kinds


def plain(world, scenario):
    engine = engine_of(scenario, world)
    return [engine.train_step(scenario.batch(step), sampled=False).loss for step in range(1, scenario.steps + 1)]


@pytest.mark.parametrize(("schedule", "virtual", "split"), [("1f1b", 1, False), ("zb-v", 2, True)])
def test_emulated_step_takes_the_trace_time_with_the_same_losses(tmp_path, schedule, virtual, split):
    scenario = replace(PLAIN, schedule=schedule, virtual=virtual)
    event = {"record": "event", "step": 2, "kind": "pruned", "detail": {"to": 0.5}, "next_expected_step": None}
    trace = write_trace(tmp_path / "trace.jsonl", {1: (0, 0, 0), 3: (4, 5, 3)}, events=[event])
    losses, steps, costs, kinds = run_workers(emulated, 2, scenario, trace)[0]
    assert losses == run_workers(plain, 1, PLAIN)[0]
    assert kinds == ["pruned"]
    # The two workers share ten items, five each on average, in each microbatch; a busy machine only adds to that
    work = MICROBATCHES * 5 * (4 + 5 + 3)
    assert steps[-1] >= work
    assert sum(worker["busy_ns"] for worker in costs) / MS >= 2 * work


@pytest.mark.parametrize(
    ("schedule", "virtual", "split"), [("1f1b", 1, False), ("zb-v", 2, True), ("dualpipe-v", 2, True)]
)
def test_emulated_item_takes_the_trace_time(tmp_path, schedule, virtual, split):
    trace = write_trace(tmp_path / "trace.jsonl", {1: (0, 0, 0), 3: (4, 5, 3)})
    scenario = replace(PLAIN, schedule=schedule, virtual=virtual)
    costs = run_workers(emulated_in_virtual_time, 2, scenario, trace)[0][2]
    of_items = [(f, b, w) for c in costs for f, b, w in zip(*parts(c, split), strict=True)]
    assert len(of_items) == len(NAMES)
    # Forward, backward and weight gradients; some items run their whole backward in one operation.
    whole, in_parts = (4, 8, 0), (4, 5, 3)
    assert set(of_items) == ({whole, in_parts} if split else {whole}), of_items
    assert not split or of_items.count(in_parts) >= len(NAMES) - 4, of_items


def parts(cost, split):
    weight = cost["backward_weight_ns"] if split else [0] * len(cost["items"])
    return [[ns / MS for ns in values] for values in (cost["forward_ns"], cost["backward_ns"], weight)]


def test_emulated_evaluation_takes_the_trace_time(tmp_path, monkeypatch):
    trace = write_trace(tmp_path / "trace.jsonl", {1: (2, 0, 0)})
    took = run_workers(evaluation_ms, 1, trace)[0]
    assert took >= MICROBATCHES * len(NAMES) * 2


def evaluation_ms(world, trace):
    import time

    scenario = PLAIN
    engine = Engine(
        scenario.family(),
        scenario.settings(),
        uniform_partition(scenario.family().items, 1),
        world,
        EmulatedProfiler(read_trace(trace, NAMES)),
    )
    engine.build()
    begin = time.perf_counter_ns()
    engine.evaluate([scenario.batch(1)])
    return (time.perf_counter_ns() - begin) / MS


def test_trace_times_are_repeated_scaled_and_split(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", {2: (1, 2, 3)}, names=["a", "b"])
    with path.open("a") as file:
        half = {"record": "step", "step": 5, "forward_ns": [None, 8], "backward_ns": [7, None]}
        file.write(json.dumps(half) + "\n" + '{"record": "step", "ste')
    trace = read_trace(path, ["b", "a"], scale=2)
    assert trace.at(1) is trace.at(4)
    first, later = trace.at(4)["a"], trace.at(99)
    assert (first.forward_ns, first.backward_input_ns, first.backward_weight_ns) == (2 * MS, 4 * MS, 6 * MS)
    assert (later["a"].forward_ns, later["a"].backward_input_ns, later["a"].backward_weight_ns) == (2 * MS, 8, 6)
    assert (later["b"].forward_ns, later["b"].backward_weight_ns) == (16, 6 * MS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header line"),
        ('{"record": "header", "format": "x", "version": 1, "items": []}\n', "dynmo.profile"),
        ('{"record": "header", "format": "dynmo.profile", "version": 9, "items": []}\n', "version"),
        ("{]\n", "json"),
    ],
)
def test_invalid_trace_is_an_error(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(path, ["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_ns": [1]}, "length|exactly|at least"),
        ({"forward_ns": [1, -1]}, "forward_ns"),
        ({"backward_ns": [1, 1]}, "must have forward_ns, and backward_ns or"),
        ({"step": "one"}, "step"),
    ],
)
def test_invalid_trace_steps_are_an_error(tmp_path, change, message):
    path = write_trace(tmp_path / "trace.jsonl", {1: (1, 1, 1)}, names=["a", "b"])
    header, step = path.read_text().splitlines()
    path.write_text(header + "\n" + json.dumps({**json.loads(step), **change}) + "\n")
    with pytest.raises(UsageError, match=message):
        read_trace(path, ["a", "b"])


def test_trace_of_another_model_is_an_error(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", {1: (1, 1, 1)}, names=["a", "b"])
    with pytest.raises(UsageError, match="lacks c; has b"):
        read_trace(path, ["a", "c"])
    empty = write_trace(tmp_path / "empty.jsonl", {}, names=["a"])
    with pytest.raises(UsageError, match="has no step line"):
        read_trace(empty, ["a"])
