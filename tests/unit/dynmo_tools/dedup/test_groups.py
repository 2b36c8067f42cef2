"""Groups of duplicates compared with a plain search; sets of names by digests."""

from __future__ import annotations

import json
import random

import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.dedup.groups import read_removal_set, write_groups
from dynmo_tools.io import digests
from dynmo_tools.io.digests import DigestBuckets, DigestSet
from dynmo_tools.io.jsonl import read_objects


def plain_groups(pairs, threshold):
    """Connected names, by walking from each one, in the order in which pairs name them."""
    neighbours: dict[str, list[str]] = {}
    for entry in pairs:
        for main, others in entry.items():
            neighbours.setdefault(main, [])
            for each in others:
                for other, index in each.items():
                    if index >= threshold:
                        neighbours[main].append(other)
                        neighbours.setdefault(other, []).append(main)
    order = {name: at for at, name in enumerate(neighbours)}
    known: set[str] = set()
    found = []
    for name in neighbours:
        reached, waiting = {name}, [name]
        while waiting:
            fresh = set(neighbours[waiting.pop()]) - reached
            reached |= fresh
            waiting += fresh
        if name not in known and len(reached) > 1:
            found.append(sorted(reached, key=order.__getitem__))
        known |= reached
    return found


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_write_groups_matches_a_plain_search(tmp_path, monkeypatch, ending):
    monkeypatch.setattr("dynmo_tools.dedup.groups.GROUPS_AT_ONCE", 3)
    monkeypatch.setattr("dynmo_tools.dedup.groups.BUFFERED_NUMBERS", 4)
    monkeypatch.setattr("dynmo_tools.dedup.groups.READ_BYTES", 48)
    rng = random.Random(2)
    names = [*(f"u{at}" for at in range(150)), 'a "quoted" name', "größer", "", "half \ud800"]
    pairs = [
        {rng.choice(names): [{rng.choice(names): rng.choice([0.6, 0.9, 1.0])} for _ in range(rng.randrange(3))]}
        for _ in range(90)
    ]
    (tmp_path / "pairs").write_text("".join(json.dumps(entry) + "\n" for entry in pairs), encoding="utf-8")
    for threshold in (0.5, 0.9, 1.1):
        expected = plain_groups(pairs, threshold)
        counts = write_groups(tmp_path / "pairs", tmp_path / f"groups{ending}", threshold)
        written = [members for entry in read_objects(tmp_path / f"groups{ending}") for members in entry.values()]
        assert written == expected
        assert (counts.groups, counts.documents) == (len(expected), sum(map(len, expected)))
        assert counts.largest == max(map(len, expected), default=0)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_write_groups_with_an_invalid_pair_keeps_the_old_output(tmp_path):
    (tmp_path / "pairs").write_text('{"a": [{"b": 1.0}]}\n{"a": {"b": 1}}\n', encoding="utf-8")
    (tmp_path / "groups").write_text("old", encoding="utf-8")
    with pytest.raises(UsageError, match="pairs: the value of 'a' must be a list"):
        write_groups(tmp_path / "pairs", tmp_path / "groups", 0.9)
    assert (tmp_path / "groups").read_text() == "old"


def test_removal_set_has_all_names_except_the_first(tmp_path):
    (tmp_path / "groups").write_text('{"0": ["a", "b", "é"]}\n{"1": ["c", "half \\ud800"]}\n', encoding="utf-8")
    removals = read_removal_set(tmp_path / "groups")
    found = [removals.find(name, "f@1", "/f") for name in ("a", "b", "é", "c", "half \ud800", None, "")]
    assert removals.num_missing(number for number in found[1:3] if number is not None) == 1
    assert [number is not None for number in found] == [*(False, True, True, False, True, False, False)]


def test_digest_set_behaves_as_a_set(monkeypatch):
    rng = random.Random(4)
    texts = [str(rng.randrange(5000)) for _ in range(2000)]
    for flags in (8, 0):  # without flags every look goes to the digests
        monkeypatch.setattr(digests, "FLAGS_A_TEXT", flags)
        made = DigestSet(texts)
        assert {at for at in range(5000) if str(at) in made} == set(map(int, texts))
    assert "a" not in DigestSet([])


def test_digests_with_equal_first_halves_are_distinguished(monkeypatch):
    monkeypatch.setattr(digests, "digest_of", lambda payload: bytes(8) + payload.ljust(8, b"\0"))
    made = DigestSet(["x", "y", "z"])
    assert [text in made for text in ("x", "y", "z", "w")] == [True, True, True, False]


def test_duplicates_refer_to_the_first_occurrence(tmp_path):
    texts = [b"a", b"b", b"a", b"c", b"b", b"a"]
    with DigestBuckets(tmp_path) as buckets:
        for number, text in enumerate(texts):
            buckets.add(text, number)
        found = {
            (number, first)
            for numbers, firsts in buckets.duplicates()
            for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True)
        }
    assert found == {(2, 0), (5, 0), (4, 1)}


def test_read_objects_reads_lines_above_64_mib(tmp_path):
    name = "n" * (65 << 20)
    (tmp_path / "pairs").write_text(json.dumps({"first": [{name: 1.0}]}) + "\n")
    assert write_groups(tmp_path / "pairs", tmp_path / "groups", 0.5).documents == 2
    assert len(read_removal_set(tmp_path / "groups")) > 0
