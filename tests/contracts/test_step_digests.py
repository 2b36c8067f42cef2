"""The digests of a step: reader and JSON Schema accept and refuse the same fixtures."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from dynmo_train._common.document import DocumentError
from dynmo_train.formats.step_digests import read_step_digests, write_step_digests
from tests.tables import table

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "step_digests"
SCHEMA = json.loads((HERE.parents[1] / "dynmo_train/formats/step_digests.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def fixtures(folder: str) -> list[Path]:
    found = sorted((FIXTURES / folder).glob("*.jsonl"))
    assert found
    return found


def schema_accepts(path: Path) -> bool:
    return all(VALIDATOR.is_valid(json.loads(line)) for line in path.read_text().splitlines())


@pytest.mark.parametrize("path", fixtures("valid"), ids=lambda path: path.stem)
def test_schema_and_reader_valid_digests_are_accepted(path):
    assert schema_accepts(path)
    assert read_step_digests(path).tensors


@table("path", fixtures("invalid"), ids=lambda path: path.stem)
def test_schema_invalid_digests_are_refused(path):
    assert not schema_accepts(path)


@table("path", fixtures("invalid-across"), ids=lambda path: path.stem)
def test_schema_broken_rule_across_lines_is_accepted(path):
    assert schema_accepts(path)


@table("path", fixtures("invalid") + fixtures("invalid-across"), ids=lambda path: path.stem)
def test_reader_invalid_digests_are_refused(path):
    with pytest.raises(DocumentError) as caught:
        read_step_digests(path)
    assert all(problem.path and problem.kind and problem.message for problem in caught.value.problems)


def test_written_digests_are_read_back(tmp_path):
    digests = read_step_digests(FIXTURES / "valid" / "step.jsonl")
    write_step_digests(tmp_path / "copy.jsonl", digests)
    assert read_step_digests(tmp_path / "copy.jsonl") == digests
    assert schema_accepts(tmp_path / "copy.jsonl")
