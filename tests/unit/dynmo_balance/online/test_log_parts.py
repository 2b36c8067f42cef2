"""Parts of a rotated document: every line once and in order, whatever happens between the steps of a rotation."""

from __future__ import annotations

import json
import os
import random

import pytest

from dynmo_balance._common import log_parts
from dynmo_balance._common.document import DocumentError, UnreadableError, append_line
from dynmo_balance._common.log_parts import (
    Rotation,
    last_lines,
    part_numbers,
    part_paths,
    read_part_lines,
    read_part_records,
    rotate,
)


def write(path, steps, rotation):
    for step in steps:
        rotate(path, rotation)
        append_line(path, {"step": step})


def steps(path):
    return [record["step"] for record in read_part_records(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.jsonl"


def test_rotation_keeps_every_line_in_order_and_bounds_each_part(path):
    write(path, range(100), Rotation(max_bytes=60))
    assert steps(path) == list(range(100))
    assert part_numbers(path) == list(range(1, len(part_paths(path))))
    assert max(part.stat().st_size for part in part_paths(path)) <= 60 + len('{"step": 99}\n')


def test_rotation_keeps_the_newest_parts_and_never_uses_a_number_twice(path):
    rotation = Rotation(max_bytes=1, keep=3)
    write(path, range(20), rotation)
    assert steps(path) == [16, 17, 18, 19]
    assert part_numbers(path) == [17, 18, 19]


def test_rotation_without_a_limit_or_of_a_small_part_has_no_effect(path):
    write(path, range(5), Rotation())
    assert not rotate(path, Rotation(max_bytes=1), min_bytes=1000)
    assert part_numbers(path) == []
    assert not rotate(path.with_name("none"), Rotation(max_bytes=1))


def test_crash_after_the_rename_loses_no_line(path):
    write(path, range(3), Rotation())
    os.rename(path, path.with_name("a.jsonl.1"))
    assert steps(path) == [0, 1, 2]
    write(path, [3], Rotation(max_bytes=1))
    assert steps(path) == [0, 1, 2, 3]


def test_incomplete_last_line_of_a_part_is_left_out(path):
    write(path, [1], Rotation())
    with path.open("a") as handle:
        handle.write('{"st')
    os.rename(path, path.with_name("a.jsonl.1"))
    write(path, [2], Rotation())
    assert steps(path) == [1, 2]


def test_reader_sees_each_line_once_while_the_writer_rotates(path, monkeypatch):
    """The writer acts at every point at which a reader lists the parts."""
    random_numbers = random.Random(0)
    for _ in range(30):
        for part in part_paths(path):
            part.unlink()
        write(path, range(10), Rotation(max_bytes=40))
        written, listed = [10], log_parts.part_numbers

        def writing(document, written=written, listed=listed):
            if written[0] < 40 and random_numbers.random() < 0.5:
                with monkeypatch.context() as patch:
                    patch.setattr(log_parts, "part_numbers", listed)
                    write(document, [written[0]], Rotation(max_bytes=1))
                written[0] += 1
            return listed(document)

        with monkeypatch.context() as patch:
            patch.setattr(log_parts, "part_numbers", writing)
            found = steps(path)
        assert found == list(range(len(found)))
        assert len(found) >= 10


def test_part_made_before_the_newest_file_is_opened_is_read(path, monkeypatch):
    write(path, [0], Rotation(max_bytes=1))
    opened = log_parts.open_regular

    def opening(document):
        if not part_numbers(path):
            write(path, [1], Rotation(max_bytes=1))
        return opened(document)

    monkeypatch.setattr(log_parts, "open_regular", opening)
    assert steps(path) == [0, 1]


def test_last_lines_are_those_of_all_parts_newest_first(path):
    write(path, range(50), Rotation(max_bytes=100))
    assert [json.loads(line)["step"] for line in last_lines(path, 1 << 20)] == list(range(49, -1, -1))
    few = [json.loads(line)["step"] for line in last_lines(path, 150)]
    assert few == list(range(49, 49 - len(few), -1))
    assert 5 <= len(few) <= 12
    assert list(last_lines(path.with_name("none"), 100)) == []


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 100])
def test_lines_backward_equal_those_forward(path, chunk_bytes):
    for text in (b"", b"a", b"a\n", b"\n\na\n", b"ab\ncd\nef", b"abc\n\nd\n"):
        path.write_bytes(text)
        with path.open("rb") as handle:
            found = list(log_parts._lines_backward(handle, 0, len(text), chunk_bytes))
        assert found == [line for line in text[: text.rfind(b"\n") + 1].split(b"\n") if line][::-1], text


def test_missing_document_and_long_line_are_refused(path):
    with pytest.raises(UnreadableError):
        list(read_part_lines(path))
    path.write_bytes(b"x" * 100 + b"\n")
    with pytest.raises(DocumentError, match="line 1"):
        list(read_part_lines(path, 50))
