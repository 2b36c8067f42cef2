"""Policies and replay: worthwhile moves are made, noise moves nothing, the offline optimum is close."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from dynmo_balance._common.document import append_line
from dynmo_balance.analysis.replay import RecordedRun, offline_optimum, run_policy
from dynmo_balance.costs.devices import PRESETS
from dynmo_balance.formats.profile import Step, read_profile
from dynmo_balance.inputs.analytic_profile import BuildOptions, build_costs, build_header, build_lines, header_of
from dynmo_balance.inputs.model_config import from_config
from dynmo_balance.inputs.scenarios import DEFAULT_STRENGTH, TrajectorySettings, scenario_steps
from dynmo_balance.online.baseline import MAX_LOSS_PAUSES, MAX_LOSS_SHARE, MAX_LOSS_STEPS
from dynmo_balance.online.decision import WatchOptions
from dynmo_balance.online.policies import PolicyInputs, PolicySettings, PolicyState, regret
from dynmo_balance.online.regret import RegretState, WorkTrace, forecast_work, step_times, update_regret
from dynmo_balance.simulation.simulator import predict
from tests.paths import CONTRACTS

GPT = {"model_type": "gpt2", "n_layer": 12, "n_embd": 512, "n_head": 8, "n_positions": 512, "vocab_size": 8000}
HEADER = CONTRACTS / "profile/valid/header-only.jsonl"
MS = 1_000_000


def inputs(step, gain=2, pause=100, **changes):
    numbers = {
        "step": step,
        "current_step_ns": 100 * MS,
        "proposed_step_ns": (100 - gain) * MS,
        "pause_ns": pause * MS,
        "horizon_steps": 200,
        "moves": 3,
    }
    return PolicyInputs(**{**numbers, **changes})


def test_regret_moves_when_regret_exceeds_the_pause():
    assert not regret(
        inputs(30, regret_ns=49 * MS, regret_steps=30, horizon_steps=100),
        PolicySettings(margin=0.5),
        PolicyState(),
    )[0].move
    decision, _ = regret(
        inputs(30, regret_ns=51 * MS, regret_steps=30, horizon_steps=100),
        PolicySettings(margin=0.5),
        PolicyState(),
    )
    assert decision.move
    assert not regret(inputs(30, regret_ns=51 * MS, moves=0), PolicySettings(margin=0.5), PolicyState())[0].move


def test_regret_known_horizon_decides_immediately():
    soon = inputs(0, regret_ns=2 * MS, regret_steps=1, horizon_steps=90, next_event_known=True)
    far = inputs(0, regret_ns=2 * MS, regret_steps=1, horizon_steps=110, next_event_known=True)
    assert not regret(soon, PolicySettings(), PolicyState())[0].move
    assert regret(far, PolicySettings(), PolicyState())[0].move


def followed(problem, works, current, every=10):
    """The regret of keeping the partition, after all records."""
    trace, regret_state, named = WorkTrace(), RegretState(), current
    for at, work in enumerate(works, start=1):
        trace.add(
            Step(
                step=at,
                plan_id=0,
                step_ns=1,
                forward_ns=tuple(work),
                backward_ns=(0,) * len(work),
                activation_bytes=(),
                busy_ns=(),
                peak_memory_bytes=(),
            )
        )
        if at % every == 0:
            works_so_far = trace.works(lambda plan: [1_000_000] * len(works[0]))
            regret_state, named = update_regret(regret_state, problem, current, trace, works_so_far, 10**6)
    return regret_state, named


def test_update_regret_noise_gives_none(rng, chain_factory, problem_factory):
    works = [[rng.randint(9000, 11000) for _ in range(24)] for _ in range(300)]
    even = (0, 6, 12, 18, 24)
    regret_state, _ = followed(problem_factory(chain_factory([100] * 24), 4), works, even)
    assert regret_state.confident_ns <= 0


def test_update_regret_real_gain_and_trend_are_found(rng, chain_factory, problem_factory):
    problem = problem_factory(chain_factory([100] * 24), 4)
    works = [[rng.randint(19000, 21000) if i < 6 else rng.randint(9000, 11000) for i in range(24)] for _ in range(60)]
    regret_state, named = followed(problem, works, (0, 6, 12, 18, 24))
    assert regret_state.confident_ns > 40 * 1000
    assert named[1] < 6
    rising = np.array([[1000.0 + 10 * at if item == 0 else 1000.0 for item in range(3)] for at in range(40)])
    assert forecast_work(rising, 20) == [1000 + 10 * 59, 1000, 1000]
    assert forecast_work(rising, 0)[0] < 1200


def test_work_trace_gaps_have_the_last_known_value():
    trace = WorkTrace()
    for work in ((5, None), (None, 7)):
        trace.add(
            Step(
                step=1,
                plan_id=0,
                step_ns=1,
                forward_ns=work,
                backward_ns=(1, 1),
                activation_bytes=(),
                busy_ns=(),
                peak_memory_bytes=(),
            )
        )
    assert trace.works(lambda plan: [1_000_000, 500_000]).tolist() == [[6, 0], [6, 4]]


def test_step_times_are_close_to_the_simulation(rng, chain_factory, problem_factory):
    for _ in range(50):
        work = [rng.randint(50, 150) * 1000 for _ in range(16)]
        chain = chain_factory(work, backward=[2 * w for w in work])
        problem = problem_factory(chain, 4, microbatches=16)
        exact = predict(problem, (0, 4, 8, 12, 16)).step_ns
        bound = step_times(problem, np.array([chain.work_ns], dtype=float), (0, 4, 8, 12, 16))[0]
        assert 1.0 <= bound / exact < 1.05


@pytest.fixture(scope="module")
def tape_of(tmp_path_factory):
    def make(technique, steps=300, granularity="layer"):
        spec, device = from_config(GPT, "config.json"), PRESETS["h100"]
        options = BuildOptions(workers=4, microbatches=16, micro_batch_size=8, granularity=granularity)
        document = build_header(spec, device, options, technique)
        header = header_of(document)
        trajectory = TrajectorySettings(steps=steps, strength=DEFAULT_STRENGTH[technique], noise=0.03, seed=1)
        path = tmp_path_factory.mktemp("tape") / "profile.jsonl"
        dense = build_costs(spec, header, device, options)
        for line in build_lines(document, header, scenario_steps(technique, header, dense, trajectory)):
            append_line(path, line)
        return RecordedRun(read_profile(path)[-1], 20 * MS)

    return make


@pytest.mark.parametrize("technique", ["pruning", "freezing", "early-exit"])
def test_regret_is_close_to_offline_optimum(tape_of, technique):
    recorded = tape_of(technique)
    best = offline_optimum(recorded).total_ns
    options = WatchOptions(policy="regret", every=10, window=20, objective="bottleneck")
    regretting = run_policy(recorded, options)
    staying = run_policy(recorded, WatchOptions(policy="never", every=10, window=20))
    assert best * 0.999 <= regretting.total_ns <= best * 1.06
    assert regretting.total_ns < staying.total_ns
    assert run_policy(recorded, options) == regretting


def test_regret_static_costs_do_not_move(tape_of):
    recorded = tape_of("static", steps=600, granularity="sublayer")
    outcome = run_policy(recorded, WatchOptions(policy="regret", every=10, window=20, objective="bottleneck"))
    restless = run_policy(recorded, WatchOptions(policy="always", every=10, window=20, objective="bottleneck"))
    assert outcome.moves <= 2
    assert restless.moves > 5 * outcome.moves


def oscillating(path, period, *, steps=600, items=16, speeds=(1.0,) * 4, is_square=False):
    """A profile whose load swings between both ends of the model; measured on the uniform partition."""
    rng = random.Random(1)
    header = json.loads(HEADER.read_text().splitlines()[0])
    sizes = {"param_count": 10**7, "param_bytes": 4 * 10**7, "gradient_bytes": 0, "optimizer_bytes": 8 * 10**7}
    one = {**header["items"][1], **sizes, "cut_before": True, "tied_to": None}
    header["items"] = [{**one, "name": f"layers.{i}.x", "layer": f"layers.{i}"} for i in range(items)]
    worker = header["workers"][0]
    header["workers"] = [{**worker, "worker": p, "ranks": [p], "relative_speed": s} for p, s in enumerate(speeds)]
    header["microbatches"] = 16
    append_line(path, header)
    for number in range(1, steps + 1):
        swing = 0.6 * math.sin(2 * math.pi * number / period)
        at = [math.cos(math.pi * i / (items - 1)) for i in range(items)]
        if is_square:
            swing, at = math.copysign(0.6, swing), [math.copysign(1, each) for each in at]
        works = [2e6 * (1 + swing * each) * rng.gauss(1, 0.02) for each in at]
        forward = [int(work / speeds[i * len(speeds) // items]) for i, work in enumerate(works)]
        record = {"record": "step", "step": number, "plan_id": 0, "step_ns": 1, "forward_ns": forward}
        record |= {"backward_ns": [2 * ns for ns in forward], "activation_bytes": [0] * items}
        append_line(path, {**record, "busy_ns": [1] * len(speeds), "peak_memory_bytes": [1] * len(speeds)})
    return read_profile(path)[-1]


@pytest.mark.parametrize(("period", "of_staying", "of_optimum"), [(100, 1.05, 1.2), (400, 0.95, 1.07)])
def test_threshold_oscillating_costs_is_close_to_best(tmp_path, period, of_staying, of_optimum):
    recorded = RecordedRun(oscillating(tmp_path / "profile.jsonl", period), 300 * MS)
    outcome, staying = (
        run_policy(recorded, WatchOptions(policy=policy, every=10, window=20, objective="bottleneck"))
        for policy in (WatchOptions().policy, "never")
    )
    assert outcome.total_ns <= of_staying * staying.total_ns
    assert outcome.total_ns <= of_optimum * offline_optimum(recorded).total_ns


@pytest.mark.parametrize(("policy", "period"), [("threshold", 20), ("regret", 60), ("regret", 200)])
def test_costs_that_swing_cost_no_more_than_the_budget(tmp_path, policy, period):
    pause, every = 300 * MS, 10
    recorded = RecordedRun(oscillating(tmp_path / "profile.jsonl", period, steps=400, is_square=True), pause)
    options = WatchOptions(policy=policy, every=every, window=20, objective="bottleneck")
    moving, staying = run_policy(recorded, options), run_policy(recorded, replace(options, policy="never"))
    first = recorded.initial().boundaries
    # Between two decisions, the active partition may be the worst one.
    interval = (MAX_LOSS_STEPS + every) * max(3 * recorded.step_ns(at, first) for at in range(len(recorded.works)))
    assert moving.moves > 0
    assert moving.total_ns <= (1 + MAX_LOSS_SHARE) * staying.total_ns + (MAX_LOSS_PAUSES + 1) * pause + interval
    assert moving.total_ns <= 1.06 * staying.total_ns


def test_offline_optimum_is_the_best_of_all_sequences(tmp_path):
    recorded = RecordedRun(oscillating(tmp_path / "profile.jsonl", 4, steps=4, items=5, speeds=(1.0, 0.6)), 2 * MS)
    best, cuts = offline_optimum(recorded), [(0, at, 5) for at in range(1, 5)]
    assert best.policy == "offline optimum"
    assert best.total_ns == min(
        sum(recorded.step_ns(number, chosen) for number, chosen in enumerate(sequence))
        + sum(recorded.pause_ns(before, after) for before, after in itertools.pairwise(((0, 2, 5), *sequence)))
        for sequence in itertools.product(cuts, repeat=4)
    )
    assert best.moves > 0


@pytest.mark.parametrize("policy", ["threshold", "regret"])
def test_replay_slow_worker_moves_once_or_twice(tmp_path, policy):
    segment = oscillating(tmp_path / "profile.jsonl", 10**9, steps=200, speeds=(1.0, 1.0, 0.5, 1.0))
    uniform = {0: {f"layers.{i}.x": i // 4 for i in range(16)}}
    recorded = RecordedRun(segment, 300 * MS, uniform)
    outcome = run_policy(recorded, WatchOptions(policy=policy, every=10, window=20, objective="bottleneck"))
    assert outcome.moves <= 2
    assert outcome.total_ns <= 1.1 * offline_optimum(recorded).total_ns
