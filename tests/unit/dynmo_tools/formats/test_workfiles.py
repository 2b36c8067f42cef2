"""The documents in a work folder: checked before they are written, and where they are read again."""

from __future__ import annotations

import json
import sys

import pytest

from dynmo_tools import cli
from dynmo_tools._common.document import DocumentError, WriterError
from dynmo_tools._common.errors import UsageError
from dynmo_tools.config.settings import FindDuplicatesSettings
from dynmo_tools.dedup.fingerprints import load_part
from dynmo_tools.formats.workfiles import FINGERPRINTS, MANIFEST, PIPELINE, SUMMARY, TASK
from dynmo_tools.runner.task_manifest import load_manifest

HEADER = {"scheme": "affine32", "num_seeds": 100, "seed": 1, "shingle_characters": 5, "documents": 3}
TASKS = {
    "step": "clean",
    "digest": "x",
    "output": "out",
    "settings": {},
    "limits": {},
    "sources": [{"path": "a", "size_bytes": 1, "mtime_ns": 1}],
    "tasks": [{"path": "a", "begin": 0, "end": None}],
}


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (FINGERPRINTS, HEADER | {"documents": -1}, "documents: must be at least 0"),
        (FINGERPRINTS, HEADER | {"more": 1}, "more: is not a field"),
        (MANIFEST, TASKS | {"step": ""}, "step: must not be empty"),
        (MANIFEST, TASKS | {"tasks": [{"path": "a", "begin": 0}]}, r"tasks\[0\].end: is missing"),
        (SUMMARY, {"step": "clean"}, "documents_in: is missing"),
        (TASK, {"task": "clean-00000", "outputs": {"a": -1}}, "outputs.a: must be at least 0"),
        (TASK, {"task": "clean-00000"}, "tally: is missing"),
        (PIPELINE, {"recipe": "x", "steps": []}, "documents_in: is missing"),
    ],
)
def test_document_that_violates_its_format_is_not_written(tmp_path, kind, fields, words):
    with pytest.raises(WriterError, match=words):
        kind.write(tmp_path / "x.json", fields)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"format": "dynmo.prep-manifest"}',
        '{"format": "dynmo.prep-manifest", "version": "1"}',
        "[" * 2000,
        "nonsense",
    ],
)
def test_task_manifest_with_invalid_changes_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DocumentError):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", '{"format": "dynmo.fingerprints"}', '{"format": "dynmo.fingerprints", "version": 2}']
)
def test_saved_fingerprints_with_a_damaged_header_are_refused(tmp_path, text):
    (tmp_path / "header.json").write_text(text)
    with pytest.raises(UsageError, match="name a folder written by --save-fingerprints"):
        load_part(tmp_path, FindDuplicatesSettings())


def test_run_writes_documents_of_these_formats(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")
    monkeypatch.chdir(tmp_path)
    words = ["find-duplicates", "in.jsonl", "-o", "out", "--save-fingerprints", "kept"]
    monkeypatch.setattr(sys, "argv", ["dynmo-prep", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert MANIFEST.read(tmp_path / "out.work" / "manifest.json")["step"] == "find-duplicates"
    assert SUMMARY.read(tmp_path / "out.work" / "summary.json")["documents_in"] == 1
    assert FINGERPRINTS.read(tmp_path / "kept" / "header.json")["documents"] == 1
    markers = [TASK.read(path) for path in (tmp_path / "out.work" / "done").iterdir()]
    assert {marker["digest"] for marker in markers} == {
        MANIFEST.read(tmp_path / "out.work" / "manifest.json")["digest"]
    }


def test_task_with_a_damaged_marker_runs_again(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dynmo-prep", "merge", "in.jsonl", "-o", "out.jsonl"])
    with pytest.raises(SystemExit):
        cli.main()
    written = (tmp_path / "out.jsonl").read_bytes()
    marker = next((tmp_path / "out.jsonl.work" / "done").glob("join-*.json"))
    for damage in (b"[]", marker.read_bytes().replace(b'"tally"', b'"tolly"')):
        marker.write_bytes(damage)
        (tmp_path / "out.jsonl.work" / "summary.json").unlink()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert (tmp_path / "out.jsonl").read_bytes() == written
        assert TASK.read(marker)["tally"]["documents_in"] == 0


def test_documents_of_more_than_64_mib_are_written_and_read(tmp_path):
    made = MANIFEST.write(tmp_path / "manifest.json", {**TASKS, "settings": {"long": "x" * (65 << 20)}})
    assert MANIFEST.read(tmp_path / "manifest.json") == made
