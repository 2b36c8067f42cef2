"""The indexed dataset: every parser reads the same fixtures, and refuses the same.

``fixtures/indexed/fixtures.json`` states the contents of each valid file (sequences of tokens, document boundaries) and
which kinds of problem each invalid one has. A parser is a function from a prefix to the list of its sequences, each a
list of integers, that raises a ``UsageError`` of its package for a file that breaks the format.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from dynmo_tools._common.errors import UsageError as ToolsUsageError
from dynmo_tools.formats import indexed
from dynmo_train._common.errors import UsageError as TrainUsageError
from dynmo_train.formats.indexed import open_indexed
from tests.tables import table

HERE = Path(__file__).parent / "fixtures" / "indexed"
LISTING = json.loads((HERE / "fixtures.json").read_text(encoding="utf-8"))
SCHEMA = json.loads((Path(indexed.__file__).parent / "indexed.schema.json").read_text(encoding="utf-8"))


def parse_with_tools(prefix):
    reader = indexed.IndexedReader(prefix)
    return [reader[sequence].tolist() for sequence in range(len(reader))]


def parse_with_train(prefix: Path) -> list[list[int]]:
    source = open_indexed(str(prefix))
    spans = zip(source.starts, source.lengths, strict=True)
    return [source.tokens[start : start + length].tolist() for start, length in spans]


PARSERS = [
    pytest.param(parse_with_tools, ToolsUsageError, id="dynmo_tools"),
    pytest.param(parse_with_train, TrainUsageError, id="dynmo_train"),
]


def test_fixture_list_has_every_fixture():
    for kind in ("valid", "invalid"):
        assert sorted(LISTING[kind]) == sorted(path.stem for path in (HERE / kind).glob("*.idx"))


@table("parse", [parser.values[0] for parser in PARSERS])
@table("name", sorted(LISTING["valid"]))
def test_readers_valid_index_is_read(parse, name):
    assert parse(HERE / "valid" / name) == LISTING["valid"][name]["sequences"]


@table(("parse", "refusal"), PARSERS)
@table("name", sorted(LISTING["invalid"]))
def test_readers_invalid_index_is_refused(parse, refusal, name):
    with pytest.raises(refusal):
        parse(HERE / "invalid" / name)


@table("name", sorted(LISTING["valid"]))
def test_owner_valid_index_has_document_boundaries(name):
    assert indexed.read_index(HERE / "valid" / name).documents.tolist() == LISTING["valid"][name]["documents"]


@table("name", sorted(set(LISTING["invalid"]) - {"no-bin"}))
def test_owner_invalid_index_has_every_problem_reported(name):
    with pytest.raises(indexed.IndexedError) as caught:
        indexed.read_index(HERE / "invalid" / name)
    assert {problem.kind for problem in caught.value.problems} == set(LISTING["invalid"][name])


@table("name", sorted(LISTING["valid"]))
def test_schema_json_view_of_an_index_is_accepted(name):
    jsonschema.validate(indexed.describe(HERE / "valid" / name), SCHEMA)


@pytest.mark.parametrize(
    "change",
    [{"form": "flat"}, {"tokens": -1}, {"documents": 1.5}, {"more": 1}, {"dtype": "float32"}, {"multimodal": None}],
    ids=str,
)
def test_schema_invalid_view_is_refused(change):
    view = {**indexed.describe(HERE / "valid" / "mmap-u16"), **change}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(view, SCHEMA)


@table("name", sorted(LISTING["valid"]))
def test_write_index_of_a_read_index_is_byte_identical(name):
    prefix = HERE / "valid" / name
    assert b"".join(indexed.encode_index(indexed.read_index(prefix))) == indexed.idx_path(prefix).read_bytes()
