"""What a replay of a run with lossy compression needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo_train.trainer.replay import stored_run
from dynmo_train.trainer.replay.stored_run import LossyPlacement, PlacementChange, StoredRun

STAGES = (("embedding", "layers.0"), ("layers.1", "head"))
PLACEMENT = LossyPlacement(stages=STAGES, ranks=2, schedule="1f1b")
CHECKPOINT = Path("run/checkpoints/step-00000004")


@pytest.fixture(autouse=True)
def _manifest(monkeypatch):
    topology = {"partition": json.loads(json.dumps(STAGES)), "pipeline_parallel_size": 2, "schedule": "1f1b"}
    monkeypatch.setattr(stored_run, "load_manifest", lambda _: {"topology": topology})


def run_with(*changes: PlacementChange, compresses: bool = True) -> StoredRun:
    config = {"compression": {"inter_grad_comp": compresses, "grad_comp": False}}
    return StoredRun(path=Path("run"), document={"config": config}, steps={}, changes=changes)


def test_lossy_problem_same_placement_has_none():
    assert run_with().lossy_problem(CHECKPOINT, 7, PLACEMENT) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": 1}, "1 pipeline rank, 1f1b, 2+2 items"),
        ({"schedule": "gpipe"}, "2 pipeline ranks, gpipe, 2+2 items"),
        ({"stages": (STAGES[0][:1], STAGES[0][1:] + STAGES[1])}, "2 pipeline ranks, 1f1b, 1+3 items"),
    ],
)
def test_lossy_problem_other_placement_is_named(change, text):
    problem = run_with().lossy_problem(CHECKPOINT, 7, replace(PLACEMENT, **change))
    assert f"2 pipeline ranks, 1f1b, 2+2 items, not {text};" in problem
    assert run_with(compresses=False).lossy_problem(CHECKPOINT, 7, replace(PLACEMENT, **change)) is None


@pytest.mark.parametrize(("step", "is_problem"), [(3, False), (4, True), (6, True), (7, False)])
def test_lossy_problem_plan_between_checkpoint_and_step_is_named(step, is_problem):
    problem = run_with(PlacementChange(step=step, kind="plan_applied")).lossy_problem(CHECKPOINT, 7, PLACEMENT)
    assert (problem is not None) is is_problem
    if is_problem:
        assert f"a plan was applied after step {step}" in problem
