"""The follower of a profile across rotation: rename and begin anew, and copy and cut."""

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


def told(news):
    return [record.step if isinstance(record, Step) else f"segment {record.segment}" for record in news.records]


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.jsonl"
    path.write_text(HEADER + step(1) + step(2))
    return path


@pytest.fixture
def tail(profile):
    """A follower that has read a header and two steps."""
    follower = ProfileFollower(profile)
    assert told(follower.poll()) == ["segment 0", 1, 2]
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
def test_the_segment_goes_on(profile, tail, rotate, lead, steps):
    rotate(profile, lead + "".join(map(step, range(3, 3 + steps))))
    news = tail.poll()
    assert not news.restarted
    assert not news.problems
    assert told(news) == list(range(3, 3 + steps))
    append(profile, step(9))
    assert told(tail.poll()) == [9]
    assert not tail.poll().records


@ROTATIONS
@pytest.mark.parametrize("segment", [1, 3])
def test_a_later_segment_of_the_run(profile, tail, rotate, segment):
    rotate(profile, header(segment=segment) + step(1))
    news = tail.poll()
    assert (news.restarted, news.problems) == (False, ())
    assert told(news) == [f"segment {segment}", 1]


@ROTATIONS
@pytest.mark.parametrize("lead", [header(run_id="other"), HEADER], ids=["another run", "the run anew"])
def test_what_does_not_go_on_starts_anew(profile, tail, rotate, lead):
    rotate(profile, lead + step(1))
    news = tail.poll()
    assert (news.restarted, news.problems) == (True, ())
    assert told(news) == ["segment 0", 1]
    assert isinstance(news.records[0], Header)


@ROTATIONS
def test_the_header_may_come_before_the_steps_that_decide(profile, tail, rotate):
    rotate(profile, HEADER)
    assert not tail.poll().records
    append(profile, step(1))
    news = tail.poll()
    assert news.restarted
    assert told(news) == ["segment 0", 1]


def test_the_renamed_file_is_read_to_its_end_first(profile, tail):
    writer = profile.open("a")
    os.rename(profile, profile.with_suffix(".1"))
    writer.write(step(3))
    writer.flush()
    assert told(tail.poll()) == [3]  # nothing stands at the path
    profile.touch()
    writer.write(step(4))
    writer.flush()
    assert told(tail.poll()) == [4]  # an empty file does, and the writer does not know it yet
    writer.write(step(5))
    writer.close()
    append(profile, step(6))
    news = tail.poll()
    assert (news.restarted, news.problems) == (False, ())
    assert told(news) == [5, 6]


def test_a_line_torn_by_the_rotation_is_told(profile, tail):
    append(profile, step(3)[:20])
    assert not tail.poll().problems
    rename(profile, step(4))
    news = tail.poll()
    assert told(news) == [4]
    assert [problem.path for problem in news.problems] == ["line 4"]
    assert "rotated before" in news.problems[0].message


def test_places_of_problems_count_from_the_file_they_are_in(profile, tail):
    rename(profile, step(3) + "{}\n")
    assert [problem.path for problem in tail.poll().problems] == ["line 2.record"]
