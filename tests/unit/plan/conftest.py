"""What the planner's unit tests share: small problems and profiles, made from plain numbers."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from dynmo_balance.costs.cost_window import ItemCosts
from dynmo_balance.formats.profile import Item
from dynmo_balance.partition.problem import Chain, Place, Problem

sys.path.insert(0, str(Path(__file__).parent))

from watched_run import CONTRACTS


@pytest.fixture
def run(tmp_path):
    """A run with a header and the initial partition: items 0 to 4 on worker 0, 5 to 9 on worker 1."""
    (tmp_path / "plans").mkdir()
    shutil.copy(CONTRACTS / "plan/valid/initial.json", tmp_path / "plans/plan-000000.json")
    shutil.copy(CONTRACTS / "profile/valid/header-only.jsonl", tmp_path / "profile.jsonl")
    return tmp_path


def make_item(name: str, size: int = 0, kind: str = "layer", boundary: int = 0) -> Item:
    return Item(
        name=name,
        layer=name,
        kind=kind,
        param_count=size,
        param_bytes=size,
        gradient_bytes=0,
        optimizer_bytes=0,
        boundary_bytes=boundary,
        cut_before=True,
        tied_to=None,
    )


def make_chain(forward, backward=None, weight=None, activation=None, sizes=None, cuts=None, boundary=0) -> Chain:
    n = len(forward)
    sizes = sizes or [0] * n
    costs = ItemCosts(
        forward_ns=tuple(forward),
        backward_input_ns=tuple(backward or [0] * n),
        backward_weight_ns=tuple(weight or [0] * n),
        activation_bytes=tuple(activation or [0] * n),
        split=weight is not None,
        records=1,
        from_step=1,
        to_step=1,
    )
    items = tuple(make_item(f"layers.{i}", size, boundary=boundary) for i, size in enumerate(sizes))
    return Chain(items=items, costs=costs, cuts=tuple(cuts) if cuts else tuple(range(n + 1)))


def make_problem(chain: Chain, stages: int, schedule: str = "1f1b", microbatches: int = 8, **options) -> Problem:
    speeds = options.pop("speeds", None) or [1_000_000] * stages
    memory = options.pop("memory", None) or [None] * stages
    places = tuple(
        Place(worker=p, speed_ppm=speed, memory_bytes=cap)
        for p, (speed, cap) in enumerate(zip(speeds, memory, strict=True))
    )
    return Problem(chain=chain, places=places, schedule=schedule, microbatches=microbatches, **options)


@pytest.fixture(scope="session")
def chain_factory():
    return make_chain


@pytest.fixture(scope="session")
def problem_factory():
    return make_problem


@pytest.fixture
def rng():
    return random.Random(20260101)
