from __future__ import annotations

import pytest

from dynmo_tools.cli.classic_args import expand_list_flags, from_classic_syntax


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        (["--json-keys", "a", "b", "--x", "1", "2"], ["--json-keys", "a", "--json-keys", "b", "--x", "1", "2"]),
        (["--input", "a", "-o", "b", "c"], ["--input", "a", "-o", "b", "c"]),
        (
            ["--json-keys", "a", "--", "b", "--json-keys", "c", "d"],
            ["--json-keys", "a", "--", "b", "--json-keys", "c", "d"],
        ),
        ([], []),
    ],
)
def test_list_flags_are_repeated_per_value(given, expanded):
    assert expand_list_flags(given) == expanded


def test_megatron_pairs_become_flags():
    words = "find-duplicates --num-bands 10 --inputs a url b id --output pairs"
    expected = "find-duplicates --num-bands 10 --input a --id-key url --input b --id-key id --output pairs"
    assert from_classic_syntax(words.split()) == expected.split()
    words = "decontaminate --tasks lambada piqa --lambada-path l --dedup-dataset in text --output out"
    expected = "decontaminate --task piqa --task lambada=l --input in --json-key text --output out"
    assert from_classic_syntax(words.split()) == expected.split()
    words = "add-id --input-file in --output-file out --id-prefix web"
    assert from_classic_syntax(words.split()) == ["add-id", "--input", "in", "--output", "out", "--id-prefix", "web"]
    words = "merge --json_path folder --output_file out"
    assert from_classic_syntax(words.split()) == ["merge", "--input", "folder/*.json", "--output_file", "out"]
    words = "extract-wiki --json dump.xml.bz2 -b 1M --processes 4 -q -o wiki"
    expected = "extract-wiki dump.xml.bz2 --workers 4 -o wiki/AA/wiki_00 --work-dir wiki.work"
    assert from_classic_syntax(words.split()) == expected.split()
    words = "extract-wiki dump.xml.bz2 --json --work-dir w -o wiki.jsonl.zst"
    assert from_classic_syntax(words.split()) == words.replace("--json ", "").split()
    for same in ("find-duplicates --input-files a b c -o out", "merge --inputs a b -o out", "decontaminate in -o out"):
        assert from_classic_syntax(same.split()) == same.split()


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("clean in out", "clean in --output out --normalize"),
        ("blacklist-urls folder out", "blacklist-urls folder --output out"),
        ("group-duplicates pairs out", "group-duplicates pairs --output out"),
        ("group-duplicates pairs out 0.7", "group-duplicates pairs --output out --threshold 0.7"),
        ("remove-duplicates groups in out", "remove-duplicates --groups groups in --output out"),
    ],
)
def test_positional_files_become_flags(tmp_path, monkeypatch, given, becomes):
    monkeypatch.chdir(tmp_path)
    assert from_classic_syntax(given.split()) == becomes.split()
    (tmp_path / "out").write_text("somebody's\n")  # a second input, perhaps, and -o was forgotten
    assert from_classic_syntax(given.split()) == given.split()


@pytest.mark.parametrize(
    "same", ["clean in", "clean a b c", "clean a b --format json", "shuffle a b", "clean -o a b", ""]
)
def test_positional_files_of_another_form_are_unchanged(tmp_path, monkeypatch, same):
    monkeypatch.chdir(tmp_path)
    assert from_classic_syntax(same.split()) == same.split()
