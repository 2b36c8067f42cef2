"""How ``dynmo-plan simulate`` chooses the compressing ranks: when it runs, its answer, its timeout, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynmo_train.formats.plan import initial_plan, parse_plan
from dynmo_train.optim.compression.settings import CompressionSettings
from dynmo_train.trainer.rebalance import compression_choice
from dynmo_train.trainer.rebalance.compression_choice import CompressionChoice, simulate_arguments
from tests.waiting import wait_for

SETTINGS = CompressionSettings(replica_rank=4, replica_warmup_steps=3, choose_workers=True)
RESULT = {"compression": {"selective_grad_comp_way": 2, "ways_ns": {"1": 3_000_000, "2": 2_500_000}}}


class Engine:
    """The part of an engine that the choice uses."""

    def __init__(self):
        self.settings = SimpleNamespace(compression=SETTINGS)
        self.world = SimpleNamespace(is_rank0=True, dims=SimpleNamespace(pipeline=4))
        self.chosen = []

    def choose_replica_workers(self, count):
        self.chosen.append(count)


def choice_with_program(tmp_path, monkeypatch, code):
    """A choice whose ``dynmo-plan`` is a Python program; the engine, the events, and the number of its starts."""
    program = tmp_path / "plan"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    starts = []
    monkeypatch.setattr(compression_choice, "program_path", lambda name: starts.append(name) or str(program))
    monkeypatch.setattr(compression_choice, "broadcast_object", lambda _, document: document)
    engine, events = Engine(), []
    choice = CompressionChoice(
        engine,
        tmp_path,
        first_costs=2,
        is_due=True,
        device="cpu",
        log_event=lambda kind, message, **detail: events.append((kind, message, detail)),
    )
    return choice, engine, events, starts


def wait_for_choice(choice, step):
    return wait_for(lambda: choice.at_boundary(step), "choice")


def test_choice_is_simulated_after_warm_up_and_after_each_move(tmp_path, monkeypatch):
    printed = f"print({json.dumps(json.dumps(RESULT))})"
    choice, engine, events, starts = choice_with_program(tmp_path, monkeypatch, printed)
    assert choice.at_boundary(2) is None
    assert not starts
    assert choice.at_boundary(3) is None, "training does not wait"
    assert wait_for_choice(choice, 4) == 2
    [(kind, message, detail)] = events
    assert (kind, detail) == ("selective_grad_comp", {"step": 4, "workers": 2})
    assert "1: 3.00 ms, 2: 2.50 ms" in message
    assert choice.at_boundary(5) is None
    assert choice.at_boundary(6, has_moved=True) is None
    assert wait_for_choice(choice, 7) == 2
    assert (engine.chosen, len(starts)) == ([2, 2], 2)


def test_choice_of_a_plan_ends_the_simulation(tmp_path, monkeypatch):
    choice, engine, _, starts = choice_with_program(tmp_path, monkeypatch, "import signal; signal.pause()")
    choice.at_boundary(3)
    assert choice.at_boundary(4, has_moved=True, planned=1) == 1
    assert choice.at_boundary(5) is None
    assert (engine.chosen, len(starts)) == ([1], 1)


@pytest.mark.parametrize(
    ("code", "timeout_s", "reason"),
    [
        ("import sys; sys.exit('no costs')", 60, "(no costs)"),
        ("import signal; signal.pause()", 0.5, "no result within"),
    ],
)
def test_failed_simulation_lets_all_ranks_compress(tmp_path, monkeypatch, code, timeout_s, reason):
    monkeypatch.setattr(compression_choice, "SIMULATION_TIMEOUT_S", timeout_s)
    choice, engine, events, _ = choice_with_program(tmp_path, monkeypatch, code)
    assert wait_for_choice(choice, 3) == 4
    assert engine.chosen == [4]
    assert reason in events[0][1]
    monkeypatch.setattr(compression_choice, "program_path", lambda _: None)
    assert choice.at_boundary(9, has_moved=True) == 4


def test_simulate_arguments_are_options_of_the_planner(tmp_path):
    """The real program parses the arguments and only misses the profile of the empty run."""
    settings = replace(SETTINGS, boundary_rank=3, epilogue_only=True, feedback=True, fuse_ties=True)
    command = [sys.executable, "-m", "dynmo_balance", "simulate", str(tmp_path), *simulate_arguments(settings, "cpu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "profile.jsonl" in done.stderr
    assert "No such option" not in done.stderr
    assert simulate_arguments(SETTINGS, "NVIDIA H100 80GB")[-1] == "h100"


@pytest.mark.parametrize(("value", "number"), [(2, 2), (0, 0), (-1, None), (True, None), ("2", None), (None, None)])
def test_plan_extension_sets_the_number_of_compressing_ranks(value, number):
    plan = initial_plan(run_id="r", stages=[["a"]], stage_workers=[0], schedule="1f1b", virtual_stages_per_worker=1) | {
        "x_selective_grad_comp_way": value
    }
    assert parse_plan(plan, "here").selective_grad_comp_way == number
