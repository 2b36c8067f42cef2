"""A tail reads each complete line once, and notices that its file was replaced."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest

from dynmo_train._common.log_parts import Rotation, rotate
from dynmo_train.trainer.monitoring.jsonl_tail import JsonlTail
from tests.contracts.test_bounds import CLOSED, OBJECTS, UNCLOSED, at_most
from tests.unit.dynmo_train.trainer.monitoring.run_fixture import append, write


def steps(tail: JsonlTail) -> list[int]:
    return [record["step"] for record in tail.read()]


def test_tail_returns_each_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    assert not tail.has_restarted()
    assert steps(tail) == []
    write(path, {"step": 1}, {"step": 2})
    assert not tail.has_restarted()
    assert steps(tail) == [1, 2]
    assert steps(tail) == []
    append(path, {"step": 3})
    assert not tail.has_restarted()
    assert steps(tail) == [3]


def test_tail_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    tail = JsonlTail(path)
    tail.has_restarted()
    assert steps(tail) == [1]
    # The writer cuts an incomplete line before it appends: the file is shorter than what was read.
    path.write_text('{"step": 1}\n')
    assert not tail.has_restarted()
    append(path, {"step": 2})
    assert not tail.has_restarted()
    assert steps(tail) == [2]


def test_tail_starts_again_after_truncation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1}, {"step": 2})
    tail = JsonlTail(path)
    tail.has_restarted()
    assert steps(tail) == [1, 2]
    path.write_text('{"step": 7}\n')
    assert tail.has_restarted()
    assert steps(tail) == [7]


def test_tail_recognizes_a_file_that_grew_after_truncation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1})
    tail = JsonlTail(path)
    tail.has_restarted()
    assert steps(tail) == [1]
    # In place, so that neither the size nor the inode shows it.
    with open(path, "r+", encoding="utf-8") as handle:
        handle.write('{"step": 8}\n{"step": 9}\n')
    assert tail.has_restarted()
    assert steps(tail) == [8, 9]


def test_tail_recognizes_a_replaced_file(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    write(path, {"step": 1})
    tail = JsonlTail(path)
    tail.has_restarted()
    assert steps(tail) == [1]
    write(other, {"step": 1}, {"step": 2})
    os.replace(other, path)
    assert tail.has_restarted()
    assert steps(tail) == [1, 2]
    path.unlink()
    assert tail.has_restarted()
    assert steps(tail) == []
    assert not tail.has_restarted()


def test_tail_skims_what_is_before_the_last_bytes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "updated": step != 5} for step in range(1, 201)))
    tail = JsonlTail(path, markers=(b"false",), tail_bytes=60, samples=3)
    tail.has_restarted()
    # The first line, the marked one, those at three equal distances, and the last 60 bytes.
    found = steps(tail)
    assert found[:2] == [1, 5]
    assert found[-1] == 200
    assert 5 <= len(found) <= 7
    assert found == sorted(found)
    assert not tail.is_partial
    partial = JsonlTail(path, markers=(b"false",), tail_bytes=60, marked_bytes=100, samples=3)
    assert 5 not in steps(partial)
    assert partial.is_partial
    append(path, *({"step": step} for step in range(201, 301)))
    assert not tail.has_restarted()
    assert len(steps(tail)) >= 5


def test_tail_of_a_large_file_has_bounded_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"step": 1, "text": "x" * 1000}) + "\n"
    with open(path, "w", encoding="utf-8") as handle:
        for _ in range(40):
            handle.write(line * 1000)
    tail = JsonlTail(path, tail_bytes=1 << 20)
    tail.has_restarted()
    tracemalloc.start()
    try:
        count = sum(1 for _ in tail.read())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 40_000 // 64 < count < 3_000
    assert peak < 8 << 20 < path.stat().st_size


@pytest.mark.parametrize("payload", [UNCLOSED, OBJECTS, CLOSED], ids=["unclosed", "objects", "closed"])
def test_tail_skips_and_counts_invalid_lines(tmp_path, payload):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + payload + b'\n[1]\n\n{"step": 2}\n')
    tail = JsonlTail(path)
    tail.has_restarted()
    assert steps(tail) == [1, 2]
    assert tail.invalid_lines == 2


def test_tail_of_a_fifo_does_not_wait(tmp_path):
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    tail = JsonlTail(path)
    with at_most(20):
        assert not tail.has_restarted()
        assert steps(tail) == []


@pytest.mark.parametrize("tail_bytes", [1, 30, 1 << 20])
def test_tail_follows_a_file_across_rotations(tmp_path, tail_bytes):
    path = tmp_path / "metrics.jsonl"
    rotation = Rotation(max_bytes=1)
    tail = JsonlTail(path, tail_bytes=tail_bytes)
    write(path, {"step": 1}, {"step": 2})
    for step in (3, 4):
        rotate(path, rotation)
        append(path, {"step": step})
    assert steps(tail) == [1, 2, 3, 4]
    append(path, {"step": 5})
    # Two rotations between two polls; the last part is empty after a crash between the steps of a rotation.
    rotate(path, rotation)
    append(path, {"step": 6})
    rotate(path, rotation)
    assert not tail.has_restarted()
    assert steps(tail) == [5, 6]
    assert not tail.has_restarted()
    append(path, {"step": 7})
    assert not tail.has_restarted()
    assert steps(tail) == [7]
    assert steps(JsonlTail(path)) == [1, 2, 3, 4, 5, 6, 7]


def test_tail_of_a_rotated_file_that_another_run_replaced_starts_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1})
    tail = JsonlTail(path)
    assert steps(tail) == [1]
    path.unlink()
    write(path, {"step": 2})
    append(path, {"step": 3})
    assert tail.has_restarted()
    assert steps(tail) == [2, 3]
