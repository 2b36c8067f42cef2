"""Calibration finds the constants that a simulated run was made with; imports put times on the right items."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo_balance.calibrate import Sample, calibrate, samples_of
from dynmo_balance.errors import UsageError
from dynmo_balance.formats._document import complete_lines
from dynmo_balance.formats.profile import parse_profile, read_profile
from dynmo_balance.history import read_plans
from dynmo_balance.importing import SOURCES, import_lines
from dynmo_balance.options import Importable
from dynmo_balance.simulate import predict
from dynmo_balance.source import load

CONTRACTS = Path(__file__).parents[2] / "contracts" / "fixtures"
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


def test_the_overhead_is_found(problem):
    samples = [made_with(problem, b, 700_000, 50_000, 10**9) for b in ((0, 2, 4, 6, 8), (0, 1, 4, 6, 8))]
    found = calibrate(samples, fit_link=False)
    assert found.overhead_ns == pytest.approx(700_000, rel=0.02)
    assert found.error < 0.002


def test_with_the_link_the_error_falls_further(problem):
    samples = [
        made_with(problem, b, 300_000, 2_000_000, 3 * 10**8)
        for b in ((0, 2, 4, 6, 8), (0, 1, 3, 5, 8), (0, 3, 4, 5, 8))
    ]
    alone, linked = calibrate(samples, fit_link=False), calibrate(samples, fit_link=True)
    assert linked.error <= alone.error
    assert linked.error < 0.02


def test_the_link_needs_two_partitions(problem):
    with pytest.raises(UsageError, match="at least two different partitions"):
        calibrate([made_with(problem, (0, 2, 4, 6, 8), 0, 0, 10**9)], fit_link=True)
    with pytest.raises(UsageError, match="nothing to calibrate by"):
        calibrate([], fit_link=False)


def test_stretches_end_where_costs_or_plans_change(tmp_path):
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


def test_a_trace_gives_each_item_its_mean(tmp_path):
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
    with pytest.raises(UsageError, match="holds no list"):
        imported("chrome-trace", "{}", tmp_path)


def test_logs_share_the_stage_among_its_items(tmp_path):
    line = "[Rank 0] time (ms) | fwd_microstep: 5.00 | bwd_microstep: 9.00 | bwd_inner_microstep: 8.0 | step: 1\n"
    steps = imported("deepspeed-log", 2 * line, tmp_path).steps
    assert len(steps) == 2
    assert sum(steps[0].forward_ns) == pytest.approx(2 * 5_000_000, abs=10)  # two stages
    log = "    forward-compute ........: (30.00, 40.00)\n    backward-compute .......: (70.00, 80.00)\n"
    steps = imported("megatron-log", log, tmp_path).steps
    assert sum(steps[0].forward_ns) == pytest.approx(2 * 40_000_000 / 8, abs=10)  # of eight microbatches
    assert sum(steps[0].backward_ns) == pytest.approx(2 * 80_000_000 / 8, abs=10)
    with pytest.raises(UsageError, match="another kind of log"):
        imported("megatron-log", line, tmp_path)
