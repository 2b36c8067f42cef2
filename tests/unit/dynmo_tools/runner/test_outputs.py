"""Existing outputs are refused unless --overwrite; a failed run does not block its own correction."""

from __future__ import annotations

import email
import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from dynmo_tools import cli
from dynmo_tools.formats.indexed import IndexedReader


@pytest.fixture
def prep(tmp_path, monkeypatch, capsys):
    """Run a command line in the test's folder; returns exit code and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": f"one two {n}", "url": f"u{n}"}) + "\n" for n in range(9))
    )
    (tmp_path / "words.json").write_text(json.dumps({"<unk>": 0, "one": 1}))
    (tmp_path / "pairs.jsonl").write_text('{"u0": [{"u1": 0.95}]}\n')
    (tmp_path / "groups.jsonl").write_text('{"0": ["u0", "u1"]}\n')
    (tmp_path / "urls.txt").write_text("https://a.org/page\n")
    monkeypatch.setattr(
        "dynmo_tools.extract.sample_corpus.stdlib_folder", lambda: Path(email.__file__).parent
    )  # the whole takes seconds

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["dynmo-prep", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, capsys.readouterr().err

    return run


BINARIZE = ("binarize", "in.jsonl", "--tokenizer-type", "WhitespaceVocab", "--vocab-file", "words.json")
COMMANDS = {
    "merge": (("merge", "in.jsonl"), "out", "out"),
    "add-id": (("add-id", "in.jsonl", "--id-prefix", "x"), "out", "out"),
    "dropped": (
        ("fix", "in.jsonl", "--tasks", "remove_512", "--filtered", "drop", "--max-rejects", "1"),
        "out",
        "drop",
    ),
    "dedup": (("dedup", "in.jsonl", "--save-fingerprints", "prints"), "out", "prints"),
    "binarize": (BINARIZE, "out", "out_text_document.idx"),
    "group": (("group-duplicates", "pairs.jsonl"), "out", "out"),
    "blacklist": (("blacklist-urls", "urls.txt"), "out", "out"),
    "merge-indexed": (("merge-indexed", "data_text_document"), "out", "out.bin"),
    "convert-indexed": (("convert-indexed", "data_text_document"), "out", "out.idx"),
    "sample": (("sample-corpus", "--max-bytes", "2000"), "out", "out"),
    "fetch": (("fetch-urls", "urls.txt"), "out", "out"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_output_that_exists_is_refused_without_overwrite(prep, tmp_path, name):
    arguments, output, file = COMMANDS[name]
    if name.endswith("-indexed"):
        assert prep(*BINARIZE, "-o", "data")[0] == 0
    if file == "prints":
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).write_text("mine")
    code, err = prep(*arguments, "-o", output)
    assert (code, re.search(rf"{file}: already exists; use --overwrite", err) is not None) == (2, True), err
    assert file == "prints" or (tmp_path / file).read_text() == "mine"
    if name != "fetch":  # which would use the network
        assert prep(*arguments, "-o", output, "--overwrite")[0] == 0
        assert file == "prints" or (tmp_path / file).read_bytes() != b"mine"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("binarize", "dedup", "dropped")])
def test_output_that_is_a_folder_is_refused_before_work(prep, tmp_path, name):
    arguments, output, file = COMMANDS[name]
    if name.endswith("-indexed"):
        assert prep(*BINARIZE, "-o", "data")[0] == 0
    (tmp_path / file).mkdir()
    for more in ((), ("--overwrite",)):
        code, err = prep(*arguments, "-o", output, *more)
        assert (code, "is a folder, but this output is a file" in err) == (2, True), err
    assert not (tmp_path / "out.work").exists()


def test_output_folder_that_is_a_file_is_refused(prep, tmp_path):
    (tmp_path / "prints").write_text("")
    code, err = prep("dedup", "in.jsonl", "-o", "out", "--save-fingerprints", "prints", "--overwrite")
    assert (code, "prints: is a file, but this output is a folder" in err) == (2, True)
    (tmp_path / "out_text_document.bin").mkdir()
    code, err = prep(*BINARIZE, "-o", "out")
    assert (code, "out_text_document.bin: is a folder" in err) == (2, True)
    code, err = prep("merge", "in.jsonl", "-o", "words.json/out")
    assert (code, "words.json is not a folder" in err) == (2, True)


def test_sample_corpus_with_equal_bytes_is_written_without_overwrite(prep):
    for _ in range(2):
        assert prep("sample-corpus", "--max-bytes", 2000, "-o", "sample.jsonl")[0] == 0
    assert prep("sample-corpus", "--max-bytes", 2000, "-o", "sample.jsonl", "--seed", 1)[0] == 2


def test_failed_run_with_corrected_key_needs_no_overwrite(prep, tmp_path):
    assert prep("clean", "in.jsonl", "-o", "out", "--json-key", "txt", "--language", "", "--min-tokens", 0)[0] == 4
    code, err = prep("clean", "in.jsonl", "-o", "out", "--language", "", "--min-tokens", 0)
    assert code == 0, err
    assert len((tmp_path / "out").read_bytes().splitlines()) == 9


def test_failed_run_with_replaced_input_needs_no_overwrite(prep, tmp_path):
    import gzip

    packed = gzip.compress((tmp_path / "in.jsonl").read_bytes())
    (tmp_path / "in.jsonl.gz").write_bytes(packed[:-12])
    assert prep(*BINARIZE[:1], "in.jsonl.gz", *BINARIZE[2:], "-o", "out")[0] == 1
    (tmp_path / "in.jsonl.gz").write_bytes(packed)
    assert prep(*BINARIZE[:1], "in.jsonl.gz", *BINARIZE[2:], "-o", "out")[0] == 0
    assert len(IndexedReader(tmp_path / "out_text_document")) == 9


def test_completed_and_interrupted_runs_are_not_discarded(prep, tmp_path):
    assert prep("shuffle", "in.jsonl", "-o", "out")[0] == 0
    code, err = prep("shuffle", "in.jsonl", "-o", "out", "--seed", 3)
    assert (code, "out: already exists" in err) == (2, True)
    assert prep("shuffle", "in.jsonl", "-o", "out")[0] == 0  # the same run: nothing is done
    (tmp_path / "out").unlink()
    (tmp_path / "out.work" / "summary.json").unlink()  # as a signal leaves it
    code, err = prep("shuffle", "in.jsonl", "-o", "out", "--seed", 3)
    assert (code, "contains an interrupted run of this step with other settings" in err) == (2, True)
    assert prep("shuffle", "in.jsonl", "-o", "out", "--seed", 3, "--overwrite")[0] == 0


def test_output_edited_after_the_run_is_not_overwritten(prep, tmp_path):
    assert prep("merge", "in.jsonl", "-o", "out")[0] == 0
    (tmp_path / "out").write_text("edited")
    code, err = prep("merge", "in.jsonl", "-o", "out")
    assert (code, "changed after this run wrote it" in err) == (2, True)
    assert (tmp_path / "out").read_text() == "edited"


@pytest.mark.parametrize("spelling", ["in.jsonl", "./in.jsonl", "{folder}/in.jsonl", "../{name}/in.jsonl"])
def test_remove_duplicates_finds_locations_in_any_path_spelling(prep, tmp_path, spelling):
    row = json.dumps({"text": "the same text of some length, and more of it"}) + "\n"
    (tmp_path / "in.jsonl").write_text(row * 3)
    assert prep("find-duplicates", "in.jsonl", "-o", "pairs")[0] == 0
    assert prep("group-duplicates", "pairs", "-o", "groups")[0] == 0
    source = spelling.format(folder=tmp_path, name=tmp_path.name)
    code, err = prep("remove-duplicates", source, "--groups", "groups", "-o", "out")
    assert code == 0, err
    assert (tmp_path / "out").read_text() == row


def test_remove_duplicates_with_missing_names_exits_3(prep, tmp_path):
    (tmp_path / "groups.jsonl").write_text('{"0": ["u0", "u1", "nobody"]}\n{"1": ["u2", "elsewhere.jsonl@7", "u1"]}\n')
    code, err = prep("remove-duplicates", "in.jsonl", "--groups", "groups.jsonl", "-o", "out")
    assert (code, "2 names of groups.jsonl are in no input" in err) == (3, True), err
    assert len((tmp_path / "out").read_bytes().splitlines()) == 8


def test_remove_duplicates_with_wrong_id_key_exits_3(prep):
    code, err = prep("remove-duplicates", "in.jsonl", "--groups", "groups.jsonl", "--id-key", "uri", "-o", "out")
    assert (code, "1 names of groups.jsonl are in no input" in err) == (3, True)


def test_output_with_equal_bytes_keeps_its_mtime(prep, tmp_path):
    """Else a step that read it would count its input as changed."""
    for words in (
        ("group-duplicates", "pairs.jsonl", "-o", "made"),
        ("blacklist-urls", "urls.txt", "-o", "made"),
    ):
        assert prep(*words, "--overwrite")[0] == 0
        os.utime(tmp_path / "made", ns=(1, 1))
        assert prep(*words, "--overwrite")[0] == 0
        assert (tmp_path / "made").stat().st_mtime_ns == 1
    (tmp_path / "urls.txt").write_text("https://a.org/newer\n")
    assert prep(*words, "--overwrite")[0] == 0
    assert (tmp_path / "made").read_text() == "https://a.org/newer\n"
    assert not list(tmp_path.glob(".made*"))


def test_blacklist_urls_writes_dropped_urls_to_a_tsv(prep, tmp_path):
    (tmp_path / "urls.txt").write_text("https://a.org/page\nshort\n")
    code, err = prep("blacklist-urls", "urls.txt", "-o", "made", "--save-dropped", "dropped.tsv")
    assert (code, (tmp_path / "dropped.tsv").read_text()) == (0, "short\tshort\n"), err
    assert prep("blacklist-urls", "urls.txt", "-o", "other.tsv")[0] == 2


@pytest.mark.parametrize("step", ["find-duplicates", "dedup", "merge", "clean"])
def test_steps_process_rows_and_paths_with_lone_surrogates(prep, tmp_path, step):
    rows = [{"text": "one two three " * 30, "url": f"half \ud800 {n}"} for n in range(2)]
    rows += [{"text": "four five six " * 30, "url": "half \udc00"}, {"\ud800 key": 1}]
    name = os.fsdecode(b"in-\xff.jsonl")
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--min-tokens", 0, "--language", "") if step == "clean" else ()
    code, err = prep(step, name, "-o", "out", "--max-rejects", 1, *more)
    assert code in (0, 3), err
    assert prep(step, name, "-o", "out", "--max-rejects", 1, *more, "--format", "json")[0] == code
    if step == "find-duplicates":
        assert json.loads((tmp_path / "out").read_text()) == {"half \ud800 0": [{"half \ud800 1": 1.0}]}
    elif step == "dedup":
        assert len((tmp_path / "out").read_text().splitlines()) == 2
    reject = json.loads(next((tmp_path / "out.work" / "rejects").iterdir()).read_text().splitlines()[-1])
    assert reject["file"] == name


def test_missing_key_of_rows_with_lone_surrogates_is_reported(prep, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"\\ud800": 1}\n')
    code, err = prep("clean", "odd.jsonl", "-o", "out")
    assert (code, "lack --json-key text" in err) == (4, True), err


def test_corrected_run_after_a_failed_subset_needs_no_overwrite(prep, tmp_path):
    (tmp_path / "in.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    words = ("merge", "in.jsonl.gz", "in.jsonl", "-o", "out", "--phase", "map", "--task-count", 2, "--task-index")
    assert prep(*words, 0)[0] == 1
    assert prep(*words, 1)[0] == 0
    code, err = prep("merge", "in.jsonl", "-o", "out")
    assert code == 0, err
    assert not (tmp_path / "out.work" / "failed.txt").exists()


@pytest.mark.timeout(120)
def test_subset_of_a_phase_runs_concurrently_with_another(prep, tmp_path):
    words = ("merge", "in.jsonl", "-o", "out", "--phase", "map", "--task-bytes", 100, "--task-count", 2, "--task-index")
    assert prep(*words, 0)[0] == 0
    with open(tmp_path / "out.work" / "lock") as running:
        fcntl.flock(running, fcntl.LOCK_SH)  # as a part of the array holds it
        code, err = prep(*words, 1)
    assert code == 0, err
    assert prep("merge", "in.jsonl", "-o", "out", "--task-bytes", 100)[0] == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in.jsonl").read_bytes()


def test_subset_with_overwrite_is_refused(prep):
    code, err = prep("merge", "in.jsonl", "-o", "out", "--task-index", 0, "--task-count", 2, "--overwrite")
    assert (code, "each subset would discard the work of the others" in err) == (2, True)


def test_brackets_in_existing_paths_are_not_patterns(prep, tmp_path):
    recipe = '[pipeline]\ninput = ["{}"]\n[[step]]\nrun = "merge"\n'
    folder = tmp_path / "work [1]"
    folder.mkdir()
    for name, pattern in (("a[1].jsonl", "a[1].jsonl"), ("b.jsonl", "b*.jsonl")):
        (folder / name).write_text('{"text": "one"}\n')
        (tmp_path / "recipe[1].toml").write_text(recipe.format(pattern))
        code, err = prep("pipeline", "recipe[1].toml", "--work-dir", folder)
        assert code == 0, err
    (folder / "urls.txt").write_text("https://a.org/page\n")
    assert prep("blacklist-urls", folder, "-o", "kept")[0] == 0
    (tmp_path / "in [1]").mkdir()
    (tmp_path / "in [1]" / "c.json").write_text('{"text": "one"}\n')
    code, err = prep("merge", "--json_path", "in [1]", "-o", "merged")
    assert code == 0, err
