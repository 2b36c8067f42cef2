"""Whole views of a fixture run at pinned sizes, and what gives way on a small terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dynmo_train.trainer.monitoring.live_view import LiveView, allocate, bar, chart, duration, state, wrap_parts
from dynmo_train.trainer.monitoring.run_status import RunStatus, read_run_status
from tests.tables import table
from tests.unit.dynmo_train.trainer.monitoring.run_fixture import write_run

SNAPSHOTS = sorted((Path(__file__).parent / "views").glob("*.txt"))


@pytest.fixture
def status(tmp_path) -> RunStatus:
    return dataclasses.replace(read_run_status(write_run(tmp_path / "run")), run="runs/first")


def drawn(status: RunStatus, width: int, height: int, **options: bool) -> list[str]:
    return [line.rstrip() for line in LiveView(status, **options).render(width, height).plain.split("\n")]


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
def test_view_equals_the_snapshot_of_its_size(status, path):
    width, height = map(int, path.stem.split("x"))
    assert drawn(status, width, height) == path.read_text(encoding="utf-8").splitlines()


def test_snapshots_are_found():
    assert [path.stem for path in SNAPSHOTS] == ["100x24", "160x30", "60x24"]


@table("width", [1, 20, 40, 41, 60, 99, 100, 101, 160, 200])
@table("height", [1, 5, 10, 24, 60])
@table("workers", [0, 1, 4, 100])
def test_view_fits_every_terminal(tmp_path, width, height, workers):
    status = read_run_status(write_run(tmp_path / "run", workers=workers))
    for each in (status, dataclasses.replace(status, train_iters=None, loss_curve=[], tokens_per_s_curve=[], plans=[])):
        lines = LiveView(each).render(width, height).plain.split("\n")
        assert len(lines) <= height
        assert max(map(len, lines)) <= width


def test_view_has_the_step_on_the_smallest_terminal(status):
    assert "step 340 of 1,000" in drawn(status, 40, 10)[0]
    assert "4 workers: load 65.0% to 95.0%" in drawn(status, 40, 10)


def test_view_without_block_characters_is_ascii(status):
    assert all(line.isascii() for line in drawn(status, 60, 24, ascii_only=True))


def test_view_sums_up_workers_without_a_row(tmp_path):
    lines = drawn(read_run_status(write_run(tmp_path / "run", workers=40)), 60, 24)
    assert "36 workers: load 15.0% to 95.0%" in lines
    assert "40 workers active" in lines


def test_view_removes_control_characters(status):
    lines = drawn(dataclasses.replace(status, events=["a\x1b[2Jb\nc"]), 60, 40)
    assert "a [2Jb c" in lines
    assert not any("\x1b" in line for line in lines)


def test_view_of_a_run_without_steps(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    lines = drawn(read_run_status(tmp_path), 200, 20)
    assert lines[0].endswith("| step 0 | starting")
    assert any("not measured yet" in line for line in lines)
    assert "no plans" in lines
    assert "no events" in lines


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "running"),
        ({"step": 0}, "starting"),
        ({"step": 1000}, "done"),
        ({"idle_s": 61.0, "step_ms": 100.0}, "no step for 1 min 01 s"),
        ({"idle_s": 61.0, "step_ms": 10_000.0}, "running"),
    ],
)
def test_state(status, changes, expected):
    assert state(
        dataclasses.replace(status, idle_s=1.0) if not changes else dataclasses.replace(status, **changes)
    ) == (expected)


def test_chart_spans_lowest_to_highest_value():
    assert chart([1, 2, 3], 3, 1) == ["▁▅█"]
    assert chart([0, 15], 2, 2) == [" █", "▁█"]
    assert chart([2, 2], 2, 2) == ["  ", "▁▁"]
    assert chart([1, 2, 3, 4], 2, 1) == ["▁█"]


def test_bar_is_filled_to_the_fraction():
    assert bar(0.5, 4) == "██░░"
    assert bar(1.5, 4, ascii_only=True) == "####"
    assert bar(-1, 4, ascii_only=True) == "----"


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.4, "59 s"), (60, "1 min 00 s"), (3660, "1 h 01 min"), (90_000, "1 d 01 h")]
)
def test_duration_has_two_units(seconds, text):
    assert duration(seconds) == text


def test_allocate_gives_minimum_then_preferred_then_one_each():
    needs = [(2, 3, 9), (2, 4, 4), (2, 2, 9)]
    assert allocate(3, needs) == [3, 0, 0]
    assert allocate(6, needs) == [2, 2, 2]
    assert allocate(8, needs) == [3, 3, 2]
    assert allocate(13, needs) == [5, 4, 4]
    assert allocate(99, needs) == [9, 4, 9]


def test_parts_wrap_between_parts():
    assert wrap_parts(["abc", "def", "ghi"], 9) == ["abc | def", "ghi"]
    assert wrap_parts(["abcdef"], 3) == ["abcdef"]
