"""``dynmo-train cache`` lists and removes converted checkpoints, and no other files."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dynmo_train._common.errors import UsageError
from dynmo_train.cli import app

NAMES = [f"{name}-{digit * 16}" for name, digit in (("gpt2", "a"), ("my-bert", "0"))]


@pytest.fixture
def folder(tmp_path):
    """Two converted checkpoints and other files."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
        (tmp_path / name / "conversion.json").write_text(json.dumps({"source": f"/models/{name}"}))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    (tmp_path / f"link-{'b' * 16}").symlink_to(tmp_path / "run")
    return tmp_path


def call(*words):
    done = CliRunner().invoke(app, ["cache", *map(str, words)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_cache_list_shows_name_size_and_source(folder):
    text = call("list", "--cache-dir", folder)
    assert all(name in text for name in NAMES)
    assert "2 converted checkpoints" in text
    rows = json.loads(call("list", "--cache-dir", folder, "--format", "json"))["conversions"]
    assert [(row["name"], row["source"]) for row in rows] == [(name, f"/models/{name}") for name in NAMES]
    assert all(row["bytes"] > 0 for row in rows)


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"[]"])
def test_cache_entry_without_source_is_listed_and_cleared(folder, content):
    (folder / NAMES[0] / "conversion.json").unlink()
    if content is not None:
        (folder / NAMES[0] / "conversion.json").write_bytes(content)
    rows = json.loads(call("list", "--cache-dir", folder, "--format", "json"))["conversions"]
    assert [(row["name"], row["source"]) for row in rows] == [(NAMES[0], ""), (NAMES[1], f"/models/{NAMES[1]}")]
    assert "removed 1 converted checkpoint" in call("clear", NAMES[0], "--cache-dir", folder)


def test_cache_clear_keeps_other_files(folder):
    assert "removed 1 converted checkpoint" in call("clear", NAMES[0], "--cache-dir", folder)
    assert not (folder / NAMES[0]).exists()
    assert (folder / NAMES[1]).exists()
    assert "removed 1 converted checkpoint" in call("clear", "--cache-dir", folder)
    assert sorted(path.name for path in folder.iterdir()) == [f"link-{'b' * 16}", "notes.txt", "run"]
    assert (folder / "run" / "manifest.json").exists()


def test_cache_clear_unknown_name_removes_nothing(folder):
    with pytest.raises(UsageError, match="run: not in"):
        call("clear", NAMES[0], "run", "--cache-dir", folder)
    assert (folder / NAMES[0]).exists()


def test_cache_missing_folder_is_empty(tmp_path):
    assert "0 converted checkpoints" in call("list", "--cache-dir", tmp_path / "none")
    assert "removed 0 converted checkpoints" in call("clear", "--cache-dir", tmp_path / "none")
