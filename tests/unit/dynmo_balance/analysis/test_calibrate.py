"""Calibration finds the constants that a simulated run was made with; imports put times on the right items."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace

import pytest

from dynmo_balance._common.document import complete_lines
from dynmo_balance._common.errors import UsageError
from dynmo_balance.analysis.calibrate import Sample, calibrate, samples_of
from dynmo_balance.cli.options import Importable
from dynmo_balance.formats.plan import read_plan
from dynmo_balance.formats.profile import parse_profile, read_profile
from dynmo_balance.inputs.import_profile import SOURCES, import_lines
from dynmo_balance.inputs.profile_source import load
from dynmo_balance.inputs.run_history import read_plans
from dynmo_balance.simulation.simulator import predict
from tests.paths import CONTRACTS

HEADER = CONTRACTS / "profile/valid/header-only.jsonl"


def made_with(problem, boundaries, overhead, latency, bandwidth):
    true = replace(problem, link_latency_ns=latency, link_bandwidth=bandwidth)
    return Sample(
        problem=problem, boundaries=boundaries, step_ns=predict(true, boundaries, overhead).step_ns, records=5
    )


@pytest.fixture
def problem(rng, chain_factory, problem_factory):
    work = [rng.randint(10**6, 5 * 10**6) for _ in range(8)]
    chain = chain_factory(work, backward=[2 * w for w in work], boundary=10**6)
    return problem_factory(chain, 4, microbatches=8, link_bandwidth=10**9, link_latency_ns=50_000)


def test_calibrate_recovers_the_overhead(problem):
    samples = [made_with(problem, b, 700_000, 50_000, 10**9) for b in ((0, 2, 4, 6, 8), (0, 1, 4, 6, 8))]
    found = calibrate(samples, fit_link=False)
    assert found.overhead_ns == pytest.approx(700_000, rel=0.02)
    assert found.error < 0.002


PARTITIONS = ((0, 2, 4, 6, 8), (0, 1, 3, 5, 8), (0, 3, 4, 5, 8))


def test_calibrate_link_states_what_equal_transfers_leave_open(problem):
    """Overhead and transfers lengthen these steps in the same way: the true bandwidth is in the stated range."""
    samples = [made_with(problem, cuts, 300_000, 50_000, 3 * 10**8) for cuts in PARTITIONS]
    linked = calibrate(samples, fit_link=True)
    assert linked.error < 0.003
    assert linked.latency_ns == 50_000
    assert "every transfer has 1,000,000 bytes" in linked.doubts[0]
    low, high = map(float, re.search(r"links of ([\d.e+]+) to ([\d.e+]+) GB/s", linked.doubts[1]).groups())
    assert low < 0.3 < high


def test_calibrate_link_recovers_latency_and_bandwidth(problem):
    chain = problem.chain
    items = tuple(replace(item, boundary_bytes=(1 + at % 3) * 10**6) for at, item in enumerate(chain.items))
    problem = replace(problem, chain=replace(chain, items=items))
    samples = [made_with(problem, cuts, 100_000, 500_000, 3 * 10**8) for cuts in (*PARTITIONS, (0, 1, 4, 7, 8))]
    linked = calibrate(samples, fit_link=True)
    assert linked.error < 0.003
    assert linked.bandwidth_bytes_per_s == pytest.approx(3 * 10**8, rel=0.25)
    assert linked.doubts == ()


def test_calibrate_link_needs_two_partitions(problem):
    with pytest.raises(UsageError, match="two different partitions"):
        calibrate([made_with(problem, (0, 2, 4, 6, 8), 0, 0, 10**9)], fit_link=True)
    with pytest.raises(UsageError, match="no samples"):
        calibrate([], fit_link=False)


def test_samples_end_where_costs_or_plans_change(tmp_path):
    (tmp_path / "plans").mkdir()
    shutil.copy(CONTRACTS / "profile/valid/events.jsonl", tmp_path / "profile.jsonl")
    shutil.copy(CONTRACTS / "plan/valid/initial.json", tmp_path / "plans/plan-000000.json")
    segment = read_profile(tmp_path / "profile.jsonl")[0]
    samples = samples_of(segment, read_plans(tmp_path / "plans", segment.header))
    assert [sample.records for sample in samples] == [4, 4]  # before and after freezing; one step of plan 1 is too few


def test_import_kinds_match_the_registry():
    assert {kind.value for kind in Importable} == set(SOURCES)


def imported(kind, text, tmp_path):
    source = tmp_path / "measured"
    source.write_text(text)
    header = read_profile(HEADER)[0].header
    line = next(complete_lines(HEADER.read_bytes()))
    model = load(CONTRACTS / "profile/valid/steps.jsonl").costs
    return parse_profile(import_lines(kind, source, line, header, model).splitlines(), "imported")[0]


def test_import_trace_gives_each_item_its_mean(tmp_path):
    names = [item.name for item in read_profile(HEADER)[0].header.items]
    events = [
        {"name": f"{name}.{kind}", "ph": "X", "ts": 0, "dur": base + at}
        for base in (10, 30)
        for at, name in enumerate(names)
        for kind in ("forward", "backward")
    ]
    step = imported("chrome-trace", json.dumps({"traceEvents": [*events, {"ph": "M"}]}), tmp_path).steps[0]
    assert step.forward_ns == tuple(1000 * (20 + at) for at in range(len(names)))
    with pytest.raises(UsageError, match=r"no events named embedding\.forward"):
        imported("chrome-trace", "[]", tmp_path)
    with pytest.raises(UsageError, match="contains no list"):
        imported("chrome-trace", "{}", tmp_path)


def ranges_of(names, *, tid=1):
    """Two passes of named ranges, one operator in each, and the backward steps of the operators."""
    for number in range(2):
        for at, name in enumerate(names):
            begin, sequence = 10_000 * number + 100 * at, len(names) * number + at
            yield {"name": name, "cat": "user_annotation", "ph": "X", "ts": begin, "dur": 10 + at, "tid": tid}
            yield {"name": name, "cat": "gpu_user_annotation", "ph": "X", "ts": begin, "dur": 99, "tid": 7}
            operator = {"cat": "cpu_op", "ph": "X", "args": {"Sequence number": sequence}, "dur": 1}
            yield operator | {"name": "aten::mm", "ts": begin + 1, "tid": tid}
            back = 10_000 * number + 5000 + 100 * (len(names) - at)
            step = {"name": "autograd::engine::evaluate_function: MmBackward0", "ts": back, "dur": 20 + at, "tid": 2}
            yield operator | step


@pytest.mark.parametrize("prefix", ["layers.", "model.layers.", "block_"])
def test_import_trace_with_named_ranges_alone_is_read(tmp_path, prefix):
    """As ``record_function("layers.0")`` writes them; embedding and head, unnamed, take what they take in the model."""
    header = read_profile(HEADER)[0].header
    layers = list(dict.fromkeys(item.layer for item in header.items if item.kind not in ("embedding", "head")))
    ends = ("embedding", "head") if prefix == "block_" else ()
    names = [*ends[:1], *(f"{prefix}{at}" for at in range(len(layers))), *ends[1:]]
    step = imported("chrome-trace", json.dumps({"traceEvents": list(ranges_of(names))}), tmp_path).steps[0]
    first = len(ends[:1])
    for times, base in ((step.forward_ns, 10), (step.backward_ns, 20)):
        by_layer = [
            sum(ns for item, ns in zip(header.items, times, strict=True) if item.layer == each) for each in layers
        ]
        assert by_layer == [1000 * (base + at + first) for at in range(len(layers))]
        assert min(times[0], times[-1]) > 0
        if ends:
            assert times[0] == 1000 * base
    with pytest.raises(UsageError, match=rf"ranges named layers\.0 to layers\.{len(layers) - 1}"):
        imported("chrome-trace", json.dumps({"traceEvents": list(ranges_of(names[first + 1 :]))}), tmp_path)


DEEPSPEED = "[Rank {}] time (ms) | fwd_microstep: {} | bwd_microstep: {} | bwd_inner_microstep: 8.0 | step: 1\n"
ITERATION = " iteration {:8d}/    100 | consumed samples: 8 | elapsed time per iteration (ms): 250.5 | lm loss: 9.1 |\n"
ALL = """times across ranks (ms):
  forward-backward:
     rank  0: 300.00
     rank  1: 300.00
  forward-compute:
     rank  0: 40.00
     rank  1: 80.00
  backward-compute:
     rank  0: 88.00
     rank  1: 160.00
  optimizer:
     rank  0: 3.00
     rank  1: 999.00
