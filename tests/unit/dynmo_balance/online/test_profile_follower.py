"""The follower of a profile across rotation: rename and restart, and copy and truncate."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from dynmo_balance.formats.profile import Header, Step
from dynmo_balance.online.profile_follower import ProfileFollower
from tests.paths import CONTRACTS

HEADER = (CONTRACTS / "profile/valid/header-only.jsonl").read_text()


def step(number):
    costs = [number] * 10
    record = {"record": "step", "step": number, "plan_id": 0, "step_ns": 1, "forward_ns": costs, "backward_ns": costs}
    return json.dumps({**record, "activation_bytes": costs, "busy_ns": [1, 1], "peak_memory_bytes": [1, 1]}) + "\n"


def header(**changes):
    return json.dumps({**json.loads(HEADER), **changes}) + "\n"


def records_of(update):
    return [record.step if isinstance(record, Step) else f"segment {record.segment}" for record in update.records]


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.jsonl"
    path.write_text(HEADER + step(1) + step(2))
    return path


@pytest.fixture
def tail(profile):
    """A follower that has read a header and two steps."""
    follower = ProfileFollower(profile)
    assert records_of(follower.poll()) == ["segment 0", 1, 2]
    return follower


def append(path, text):
    with path.open("a") as handle:
        handle.write(text)


def rename(profile, text):
    os.rename(profile, profile.with_suffix(".1"))
    profile.write_text(text)


def copy_and_cut(profile, text):
    shutil.copy(profile, profile.with_suffix(".1"))
    os.truncate(profile, 0)
    append(profile, text)


ROTATIONS = pytest.mark.parametrize("rotate", [rename, copy_and_cut])


@ROTATIONS
@pytest.mark.parametrize("lead", ["", HEADER], ids=["no header", "same header"])
@pytest.mark.parametrize("steps", [1, 6], ids=["shorter", "longer"])
def test_follower_rotation_continues_the_segment(profile, tail, rotate, lead, steps):
    rotate(profile, lead + "".join(map(step, range(3, 3 + steps))))
    update = tail.poll()
    assert not update.restarted
    assert not update.problems
    assert records_of(update) == list(range(3, 3 + steps))
    append(profile, step(9))
    assert records_of(tail.poll()) == [9]
    assert not tail.poll().records


@ROTATIONS
@pytest.mark.parametrize("segment", [1, 3])
def test_follower_rotation_to_later_segment(profile, tail, rotate, segment):
    rotate(profile, header(segment=segment) + step(1))
    update = tail.poll()
    assert (update.restarted, update.problems) == (False, ())
    assert records_of(update) == [f"segment {segment}", 1]


@ROTATIONS
@pytest.mark.parametrize("lead", [header(run_id="other"), HEADER], ids=["another run", "the same run repeated"])
def test_follower_rotation_to_other_run_resets(profile, tail, rotate, lead):
    rotate(profile, lead + step(1))
    update = tail.poll()
    assert (update.restarted, update.problems) == (True, ())
    assert records_of(update) == ["segment 0", 1]
    assert isinstance(update.records[0], Header)


@ROTATIONS
def test_follower_repeated_header_waits_for_steps(profile, tail, rotate):
    rotate(profile, HEADER)
    assert not tail.poll().records
    append(profile, step(1))
    update = tail.poll()
    assert update.restarted
    assert records_of(update) == ["segment 0", 1]


def test_follower_reads_renamed_file_to_its_end(profile, tail):
    writer = profile.open("a")
    os.rename(profile, profile.with_suffix(".1"))
    writer.write(step(3))
    writer.flush()
    assert records_of(tail.poll()) == [3]  # nothing stands at the path
    profile.touch()
    writer.write(step(4))
    writer.flush()
    assert records_of(tail.poll()) == [4]  # an empty file does, and the writer does not know it yet
    writer.write(step(5))
    writer.close()
    append(profile, step(6))
    update = tail.poll()
    assert (update.restarted, update.problems) == (False, ())
    assert records_of(update) == [5, 6]


def test_follower_incomplete_line_at_rotation_is_reported(profile, tail):
    append(profile, step(3)[:20])
    assert not tail.poll().problems
    rename(profile, step(4))
    update = tail.poll()
    assert records_of(update) == [4]
    assert [problem.path for problem in update.problems] == ["line 4"]
    assert "rotated before" in update.problems[0].message


def test_follower_line_numbers_restart_with_each_file(profile, tail):
    rename(profile, step(3) + "{}\n")
    assert [problem.path for problem in tail.poll().problems] == ["line 2.record"]
