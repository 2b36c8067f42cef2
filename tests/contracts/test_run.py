"""The format of ``run.json``: what the trainer writes is valid; its reader and the schema refuse the same faults."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of
from dynmo_train.formats.run import read_run
from dynmo_train.trainer.run_directory import open_run_directory
from tests.tables import table

SCHEMA = json.loads((Path(__file__).parents[2] / "dynmo_train/formats/run.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
OPTIONS = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 4,
    "vocab_size": 10,
    "micro_batch_size": 1,
    "train_iters": 3,
    "lr": 0.1,
    "data_path": "corpus",
}


@pytest.fixture
def written(tmp_path):
    run = open_run_directory(config_of(**OPTIONS, run_dir=str(tmp_path / "r")), world_size=2, hosts=["a"], engine={})
    return run.run_json


def changed(path, place, value):
    """The document with ``value`` at ``place``; a value of ``...`` takes the key out."""
    document = copy.deepcopy(json.loads(path.read_text()))
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    path.write_text(json.dumps(document))
    return document


def test_write_run_writes_a_valid_document(written):
    document = read_run(written)
    assert VALIDATOR.is_valid(document)
    assert document["config"]["model"]["num_layers"] == 2


def test_schema_x_keys_are_accepted(written):
    assert VALIDATOR.is_valid(changed(written, ["x_note"], [1]))
    assert read_run(written)["x_note"] == [1]


@table(
    ("place", "value"),
    [
        *(([name], ...) for name in SCHEMA["required"]),
        (["format"], "dynmo.plan"),
        (["version"], 2),
        (["run_id"], ""),
        (["segment"], -1),
        (["segment"], True),
        (["world_size"], 0),
        (["hosts"], []),
        (["hosts"], "a"),
        (["command_line"], [1]),
        (["versions", "torch"], 2.13),
        (["engine"], []),
        (["config", "model"], 1),
        (["config_sources", "model", "num_layers"], "somewhere"),
        (["note"], "free"),
    ],
)
def test_schema_and_reader_invalid_run_is_refused(written, tmp_path, place, value):
    path = tmp_path / "run.json"
    path.write_bytes(written.read_bytes())
    assert not VALIDATOR.is_valid(changed(path, place, value))
    with pytest.raises(UsageError, match=r"run\.json"):
        read_run(path)


@pytest.mark.parametrize("place", [["config", "model", "num_layers"], ["config_sources", "model", "num_layers"]])
def test_parse_run_config_without_source_is_refused(written, place):
    assert VALIDATOR.is_valid(changed(written, place, ...))
    with pytest.raises(UsageError, match=r"config\.model\.num_layers"):
        read_run(written)
