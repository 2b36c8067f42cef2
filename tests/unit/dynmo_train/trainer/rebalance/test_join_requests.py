"""The join request of the launcher, as rank 0 reads it."""

from __future__ import annotations

import pytest

from dynmo_train._common.document import Problem
from dynmo_train.formats.run import encode_join_request, read_join_request, refused_join_file
from dynmo_train.trainer.rebalance.resize_requests import JoinRequests


@pytest.fixture
def events():
    return []


def requests(path, events, problems=()):
    return JoinRequests(
        path, lambda _: problems, lambda kind, message, **fields: events.append((kind, message, fields))
    )


def test_request_restarts_the_run_and_is_logged(tmp_path, events):
    path = tmp_path / "join.json"
    reader = requests(path, events)
    assert not reader.is_pending(4, 2)
    path.write_bytes(encode_join_request(3, 3))
    assert reader.is_pending(5, 2)
    message = "restart with 3 processes, because nodes join; the run has 2"
    assert events == [("join", message, {"step": 5, "processes": 3})]


def test_request_that_is_not_possible_is_logged_and_training_continues(tmp_path, events):
    path = tmp_path / "join.json"
    path.write_bytes(encode_join_request(3, 3))
    reader = requests(path, events, [Problem("--num-layers", "conflict", "must be at least 3")])
    assert not reader.is_pending(5, 2)
    assert not reader.is_pending(6, 2)
    assert read_join_request(refused_join_file(path)) == (3, 3)
    ((kind, message, _),) = events
    assert kind == "resize_refused"
    assert "--num-layers" in message


def test_size_of_the_command_is_not_checked_again(tmp_path, events):
    path = tmp_path / "join.json"
    path.write_bytes(encode_join_request(3, None))
    assert requests(path, events, [Problem("x", "conflict", "y")]).is_pending(5, 2)


def test_run_without_a_launcher_has_no_request(events):
    assert not requests(None, events).is_pending(5, 2)


@pytest.mark.parametrize("text", ["", "{", '{"processes": 0, "workers": 1}', '{"processes": 2}'])
def test_invalid_request_is_refused(tmp_path, events, text):
    path = tmp_path / "join.json"
    path.write_text(text)
    assert not requests(path, events).is_pending(5, 2)
    assert [kind for kind, *_ in events] == ["resize_refused"]