"""
MINMAX = """(min, max) time across ranks (ms):
    forward-backward ...............................: (280.00, 300.00)
    forward-compute ................................: (30.00, 80.00)
    backward-compute ...............................: (70.00, 160.00)
"""
MAX = """max time across ranks (ms):
    forward-compute ................................: 80.00
    backward-compute ...............................: 160.00
"""


def of_workers(step):
    """Forward and backward of the two workers under Megatron's even split, in ms of a step of eight microbatches."""
    cut = 5
    return [
        round(8 * sum(values[part]) / 1e6, 3)
        for values in (step.forward_ns, step.backward_ns)
        for part in (slice(0, cut), slice(cut, None))
    ]


def test_import_log_of_all_ranks_gives_worker_times(tmp_path):
    profile = imported("megatron-log", ITERATION.format(20) + ALL + ITERATION.format(30) + ALL, tmp_path)
    assert [step.step for step in profile.steps] == [20, 30]
    for step in profile.steps:
        assert of_workers(step) == pytest.approx([40, 80, 88, 160], abs=1e-3)
        assert step.step_ns == 250_500_000
        assert step.busy_ns == (128_000_000, 240_000_000)


@pytest.mark.parametrize("log", [MINMAX, MAX])
def test_import_log_of_slowest_rank_scales_slowest_worker(tmp_path, log):
    step = imported("megatron-log", 2 * log, tmp_path).steps[1]
    times = of_workers(step)
    assert max(times[:2]) == pytest.approx(80, abs=1e-3)
    assert max(times[2:]) == pytest.approx(160, abs=1e-3)
    assert min(times[:2]) < 80
    assert step.busy_ns == (None, None)


