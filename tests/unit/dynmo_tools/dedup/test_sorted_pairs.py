"""External sort of pairs, and concatenation of large files."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dynmo_tools._common.errors import DynmoError
from dynmo_tools.dedup.doc_ids import (
    NamePart,
    NameTable,
    digest_of_name,
    name_line,
    pair_lines,
    repeated_digests,
    write_name_index,
)
from dynmo_tools.dedup.sorted_pairs import SortedPairs, read_pairs
from dynmo_tools.dedup.union_find import UnionFind
from dynmo_tools.io import concat_files
from dynmo_tools.io.concat_files import append_files
from tests.tables import table


@pytest.mark.parametrize("max_pairs", [3, 1000])
def test_sorted_pairs_are_ascending_and_distinct(tmp_path, max_pairs):
    rng = random.Random(3)
    given = [(a := rng.randrange(20), a + 1 + rng.randrange(20)) for _ in range(300)]
    with SortedPairs(tmp_path, max_pairs=max_pairs) as pairs:
        for main, other in given:
            pairs.add(main, other, (main + other) / 100)
        assert list(pairs) == [(main, other, (main + other) / 100) for main, other in sorted(set(given))]


def test_sorted_pairs_without_pairs_is_empty(tmp_path):
    with SortedPairs(tmp_path) as pairs:
        assert list(pairs) == []


def test_read_pairs_selects_by_main_document(tmp_path):
    with SortedPairs(tmp_path, max_pairs=4) as pairs:
        for main in (5, 1, 3, 1, 9):
            pairs.add(main, 10 + main, main / 10)
        (tmp_path / "pairs").write_bytes(b"".join(block.tobytes() for block in pairs.blocks()))
    (tmp_path / "none").write_bytes(b"")
    assert list(read_pairs(tmp_path / "pairs", 1, 5)) == [(1, 11, 0.1), (3, 13, 0.3)]
    assert list(read_pairs(tmp_path / "pairs", 5, 99)) == [(5, 15, 0.5), (9, 19, 0.9)]
    assert list(read_pairs(tmp_path / "none", 0, 99)) == []


def test_name_table_uses_locations_for_shared_names(tmp_path, monkeypatch):
    monkeypatch.setattr("dynmo_tools.dedup.doc_ids.BUFFERED_LINES", 2)
    names = ["a", None, "b", "a", "c", "é", None, "b", "a"]
    parts = []
    for number, part in enumerate((names[:4], [], names[4:])):
        parts.append(NamePart(names=tmp_path / f"{number}", lines=tmp_path / f"{number}.lines"))
        parts[-1].names.write_bytes(b"".join(name_line(name, f"{number}@{at}") for at, name in enumerate(part)))
        with open(parts[-1].lines, "wb") as target:
            write_name_index(parts[-1].names, target)
    repeated = repeated_digests([part.lines for part in parts])
    assert sorted(repeated.tolist()) == sorted(map(digest_of_name, "ab"))
    with NameTable(parts, repeated) as table:
        assert [table.name(at) for at in range(9)] == ["0@0", "0@1", "0@2", "0@3", "c", "é", "2@2", "2@3", "2@4"]
        lines = list(pair_lines(iter([(0, 4, 0.75), (0, 8, 1.0), (4, 5, 0.5)]), table))
    assert lines == [(b'{"0@0": [{"c": 0.75}, {"2@4": 1.0}]}\n', 2), ('{"c": [{"é": 0.5}]}\n'.encode(), 1)]


def test_non_first_members_match_the_groups(monkeypatch, groups_of):
    monkeypatch.setattr("dynmo_tools.dedup.union_find.BLOCK", 7)
    rng = random.Random(1)
    sets = UnionFind(60)
    for _ in range(40):
        sets.join(rng.randrange(60), rng.randrange(60))
    groups = groups_of(sets)
    removed, count, largest = sets.non_first_members()
    assert np.flatnonzero(removed).tolist() == sorted(member for group in groups for member in group[1:])
    assert (count, largest) == (len(groups), max(map(len, groups)))
    assert UnionFind(3).non_first_members()[1:] == (0, 0)


@table("direct", [True, False])
@table("sizes", [(4096, 4096), (5_000_000, 1, 0, 777), (1 << 20, 3 << 20), (0, 0), (123,)])
def test_append_files_concatenates_the_parts(tmp_path, monkeypatch, direct, sizes):
    monkeypatch.setattr(concat_files, "DIRECT_FROM_BYTES", 0 if direct else 1 << 40)
    rng = random.Random(5)
    parts = [tmp_path / f"part{number}" for number in range(len(sizes))]
    for part, size in zip(parts, sizes, strict=True):
        part.write_bytes(rng.randbytes(size))
    with open(tmp_path / "all", "wb") as target:
        append_files(target, parts)
        target.write(b"and more")
        append_files(target, parts[:1])
    whole = b"".join(part.read_bytes() for part in parts)
    assert (tmp_path / "all").read_bytes() == whole + b"and more" + parts[0].read_bytes()


def test_append_files_without_direct_io_uses_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(concat_files, "DIRECT_FROM_BYTES", 0)

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(concat_files, "write_aligned", refuse)
    (tmp_path / "part").write_bytes(b"x" * 10_000)
    with open(tmp_path / "all", "wb") as target:
        append_files(target, [tmp_path / "part"])
    assert (tmp_path / "all").read_bytes() == b"x" * 10_000


def test_append_files_on_a_full_disk_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(concat_files, "DIRECT_FROM_BYTES", 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(concat_files.os, "posix_fallocate", full)
    (tmp_path / "part").write_bytes(b"x" * 10_000)
    with open(tmp_path / "all", "wb") as target, pytest.raises(OSError, match="No space"):
        append_files(target, [tmp_path / "part"])


def test_append_files_with_a_changing_part_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(concat_files, "DIRECT_FROM_BYTES", 0)
    monkeypatch.setattr(concat_files.os, "preadv", lambda *_: 0)
    (tmp_path / "part").write_bytes(b"x" * 10_000)
    with open(tmp_path / "all", "wb") as target, pytest.raises(DynmoError, match="was truncated"):
        append_files(target, [tmp_path / "part"])
