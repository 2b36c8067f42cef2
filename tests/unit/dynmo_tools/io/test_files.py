"""Inputs that are not regular files are refused without blocking; rows have the depth limit of other documents."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dynmo_tools import cli
from dynmo_tools._common.document import MAX_DEPTH
from dynmo_tools._common.errors import UsageError
from dynmo_tools.formats.indexed import read_index
from dynmo_tools.io.codecs import open_read
from dynmo_tools.io.jsonl import BadLineError, parse_line

ROW = json.dumps({"text": "words"}) + "\n"


def nested(levels):
    """A row whose arrays are this deep, its own object included."""
    return b'{"text": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 500, 1000, 1024, 1025, 100_000])
def test_rows_above_the_depth_limit_are_rejected(levels):
    with pytest.raises(BadLineError, match="json"):
        parse_line(nested(levels))


def test_rows_at_the_depth_limit_are_accepted():
    assert parse_line(nested(MAX_DEPTH))
    assert len(parse_line(json.dumps({"text": "[" * 5000, "many": [[]] * 500}).encode())["many"]) == 500


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.mark.parametrize(
    "words",
    [
        ["clean", "FIFO", "-o", "out.jsonl"],
        ["merge", "good.jsonl", "FIFO", "-o", "out.jsonl"],
        ["remove-duplicates", "good.jsonl", "--groups", "FIFO", "-o", "out.jsonl"],
        ["binarize", "good.jsonl", "--tokenizer", "FIFO", "-o", "out"],
        ["decontaminate", "good.jsonl", "--load-dictionary", "FIFO", "-o", "out.jsonl"],
        ["decontaminate", "good.jsonl", "--task", "squad=FIFO", "-o", "out.jsonl"],
        ["group-duplicates", "FIFO", "-o", "out.jsonl"],
        ["blacklist-urls", "FIFO", "-o", "out.txt"],
        ["blacklist-urls", "good.jsonl", "--domains", "FIFO", "-o", "out.txt"],
        ["extract-wiki", "FIFO", "-o", "out.jsonl"],
    ],
    ids=" ".join,
)
@pytest.mark.timeout(60)
def test_commands_refuse_a_fifo_without_blocking(fifo, monkeypatch, capsys, words):
    monkeypatch.chdir(fifo.parent)
    (fifo.parent / "good.jsonl").write_text(ROW)
    monkeypatch.setattr("sys.argv", ["dynmo-prep", *(word.replace("FIFO", "fifo") for word in words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "fifo: is a FIFO; must be a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_dataset_with_a_fifo_is_refused(tmp_path, ending):
    for each in (".idx", ".bin"):
        (tmp_path / f"x{each}").write_bytes(b"0" * 64)
    (tmp_path / f"x{ending}").unlink()
    os.mkfifo(tmp_path / f"x{ending}")
    with pytest.raises(UsageError, match="is a FIFO"):
        read_index(tmp_path / "x")


def test_device_as_input_is_refused():
    with pytest.raises(UsageError, match="is a device"):
        open_read(Path("/dev/zero"))