def test_import_log_of_one_rank_scales_other_workers(tmp_path):
    steps = imported("deepspeed-log", 2 * DEEPSPEED.format(0, 5.0, 9.0), tmp_path).steps
    assert len(steps) == 2
    assert of_workers(steps[0])[::2] == pytest.approx([40, 72], abs=1e-3)
    assert steps[0].busy_ns == (112_000_000, None)
    both = DEEPSPEED.format(0, 5.0, 9.0) + DEEPSPEED.format(1, 6.0, 7.0)
    assert of_workers(imported("deepspeed-log", both, tmp_path).steps[0]) == pytest.approx([40, 48, 72, 56], abs=1e-3)


def test_import_log_uses_the_plan_of_the_run(tmp_path):
    source = tmp_path / "measured"
    source.write_text(ALL)
    header = read_profile(HEADER)[0].header
    model = load(CONTRACTS / "profile/valid/steps.jsonl").costs
    plan = read_plan(CONTRACTS / "plan/valid/move.json")
    lines = import_lines("megatron-log", source, next(complete_lines(HEADER.read_bytes())), header, model, plan)
    step = parse_profile(lines.splitlines(), "imported")[0].steps[0]
    assert 8 * sum(step.forward_ns[:7]) / 1e6 == pytest.approx(40, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("megatron-log", DEEPSPEED, "no times of forward-compute and backward-compute; log with --timing-log-level 2"),
        ("megatron-log", "  forward-backward:\n     rank  0: 1.0\n", "it has forward-backward alone"),
        ("megatron-log", "  forward-compute:\n     rank  0: 1.0\n", "no times of forward-compute and backward"),
        ("megatron-log", ALL.replace("rank  1", "rank  7"), "ranks 7 belong to no worker of the header"),
        ("megatron-log", MINMAX.replace("80.00", "8.0.0"), "no times of forward-compute and backward-compute"),
        ("megatron-log", MAX.replace("80.00", "9" * 400), "no times of forward-compute and backward-compute"),
        ("deepspeed-log", MINMAX, "no line with fwd_microstep and bwd_microstep; log with wall_clock_breakdown"),
    ],
)
def test_import_invalid_log_is_refused_by_name(tmp_path, kind, text, words):
    with pytest.raises(UsageError, match=words):
        imported(kind, text, tmp_path)


LAYERS = 4


@pytest.fixture(scope="module")
def profiled():
    """Three passes of a model under torch.profiler."""
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, width), torch.nn.Linear(width, 64)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 64)
            self.layers = torch.nn.ModuleList(Block(16) for _ in range(LAYERS))
            self.head = torch.nn.Linear(64, 50)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model, tokens = Model(), torch.randint(0, 50, (8, 64))
    model(tokens).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as found:
        for _ in range(3):
            model(tokens).sum().backward()
    return found


