"""The follower of a profile across rotation: rename and restart, and copy and truncate."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from dynmo_balance.formats.profile import Header, Step, read_profile
from dynmo_balance.online import profile_follower
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


@pytest.mark.parametrize(
    ("num_newest", "expected"),
    [
        (2, ["segment 0", 6, 7]),  # the newest file; its first step is skipped
        (4, ["segment 0", 5, 6, 7]),  # the header is a line
        (5, ["segment 0", "event", 4, 5, 6, 7]),
        (100, ["segment 0", 1, 2, "event", 3, 4, 5, 6, 7]),
    ],
)
def test_start_reads_the_newest_records_only(tmp_path, num_newest, expected):
    path, copy = tmp_path / "profile.jsonl", header(x_continues=True)
    change = '{"record": "event", "step": 3, "kind": "pruned", "detail": {}, "next_expected_step": null}\n'
    (tmp_path / "profile.jsonl.1").write_text(HEADER + step(1) + step(2))
    (tmp_path / "profile.jsonl.2").write_text(copy + change + step(3) + step(4))
    path.write_text(copy + step(5) + step(6) + step(7))
    follower = ProfileFollower(path, num_newest=num_newest)
    records = follower.poll().records
    found = [(getattr(each, "kind", None) and "event") or getattr(each, "step", "segment 0") for each in records]
    assert found == expected
    assert follower.has_skipped == (num_newest < 100)
    append(path, step(8))
    assert records_of(follower.poll()) == [8]


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


def test_parts_of_a_rotated_profile_are_one_profile(tmp_path):
    path = tmp_path / "profile.jsonl"
    copy = header(x_continues=True)
    tmp_path.joinpath("profile.jsonl.3").write_text(HEADER + step(1))
    tmp_path.joinpath("profile.jsonl.4").write_text(copy + step(2))
    path.write_text(copy + step(3))
    follower = ProfileFollower(path)
    assert records_of(follower.poll()) == ["segment 0", 1, 2, 3]
    assert [len(segment.steps) for segment in read_profile(path)] == [3]
    # Two rotations between two polls; the second one was interrupted.
    append(path, step(4))
    os.rename(path, tmp_path / "profile.jsonl.5")
    tmp_path.joinpath("profile.jsonl.6").write_text(copy + step(5))
    update = follower.poll()
    assert (records_of(update), update.restarted, update.problems) == ([4, 5], False, ())
    path.write_text(copy + step(6))
    assert records_of(follower.poll()) == [6]
    # Without its oldest part the profile begins with a copy of the header.
    tmp_path.joinpath("profile.jsonl.3").unlink()
    assert records_of(ProfileFollower(path).poll()) == ["segment 0", 2, 3, 4, 5, 6]


def test_copy_of_another_segments_header_does_not_continue_a_segment(tmp_path):
    path = tmp_path / "profile.jsonl"
    path.write_text(HEADER + step(1) + header(x_continues=True, segment=1) + step(1))
    assert records_of(ProfileFollower(path).poll()) == ["segment 0", 1, "segment 1", 1]


def test_long_profile_is_read_in_batches(profile, monkeypatch):
    append(profile, "".join(map(step, range(3, 200))))
    whole = records_of(ProfileFollower(profile).poll())
    monkeypatch.setattr(profile_follower, "BATCH_BYTES", 2000)
    follower, found, polls = ProfileFollower(profile), [], 0
    has_more = True
    while has_more:
        left = follower.lines_left(1000) if found else 200
        assert left == 200 - len(found)
        update = follower.poll()
        found += records_of(update)
        has_more, polls = update.has_more, polls + 1
        assert len(update.records) < 20
    assert found == whole
    assert polls > 10


def test_line_without_end_is_dropped_in_bounded_memory(profile, monkeypatch):
    monkeypatch.setattr(profile_follower, "BATCH_BYTES", 2000)
    monkeypatch.setattr(profile_follower, "MAX_DOCUMENT_BYTES", 5000)
    append(profile, "x" * 100_000 + "\n" + step(3))
    follower, found, problems = ProfileFollower(profile), [], []
    for _ in range(100):
        update = follower.poll()
        found += records_of(update)
        problems += update.problems
    assert found == ["segment 0", 1, 2, 3]
    assert len(problems) == 1
