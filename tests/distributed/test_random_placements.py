"""Placement changes no bit: one canonical layout of each schedule, then random layouts that the commit's hash draws.

``DYNMO_LAYOUT_MINUTES`` is the time for random layouts, ``DYNMO_LAYOUT_SEED`` draws others.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace

import pytest

from tests.distributed.random_placements import (
    CANONICAL,
    FAMILIES,
    FEATURES,
    GRAPHED,
    LABELS,
    Drawn,
    Matrix,
    Run,
    canonical,
    command_line,
    commit,
    counts_of,
    differences,
    draw,
    problems_of,
    reference_of,
    report_of,
    valid_pair,
    write_inputs,
)
from tests.distributed.whole_runs import lines

MINUTES = float(os.environ.get("DYNMO_LAYOUT_MINUTES", "4"))
ALL_MINUTES = float(os.environ.get("DYNMO_LAYOUT_MINUTES", "60"))

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def assert_techniques_act(drawn, run):
    """Equal bits prove nothing of a technique that does nothing."""
    trained = [line for line in lines(run / "metrics.jsonl") if "lm_loss" in line]
    kinds = {event["kind"] for event in lines(run / "events.jsonl")}
    if "early exit" in drawn.features:
        assert any(0 < line["exit_share"] < 1 for line in trained)
    if "mixture of depths" in drawn.features:
        assert all(0 < line["depth_share"] < 1 for line in trained)
    assert ("pruned" in kinds) == any("pruning" in name for name in drawn.features)
    assert ("frozen" in kinds) == any("freezing" in name for name in drawn.features)


@pytest.mark.parametrize("schedule", CANONICAL)
def test_canonical_layout_has_the_same_bits(schedule, inputs, tmp_path):
    drawn = canonical(schedule)
    problems = list(differences(drawn, tmp_path, inputs))
    assert not problems, report_of(drawn, problems, f"--canonical {schedule}")
    assert_techniques_act(drawn, tmp_path / "whole")


def test_graphs_whose_memory_each_microbatch_overwrites_have_the_same_bits(inputs, tmp_path):
    """Without dropout the embedding passes the gradient of its output to its weights as it is."""
    reference = reference_of(FAMILIES["gpt2"])
    options = reference.options | {"schedule": "1f1b", "recompute_granularity": "none", "granularity": "layer"}
    graphed = Run(processes=1, options=options, is_graphed=True)
    drawn = Drawn(number=0, family="gpt2", features=(), reference=reference, placed=(graphed,))
    assert list(differences(drawn, tmp_path, inputs)) == []


def train_drawn(minutes, compiler, folder, inputs, record_property):
    matrix = Matrix(seed=os.environ.get("DYNMO_LAYOUT_SEED") or commit(), compiler=compiler)
    matrix.train_for(60 * minutes, folder, inputs)
    record_property("layouts", matrix.summary())
    sys.stdout.writelines(f"{first} + {second}\n" for first, second in sorted(matrix.pairs))
    assert not matrix.reports, matrix.reports[0]
    assert matrix.num_drawn


@pytest.mark.timeout(60 * MINUTES + 600)
def test_layouts_that_the_commit_draws_have_the_same_bits(inputs, tmp_path, record_property):
    train_drawn(MINUTES, False, tmp_path, inputs, record_property)


@pytest.mark.complete
@pytest.mark.timeout(60 * ALL_MINUTES + 600)
def test_layouts_of_an_hour_have_the_same_bits(inputs, tmp_path, record_property):
    train_drawn(ALL_MINUTES, True, tmp_path, inputs, record_property)


def test_layout_that_differs_is_reported_with_its_commands(inputs, tmp_path):
    drawn = canonical("gpipe")
    run = drawn.placed[0]
    whole = {name: value for name, value in run.options.items() if name != "exit_interval"}
    wrong = replace(drawn, placed=(replace(run, options=whole | {"lr": 1e-3}, changes={}),))
    problems = list(differences(wrong, tmp_path, inputs))
    assert problems[:3] == ["other losses, norms and metrics", "other validation losses", "other tensors"]
    report = report_of(wrong, problems, "--seed 5 --number 3")
    assert "layout 0: other losses, norms and metrics" in report
    assert "python -m tests.distributed.random_placements --seed 5 --number 3" in report
    assert command_line(wrong.reference) in report
    assert "--lr 0.001" in report
    assert set(counts_of(tmp_path).values()) == {0}


def test_drawn_layouts_are_the_same_for_a_seed():
    assert draw("0", 3) == draw("0", 3)
    assert draw("1", 3) != draw("0", 3)
    assert draw("0", 3, leads=("kill", "zb-v")).labels >= {"kill", "zb-v"}
    assert len(commit()) in (1, 12)


def test_command_line_names_what_no_option_has():
    drawn = draw("0", 0, leads=(GRAPHED, "moves"))
    [run] = [run for run in drawn.placed if run.is_graphed and run.changes][:1]
    text = command_line(run)
    assert text.startswith("dynmo-train launch local --nproc ")
    assert "CUDA graphs are emulated" in text
    assert "random moves after steps" in text


def test_pair_of_features_is_valid_or_refused_with_one_reason():
    for first, second in itertools.combinations(FEATURES, 2):
        [one, *_], [two, *_] = FEATURES[first], FEATURES[second]
        if any(one.get(name, value) != value for name, value in two.items()):
            continue
        problems = problems_of(reference_of({**FAMILIES["gpt2"], **one, **two}))
        assert len(problems) <= 1, (first, second, problems)
        assert all(len(problem.message.splitlines()) == 1 for problem in problems)


LAYOUTS = 60  # of four minutes
VALID_PAIRS = 3100


def pairs_of(commits, layouts):
    """Pairs of labels that come up in the layouts of some commits."""
    return {pair for seed in range(commits) for number in range(layouts) for pair in draw(f"c{seed}", number).pairs()}


def test_two_of_three_valid_pairs_come_up_over_two_commits():
    assert len(pairs_of(2, LAYOUTS)) > 0.67 * VALID_PAIRS


@pytest.mark.complete
def test_nearly_all_valid_pairs_come_up_over_twenty_commits():
    """The others are searched for one by one."""
    drawn = pairs_of(20, LAYOUTS)
    labels = sorted(name for name in LABELS if name != "compiled")
    assert {name for pair in drawn for name in pair} == set(labels)
    others = set(itertools.combinations(labels, 2)) - drawn
    missing = [pair for pair in others if valid_pair(pair, 12)]
    assert len(drawn) + len(missing) == pytest.approx(VALID_PAIRS, rel=0.01)
    assert len(drawn) / VALID_PAIRS > 0.985, missing
