"""What is kept on disk comes back as it would from memory; large copies are the bytes of their parts."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from dynmo_tools import copying
from dynmo_tools.copying import copy_into
from dynmo_tools.errors import DynmoError
from dynmo_tools.matching import SEEN_PAIRS, Seen, buckets
from dynmo_tools.spilling import NameTable, SortedPairs
from dynmo_tools.unionfind import UnionFind


@pytest.mark.parametrize("held", [3, 1000])
def test_pairs_come_back_sorted_and_once(tmp_path, held):
    rng = random.Random(3)
    given = [(a := rng.randrange(20), a + 1 + rng.randrange(20)) for _ in range(300)]
    with SortedPairs(tmp_path, held=held) as kept:
        for main, other in given:
            kept.add(main, other, (main + other) / 100)
        assert list(kept) == [(main, other, (main + other) / 100) for main, other in sorted(set(given))]


def test_no_pairs(tmp_path):
    with SortedPairs(tmp_path) as kept:
        assert list(kept) == []


def test_names_are_own_or_places(tmp_path):
    names = ["a", None, "b", "a", "c", "é", None, "b", "a"]
    for number, part in enumerate((names[:4], [], names[4:])):
        rows = [json.dumps([name, f"{number}@{at}"]) + "\n" for at, name in enumerate(part)]
        (tmp_path / f"{number}").write_text("".join(rows))
    with NameTable([tmp_path / str(number) for number in range(3)], len(names), tmp_path) as table:
        assert [table[at] for at in range(9)] == ["0@0", "0@1", "0@2", "0@3", "c", "é", "2@2", "2@3", "2@4"]
        assert table.num_repeated == 2


def test_seen_pairs_are_bounded():
    seen = Seen(1 << 20)
    assert [seen(1, 2), seen(1, 2)] == [False, True]
    for other in range(SEEN_PAIRS + 5):
        seen(3, other)
    assert len(seen._pairs) < SEEN_PAIRS


def test_buckets_hold_all_that_share_a_key():
    keys = np.random.default_rng(0).integers(0, 500, 1000, dtype=np.uint64)
    expected = [found for key in range(500) if len(found := np.flatnonzero(keys == key)) > 1]
    assert [bucket.tolist() for bucket in buckets(keys)] == [found.tolist() for found in expected]
    assert list(buckets(np.arange(9, dtype=np.uint64))) == []
    assert list(buckets(np.zeros(0, dtype=np.uint64))) == []


def test_later_ones_are_those_of_the_groups(monkeypatch):
    monkeypatch.setattr("dynmo_tools.unionfind.BLOCK", 7)
    rng = random.Random(1)
    sets = UnionFind(60)
    for _ in range(40):
        sets.join(rng.randrange(60), rng.randrange(60))
    groups = list(sets.groups())
    removed, count, largest = sets.later_ones()
    assert np.flatnonzero(removed).tolist() == sorted(member for group in groups for member in group[1:])
    assert (count, largest) == (len(groups), max(map(len, groups)))
    assert UnionFind(3).later_ones()[1:] == (0, 0)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sizes", [(4096, 4096), (5_000_000, 1, 0, 777), (1 << 20, 3 << 20), (0, 0), (123,)])
def test_a_copy_is_its_parts(tmp_path, monkeypatch, direct, sizes):
    monkeypatch.setattr(copying, "DIRECT_FROM_BYTES", 0 if direct else 1 << 40)
    rng = random.Random(5)
    parts = [tmp_path / f"part{number}" for number in range(len(sizes))]
    for part, size in zip(parts, sizes, strict=True):
        part.write_bytes(rng.randbytes(size))
    with open(tmp_path / "all", "wb") as target:
        copy_into(target, parts)
        target.write(b"and more")
        copy_into(target, parts[:1])
    whole = b"".join(part.read_bytes() for part in parts)
    assert (tmp_path / "all").read_bytes() == whole + b"and more" + parts[0].read_bytes()


def test_a_file_system_without_direct_writes_is_copied_to(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "DIRECT_FROM_BYTES", 0)

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(copying, "_write_aligned", refuse)
    (tmp_path / "part").write_bytes(b"x" * 10_000)
    with open(tmp_path / "all", "wb") as target:
        copy_into(target, [tmp_path / "part"])
    assert (tmp_path / "all").read_bytes() == b"x" * 10_000


def test_a_full_disk_ends_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "DIRECT_FROM_BYTES", 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copying.os, "posix_fallocate", full)
    (tmp_path / "part").write_bytes(b"x" * 10_000)
    with open(tmp_path / "all", "wb") as target, pytest.raises(OSError, match="No space"):
        copy_into(target, [tmp_path / "part"])


def test_a_part_that_changes_meanwhile_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "DIRECT_FROM_BYTES", 0)
    monkeypatch.setattr(copying.os, "preadv", lambda *_: 0)
    (tmp_path / "part").write_bytes(b"x" * 10_000)
    with open(tmp_path / "all", "wb") as target, pytest.raises(DynmoError, match="became shorter"):
        copy_into(target, [tmp_path / "part"])
