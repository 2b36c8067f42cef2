"""Fixtures of the planner's unit tests."""

from __future__ import annotations

import random
import shutil

import pytest

from tests.paths import CONTRACTS
from tests.unit.dynmo_balance.problems import make_chain, make_problem


@pytest.fixture
def run(tmp_path):
    """A run with a header and the initial partition: items 0 to 4 on worker 0, 5 to 9 on worker 1."""
    (tmp_path / "plans").mkdir()
    shutil.copy(CONTRACTS / "plan/valid/initial.json", tmp_path / "plans/plan-000000.json")
    shutil.copy(CONTRACTS / "profile/valid/header-only.jsonl", tmp_path / "profile.jsonl")
    return tmp_path


@pytest.fixture(scope="session")
def chain_factory():
    return make_chain


@pytest.fixture(scope="session")
def problem_factory():
    return make_problem


@pytest.fixture
def rng():
    return random.Random(20260101)
