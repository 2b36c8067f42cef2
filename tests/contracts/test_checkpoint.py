"""Both parsers of the checkpoint manifest and the schema accept and refuse the same documents, and seal alike."""

import json
from pathlib import Path

import jsonschema
import pytest

import dynmo_ckpt.formats.checkpoint as owner
import dynmo_train.formats.checkpoint.document as reader
from dynmo_ckpt._common.errors import DynmoError as OwnerError
from dynmo_train._common.errors import DynmoError as ReaderError
from tests.tables import table

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoint"
SCHEMA = json.loads((Path(owner.__file__).with_name("checkpoint.schema.json")).read_text())
VALID = sorted((FIXTURES / "valid").glob("*.json"))
INVALID = sorted((FIXTURES / "invalid").glob("*.json"))
ACROSS = sorted((FIXTURES / "invalid-across").glob("*.json"))


def load(path):
    return json.loads(path.read_text())


def schema_accepts(document):
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(document)


def test_schema_copies_of_owner_and_reader_are_equal():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert min(len(VALID), len(INVALID), len(ACROSS)) >= 6


@table("path", VALID, ids=lambda path: path.stem)
def test_parsers_and_schema_valid_manifest_is_accepted(path):
    document = load(path)
    assert owner.manifest_problems(document) == []
    assert reader.manifest_problems(document) == []
    assert schema_accepts(document)


@table("path", INVALID, ids=lambda path: path.stem)
def test_parsers_and_schema_invalid_manifest_is_refused(path):
    document = load(path)
    assert owner.manifest_problems(document)
    assert reader.manifest_problems(document)
    assert not schema_accepts(document)


@table("path", ACROSS, ids=lambda path: path.stem)
def test_parsers_broken_rule_across_fields_is_refused(path):
    document = load(path)
    assert owner.manifest_problems(document)
    assert reader.manifest_problems(document)
    assert schema_accepts(document)


@table("path", INVALID + ACROSS, ids=lambda path: path.stem)
def test_parsers_invalid_manifest_has_equal_kinds_of_problems(path):
    document = load(path)
    kinds = [{problem.kind for problem in module.manifest_problems(document)} for module in (owner, reader)]
    assert kinds[0] & kinds[1]


@table("path", VALID, ids=lambda path: path.stem)
def test_seal_same_manifest_gives_equal_bytes_in_both_packages(path):
    document = load(path)
    sealed = owner.seal(document)
    assert reader.seal(document) == sealed
    parsed = owner.parse_manifest(sealed, "x")
    assert parsed == reader.parse_manifest(sealed, "x")
    assert {**parsed, "manifest_crc32": "00000000"} == document


def test_parse_manifest_every_flipped_bit_is_refused():
    sealed = owner.seal(load(FIXTURES / "valid" / "two-stages.json"))
    for at in range(len(sealed)):
        altered = sealed[:at] + bytes([sealed[at] ^ (1 << at % 8)]) + sealed[at + 1 :]
        with pytest.raises(OwnerError):
            owner.parse_manifest(altered, "x")
        with pytest.raises(ReaderError):
            reader.parse_manifest(altered, "x")


@pytest.mark.parametrize("payload", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"manifest_crc32": "00000000"', b"null"])
def test_open_torch_garbage_is_refused(payload):
    for module, error in ((owner, OwnerError), (reader, ReaderError)):
        with pytest.raises(error):
            module.parse_manifest(payload, "x")


def test_parse_manifest_second_checksum_field_is_refused():
    document = {**load(FIXTURES / "valid" / "two-stages.json"), "x_old": {"manifest_crc32": "00000000"}}
    for module, error in ((owner, OwnerError), (reader, ReaderError)):
        with pytest.raises(error, match="once"):
            module.seal(document)


def test_parse_manifest_several_problems_are_all_reported():
    document = load(FIXTURES / "valid" / "two-stages.json")
    document["step"], document["run_id"] = -1, ""
    del document["rng"]
    for module in (owner, reader):
        assert {problem.path for problem in module.manifest_problems(document)} == {"step", "run_id", "rng"}
