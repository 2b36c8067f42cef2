"""The profile format: every parser and the owner's JSON Schema accept and refuse the same fixtures.

A parser takes the path of a profile and raises ``DocumentError`` (of its own package) where it breaks a rule. To add a
parser, add it to ``PARSERS``.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import dynmo_balance.formats.profile as balance_profile
from dynmo_balance._common.errors import UsageError
from tests.tables import table

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "profile"
SCHEMA = json.loads((HERE.parents[1] / "dynmo_train/formats/profile.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PARSERS = {"dynmo_balance": (balance_profile.read_profile, UsageError)}


def fixtures(folder: str) -> list[Path]:
    found = sorted((FIXTURES / folder).glob("*.jsonl"))
    assert found
    return found


def schema_accepts(path: Path) -> bool:
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return all(VALIDATOR.is_valid(json.loads(line)) for line in lines)


def name(value) -> str:
    return value.stem if isinstance(value, Path) else str(value)


@table("path", fixtures("valid"), ids=name)
def test_schema_valid_profile_is_accepted(path):
    assert schema_accepts(path)


@table("path", fixtures("invalid"), ids=name)
def test_schema_invalid_profile_is_refused(path):
    assert not schema_accepts(path)


@table("path", fixtures("invalid-across"), ids=name)
def test_schema_broken_rule_across_lines_is_accepted(path):
    assert schema_accepts(path)


@table("path", fixtures("valid"), ids=name)
@table("parser", PARSERS)
def test_parser_valid_profile_is_accepted(parser, path):
    read, _ = PARSERS[parser]
    assert read(path)


@table("path", fixtures("invalid") + fixtures("invalid-across"), ids=name)
@table("parser", PARSERS)
def test_parser_invalid_profile_is_refused(parser, path):
    read, error = PARSERS[parser]
    with pytest.raises(error) as caught:
        read(path)
    assert all(problem.path and problem.kind and problem.message for problem in caught.value.problems)