FORWARD_US = (50, 100, 200, 300, 400, 70)
BACKWARD_US = (0, 170, 130, 90, 50, 10)
"""Embedding, layers and head: the matrix products of a backward take 10, 20, ... 90 us, first those of the head."""
TICK_US = 1e-6


def advance_us(event, products):
    """What an event takes on the clock of ``retimed`` beyond the events inside; ``products`` counts the backward's."""
    name = event["name"]
    if name.startswith("nn.Module: Block_"):
        return FORWARD_US[1 + int(name.rpartition("_")[2])]
    if name.endswith("evaluate_function: AddmmBackward0"):
        return 10 * (1 + next(products) % (2 * LAYERS + 1))
    return {"nn.Module: Embedding_0": FORWARD_US[0], "nn.Module: Model_0": FORWARD_US[-1]}.get(name, 0)


def retimed(document):
    """A trace with the same events in the same order and nesting, with times that depend on no machine's load."""
    instants = []
    for event in document["traceEvents"]:
        if event.get("ph") == "X":
            begin, length = event["ts"], event["dur"]
            instants.append((begin, 1, -length, len(instants), event))
            instants.append((begin + length, 0 if length else 2, -begin, len(instants), event))
    now, products = 0.0, itertools.count()
    for _, kind, _, _, event in sorted(instants, key=lambda instant: instant[:4]):
        now += TICK_US
        if kind == 1:
            event["ts"] = now
        else:
            now += advance_us(event, products)
            event["dur"] = now - event["ts"]
    return document


@pytest.fixture(scope="module")
def trace(profiled, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    profiled.export_chrome_trace(str(path))
    return retimed(json.loads(path.read_text()))


def by_layer(header, values):
    found = {}
    for item, ns in zip(header.items, values, strict=True):
        found[item.layer] = found.get(item.layer, 0) + ns
    return found


def test_import_torch_trace_gives_layer_times(trace, tmp_path):
    profile = imported("chrome-trace", json.dumps(trace), tmp_path)
    step = profile.steps[0]
    layers = list(dict.fromkeys(item.layer for item in profile.header.items))
    for values, expected_us in ((step.forward_ns, FORWARD_US), (step.backward_ns, BACKWARD_US)):
        times = by_layer(profile.header, values)
        assert [times[layer] for layer in layers] == pytest.approx([1000 * us for us in expected_us], abs=100)
    blocks = [e["dur"] for e in trace["traceEvents"] if "nn.Module: Block_" in e.get("name", "")]
    assert len(blocks) == 3 * LAYERS


def test_import_torch_trace_counts_kernels(trace, tmp_path):
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = [
        event
        for event in events
        if event["name"] == "aten::addmm" or event["name"].endswith("evaluate_function: AddmmBackward0")
    ]
    added = []
    for number, event in enumerate(launches):
        common = {"ph": "X", "pid": event["pid"], "args": {"correlation": number}}
        added.append(
            {**common, "cat": "cuda_runtime", "name": "launch", "tid": event["tid"], "ts": event["ts"], "dur": 0}
        )
        added.append({**common, "cat": "kernel", "name": "gemm", "tid": 7, "ts": event["ts"] + 1e9, "dur": 1000})
    profile = imported("chrome-trace", json.dumps({"traceEvents": events + added}), tmp_path)
    step = profile.steps[0]
    expected = {"embedding": 0, **{f"layers.{at}": 2_000_000 for at in range(LAYERS)}, "head": 1_000_000}
    assert by_layer(profile.header, step.forward_ns) == pytest.approx(expected, abs=2)
    assert by_layer(profile.header, step.backward_ns) == pytest.approx(expected, abs=2)


def test_import_trace_of_other_model_is_refused_by_name(trace, tmp_path):
    fewer = [event for event in trace["traceEvents"] if "Block_3" not in event.get("name", "")]
    with pytest.raises(UsageError, match=r"no module class has 4 instances; it has 3 Block, 1 Embedding"):
        imported("chrome-trace", json.dumps({"traceEvents": fewer}), tmp_path)
    forward = [event for event in trace["traceEvents"] if "evaluate_function" not in event.get("name", "")]
    with pytest.raises(UsageError, match="has no backward steps"):
        imported("chrome-trace", json.dumps({"traceEvents": forward}), tmp_path)
