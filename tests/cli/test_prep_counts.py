"""dynmo-prep: what is counted and reported, and where a recipe's inputs are looked for."""

from __future__ import annotations

import gzip
import json
import os

import pytest

TEXT = "The river runs past the old mill and the water turns its wheel all day and all night. "


@pytest.fixture
def prep(prep, monkeypatch, tmp_path):
    """Run the command in this process and in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return prep


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("step", "flags"),
    [
        ("clean", ("--json-key", "content")),
        ("fix", ("--json-key", "content", "--task", "remove_512")),
        ("split-sentences", ("--json-key", "content")),
        ("train-tokenizer", ("--json-key", "content")),
        ("dedup", ("--json-key", "content")),
        ("decontaminate", ("--json-key", "content", "--task", "lambada=in.jsonl")),
        ("binarize", ("--json-key", "content", "--tokenizer-type", "WhitespaceVocab", "--vocab-file", "vocab.json")),
    ],
)
def test_wrong_json_key_error_names_the_existing_keys(prep, tmp_path, step, flags):
    write(tmp_path / "in.jsonl", [{"url": "u", "text": "The text.", "title": "t"}] * 3)
    (tmp_path / "vocab.json").write_text('{"<unk>": 2, "the": 0, "<|endoftext|>": 1}')
    flags = ["--tasks" if flag == "--task" and step == "fix" else flag for flag in flags]
    code, _, err = prep(step, "in.jsonl", "-o", "out.json", *flags)
    assert code == 4
    assert "3 of 3 lines are invalid documents" in err
    assert "3 lack --json-key content; the first of them has the keys url, text, title" in err


def test_task_without_the_key_error_names_the_existing_keys(prep, tmp_path):
    write(tmp_path / "in.jsonl", [{"text": "The text."}])
    write(tmp_path / "task.jsonl", [{"ask": "What?", "answer": "That."}])
    code, _, err = prep("decontaminate", "in.jsonl", "-o", "out.jsonl", "--task", "squad=task.jsonl")
    assert (code, "its keys are ask, answer" in err) == (2, True)


def test_decontaminate_counts_documents_and_pieces_separately(prep, tmp_path):
    question = "Which very particular sentence of thirteen words or more is this one here today?"
    long = TEXT * 8 + question + " " + TEXT * 8
    write(tmp_path / "in.jsonl", [{"text": long}, {"text": TEXT}, {"text": question}])
    write(tmp_path / "task.jsonl", [{"question": question}])
    code, out, _ = prep(
        "decontaminate", "in.jsonl", "-o", "out.jsonl", "--task", "squad=task.jsonl", "--format", "json"
    )
    report = json.loads(out)
    assert (code, report["documents_in"], report["documents_out"]) == (0, 3, 2)
    assert (report["dropped"], report["facts"]["pieces"]) == ({"contaminated": 1}, 3)
    written = (tmp_path / "out.jsonl").read_bytes()
    assert (written.count(b"\n"), report["bytes_out"]) == (3, len(written))


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("last", [b"", b"\n"], ids=["cut", "whole"])
def test_bytes_in_counts_all_lines(prep, tmp_path, ending, last):
    lines = [
        b"\xef\xbb\xbf" + b'{"text": "marked"}', b'{"text": "good"}', b"bad", b"", b"  ",
        b'{"text": "' + b"x" * 500 + b'"}', b'{"other": 1}', b'{"text": "\xff"}', b'{"text": "end"}',
    ]  # fmt: skip
    payload = b"\n".join(lines) + last
    source = tmp_path / f"in.jsonl{ending}"
    source.write_bytes(gzip.compress(payload) if ending else payload)
    arguments = ("--max-line-bytes", 100, "--max-rejects", 1, "--format", "json", "--language", "", "--min-tokens", 0)
    code, out, _ = prep("clean", source, "-o", "out.jsonl", *arguments)
    report = json.loads(out)
    assert (code, report["bytes_in"], report["documents_in"]) == (3, len(payload), 7)
    assert report["rejected"] == {"json": 1, "key": 1, "long": 1, "utf8": 1}


def test_saved_fingerprints_and_dictionaries_have_no_date(prep, tmp_path):
    write(tmp_path / "in.jsonl", [{"text": f"{TEXT} {n}", "url": f"u{n}"} for n in range(3)])
    assert prep("dedup", "in.jsonl", "-o", "out", "--save-fingerprints", "prints")[0] == 0
    flags = ("--task", "lambada=in.jsonl", "--save-dictionary", "dictionary")
    assert prep("decontaminate", "in.jsonl", "-o", "cut", *flags)[0] == 0
    header = json.loads((tmp_path / "prints" / "header.json").read_text())
    assert (header["format"], "created_utc" in header) == ("dynmo.fingerprints", False)
    entry = json.loads((tmp_path / "dictionary").read_text().splitlines()[0])
    assert (entry["version"], "created_utc" in entry) == (1, False)


RECIPE = '[pipeline]\ninput = ["in.jsonl"]\n[[step]]\nrun = "shuffle"\n'


def test_recipe_input_is_found_in_the_current_directory(prep, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    write(tmp_path / "in.jsonl", [{"text": "here"}])
    assert prep("pipeline", "recipe.toml", "--work-dir", "work")[0] == 0
    assert sorted(os.listdir(tmp_path / "work"))[0] == "01-shuffle.jsonl.zst"


def test_recipe_input_is_found_in_the_work_folder(prep, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "work").mkdir()
    write(tmp_path / "work" / "in.jsonl", [{"text": "there"}])
    assert prep("pipeline", "recipe.toml", "--work-dir", "work")[0] == 0


def test_recipe_input_in_both_folders_is_refused(prep, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "work").mkdir()
    for folder, text in ((tmp_path, "here"), (tmp_path / "work", "there")):
        write(folder / "in.jsonl", [{"text": text}])
    code, _, err = prep("pipeline", "recipe.toml", "--work-dir", "work")
    assert (code, "choose with --input in.jsonl or --input work/in.jsonl" in err) == (2, True)
    assert prep("pipeline", "recipe.toml", "--work-dir", "work", "--input", "in.jsonl")[0] == 0
