"""The trainer's question to ``dynmo-plan``: who compresses between replicas; its answer, its silence, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynmo_train.formats.plan import initial_plan, parse_plan
from dynmo_train.optim.compression.settings import CompressionSettings
from dynmo_train.trainer.rebalance import compression_choice
from dynmo_train.trainer.rebalance.compression_choice import CompressionChoice, question_of

SETTINGS = CompressionSettings(replica_rank=4, replica_warmup_steps=3, choose_workers=True)


class Engine:
    """As much of an engine as the choice needs."""

    def __init__(self):
        self.settings = SimpleNamespace(compression=SETTINGS)
        self.world = SimpleNamespace(is_rank0=True, dims=SimpleNamespace(pipeline=4))
        self.chosen = []

    def choose_replica_workers(self, count):
        self.chosen.append(count)


def answering(tmp_path, monkeypatch, code):
    """A choice whose ``dynmo-plan`` is a program that runs ``code``."""
    program = tmp_path / "plan"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(compression_choice, "program_path", lambda _: str(program))
    monkeypatch.setattr(compression_choice, "broadcast_object", lambda _, document: document)
    engine, events = Engine(), []
    log_event = lambda event, message, **figures: events.append((event, message, figures))  # noqa: E731
    return (
        CompressionChoice(engine, tmp_path, first_costs=2, due=True, device="cpu", log_event=log_event),
        engine,
        events,
    )


def until_chosen(asked, step):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (found := asked.boundary(step)) is not None:
            return found
        time.sleep(0.01)
    raise TimeoutError


ANSWER = {"compression": {"selective_grad_comp_way": 2, "ways_ns": {"1": 3_000_000, "2": 2_500_000}}}


def test_asks_behind_the_warm_up_and_again_after_a_move(tmp_path, monkeypatch):
    asked, engine, events = answering(tmp_path, monkeypatch, f"print({json.dumps(json.dumps(ANSWER))})")
    assert asked.boundary(2) is None
    assert asked._asked is None
    assert asked.boundary(3) is None, "training does not wait"
    assert until_chosen(asked, 4) == 2
    assert events == [
        ("selective_grad_comp", events[0][1], {"step": 4, "workers": 2}),
    ]
    assert "1: 3.00 ms, 2: 2.50 ms" in events[0][1]
    assert asked.boundary(5) is None
    assert asked.boundary(6, moved=True) is None
    assert until_chosen(asked, 7) == 2
    assert engine.chosen == [2, 2]


def test_a_plan_that_says_it_is_not_asked_about(tmp_path, monkeypatch):
    asked, engine, _ = answering(tmp_path, monkeypatch, "import time; time.sleep(60)")
    asked.boundary(3)
    assert asked.boundary(4, moved=True, planned=1) == 1
    assert asked.boundary(5) is None
    assert asked._asked is None
    assert engine.chosen == [1]


@pytest.mark.parametrize(
    ("code", "said"),
    [("import sys; sys.exit('no costs yet')", "no costs yet"), ("import time; time.sleep(60)", "late")],
)
def test_without_an_answer_all_compress(tmp_path, monkeypatch, code, said):
    monkeypatch.setattr(compression_choice, "ANSWER_S", 0.5 if said == "late" else 60)
    asked, engine, events = answering(tmp_path, monkeypatch, code)
    assert until_chosen(asked, 3) == 4
    assert engine.chosen == [4]
    assert said in events[0][1]
    monkeypatch.setattr(compression_choice, "program_path", lambda _: None)
    assert asked.boundary(9, moved=True) == 4


def test_the_planner_understands_the_question(tmp_path):
    """The words go to the real program; what is missing in the empty run is the only thing that it says."""
    everything = replace(SETTINGS, boundary_rank=3, epilogue_only=True, feedback=True, fuse_ties=True)
    command = [sys.executable, "-m", "dynmo_balance", "simulate", str(tmp_path), *question_of(everything, "cpu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "profile.jsonl" in done.stderr
    assert "No such option" not in done.stderr
    assert question_of(SETTINGS, "NVIDIA H100 80GB")[-1] == "h100"


@pytest.mark.parametrize(("value", "way"), [(2, 2), (0, 0), (-1, None), (True, None), ("2", None), (None, None)])
def test_a_plan_may_say_it(value, way):
    plan = initial_plan(run_id="r", stages=[["a"]], workers=[0], schedule="1f1b", virtual_stages_per_worker=1) | {
        "x_selective_grad_comp_way": value
    }
    assert parse_plan(plan, "here").selective_grad_comp_way == way
