"""The plan format: every parser and the owner's JSON Schema accept and refuse the same fixtures.

A parser takes the path of a plan and raises ``DocumentError`` (of its own package) where it breaks a rule. To add a
parser, add it to ``PARSERS``. What a writer writes must pass the same schema.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import dynmo_balance.formats.plan as balance_plan
import dynmo_train.formats.plan as train_plan
from dynmo_balance._common.errors import UsageError
from dynmo_train._common.errors import UsageError as TrainUsageError
from tests.tables import table

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "plan"
SCHEMA = json.loads((HERE.parents[1] / "dynmo_balance/formats/plan.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PARSERS = {
    "dynmo_balance": (balance_plan.read_plan, UsageError),
    "dynmo_train": (train_plan.read_plan, TrainUsageError),
}


def fixtures(folder: str) -> list[Path]:
    found = sorted((FIXTURES / folder).glob("*.json"))
    assert found
    return found


def schema_accepts(path: Path) -> bool:
    try:
        document = json.loads(path.read_text())
    except ValueError:
        return False
    return VALIDATOR.is_valid(document)


def name(value) -> str:
    return value.stem if isinstance(value, Path) else str(value)


@table("path", fixtures("valid"), ids=name)
def test_schema_valid_plan_is_accepted(path):
    assert schema_accepts(path)


@table("path", fixtures("invalid"), ids=name)
def test_schema_invalid_plan_is_refused(path):
    assert not schema_accepts(path)


@table("path", fixtures("invalid-across"), ids=name)
def test_schema_broken_rule_across_fields_is_accepted(path):
    assert schema_accepts(path)


@table("path", fixtures("valid"), ids=name)
@table("parser", PARSERS)
def test_parsers_valid_plan_is_accepted(parser, path):
    read, _ = PARSERS[parser]
    assert read(path)


@table("path", fixtures("invalid") + fixtures("invalid-across"), ids=name)
@table("parser", PARSERS)
def test_parsers_invalid_plan_is_refused(parser, path):
    read, error = PARSERS[parser]
    with pytest.raises(error):
        read(path)


@table("path", fixtures("valid"), ids=name)
def test_publish_then_read_gives_the_same_plan(path, tmp_path):
    plan = balance_plan.read_plan(path)
    written = balance_plan.publish(tmp_path, replace(plan))
    assert written == replace(plan, plan_id=0)
    assert schema_accepts(tmp_path / "plan-000000.json")
    assert balance_plan.read_plan(tmp_path / "plan-000000.json") == written


def test_read_plan_without_objective_defaults_to_bottleneck():
    plan = balance_plan.read_plan(FIXTURES / "valid" / "no-objective.json")
    assert plan.optimality.objective == "bottleneck"
