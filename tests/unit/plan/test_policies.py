"""Policies and replay: what pays is done, noise is not chased, hindsight is never beaten by much."""

from __future__ import annotations

import pytest

from dynmo_balance.build import BuildOptions, build_costs, build_header, build_lines, header_of
from dynmo_balance.crossfit import cross_fitted_gain, step_bound_ns
from dynmo_balance.decision import WatchOptions
from dynmo_balance.devices import PRESETS
from dynmo_balance.formats._document import append_line
from dynmo_balance.formats.profile import read_profile
from dynmo_balance.modelspec import from_config
from dynmo_balance.policies import Evidence, Memory, Settings, regret
from dynmo_balance.replay import Tape, offline_optimum, run_policy
from dynmo_balance.simulate import predict
from dynmo_balance.trajectories import DEFAULT_STRENGTH, Script, moments

GPT = {"model_type": "gpt2", "n_layer": 12, "n_embd": 512, "n_head": 8, "n_positions": 512, "vocab_size": 8000}
MS = 1_000_000


def evidence(step, gain=2, pause=100, **changes):
    numbers = {
        "step": step,
        "current_step_ns": 100 * MS,
        "proposed_step_ns": (100 - gain) * MS,
        "certain_gain_ns": gain * MS,
        "pause_ns": pause * MS,
        "horizon_steps": 200,
        "moves": 3,
    }
    return Evidence(**{**numbers, **changes})


def test_regret_adds_up_until_it_outweighs_the_pause():
    memory, moved = Memory(), []
    for step in range(0, 100, 10):
        verdict, memory = regret(evidence(step), Settings(margin=0.5), memory)
        if verdict.move:
            moved.append(step)
    # 2 ms a step: 50 ms are missed after 25 steps, which the decision at step 30 is the first to see
    assert moved[0] == 30


def test_regret_ignores_what_is_not_certain():
    memory = Memory()
    for step in range(0, 1000, 10):
        verdict, memory = regret(evidence(step, certain_gain_ns=-1.0), Settings(), memory)
        assert not verdict.move


def test_a_known_horizon_decides_at_once():
    near = evidence(0, horizon_steps=90, next_event_known=True)
    far = evidence(0, horizon_steps=110, next_event_known=True)
    assert not regret(near, Settings(), Memory())[0].move
    assert regret(far, Settings(), Memory())[0].move


def test_cross_fitting_sees_no_gain_in_noise(rng, chain_factory, problem_factory):
    works = [[rng.randint(90, 110) for _ in range(24)] for _ in range(40)]
    chain = chain_factory([100] * 24)
    gain = cross_fitted_gain(problem_factory(chain, 4), (0, 6, 12, 18, 24), works)
    assert gain.lower_ns(2.0) <= 0
    in_sample = [sum(column) for column in zip(*works, strict=True)]
    assert in_sample != [4000] * 24


def test_cross_fitting_sees_a_real_gain(rng, chain_factory, problem_factory):
    works = [[rng.randint(190, 210) if i < 6 else rng.randint(90, 110) for i in range(24)] for _ in range(20)]
    gain = cross_fitted_gain(problem_factory(chain_factory([100] * 24), 4), (0, 6, 12, 18, 24), works)
    assert gain.lower_ns(2.0) > 1000


def test_the_step_bound_is_near_the_simulation(rng, chain_factory, problem_factory):
    for _ in range(50):
        work = [rng.randint(50, 150) * 1000 for _ in range(16)]
        chain = chain_factory(work, backward=[2 * w for w in work])
        problem = problem_factory(chain, 4, microbatches=16)
        exact = predict(problem, (0, 4, 8, 12, 16)).step_ns
        assert 1.0 <= step_bound_ns(problem, chain.work_ns, (0, 4, 8, 12, 16)) / exact < 1.05


@pytest.fixture(scope="module")
def tape_of(tmp_path_factory):
    def make(technique, steps=300, granularity="layer"):
        spec, device = from_config(GPT, "config.json"), PRESETS["h100"]
        options = BuildOptions(workers=4, microbatches=16, micro_batch_size=8, granularity=granularity)
        document = build_header(spec, device, options, technique)
        header = header_of(document)
        script = Script(steps=steps, strength=DEFAULT_STRENGTH[technique], noise=0.03, seed=1)
        path = tmp_path_factory.mktemp("tape") / "profile.jsonl"
        dense = build_costs(spec, header, device, options)
        for line in build_lines(document, header, moments(technique, header, dense, script)):
            append_line(path, line)
        return Tape(read_profile(path)[-1], 20 * MS)

    return make


@pytest.mark.parametrize("technique", ["pruning", "freezing", "early-exit"])
def test_regret_is_near_hindsight_and_better_than_staying(tape_of, technique):
    tape = tape_of(technique)
    best = offline_optimum(tape).total_ns
    options = WatchOptions(policy="regret", every=10, window=20, objective="bottleneck")
    regretting = run_policy(tape, options)
    staying = run_policy(tape, WatchOptions(policy="never", every=10, window=20))
    assert best * 0.999 <= regretting.total_ns <= best * 1.06
    assert regretting.total_ns < staying.total_ns
    assert run_policy(tape, options) == regretting


def test_noise_is_not_chased(tape_of):
    tape = tape_of("static", steps=600, granularity="sublayer")
    outcome = run_policy(tape, WatchOptions(policy="regret", every=10, window=20, objective="bottleneck"))
    restless = run_policy(tape, WatchOptions(policy="always", every=10, window=20, objective="bottleneck"))
    assert outcome.moves <= 2
    assert restless.moves > 5 * outcome.moves
