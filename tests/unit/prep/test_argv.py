from __future__ import annotations

import pytest

from dynmo_tools.argv import from_classic, spread_lists


@pytest.mark.parametrize(
    ("given", "spread"),
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
def test_lists_behind_one_flag_are_spread(given, spread):
    assert spread_lists(given) == spread


def test_pairs_of_the_classic_tools_become_flags():
    words = "find-duplicates --num-bands 10 --inputs a url b id --output pairs"
    expected = "find-duplicates --num-bands 10 --input a --id-key url --input b --id-key id --output pairs"
    assert from_classic(words.split()) == expected.split()
    words = "decontaminate --tasks lambada piqa --lambada-path l --dedup-dataset in text --output out"
    expected = "decontaminate --task piqa --task lambada=l --input in --json-key text --output out"
    assert from_classic(words.split()) == expected.split()
    for same in ("find-duplicates --input-files a b c -o out", "merge --inputs a b -o out", "decontaminate in -o out"):
        assert from_classic(same.split()) == same.split()
