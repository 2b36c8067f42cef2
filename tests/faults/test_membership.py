"""A few episodes of the membership campaign, and its checks against faults of their own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.faults.membership_campaign import EpisodeError, check_history
from tests.faults.network_hosts import reason_to_skip
from tests.faults.stand_in_worker import digest, next_state, undisturbed
from tests.paths import ROOT

pytestmark = pytest.mark.complete

EPISODES, MINUTES = 3, 2


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_hosts_that_are_killed_drained_cut_and_return_are_members_again():
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    given = ["--episodes", str(EPISODES), "--minutes", str(MINUTES), "--seed", "1", "--trainer-every", "0"]
    command = [sys.executable, "-m", "tests.faults.membership_campaign", *given, "--parallel", str(EPISODES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"passed {EPISODES} | failed 0" in done.stdout


def test_undisturbed_state_is_that_of_ranks_which_add_their_parts():
    state = 7
    for step in (1, 2):
        parts = [digest(state, step, rank, 3) for rank in range(3)]
        state = next_state(state, step, 3, [sum(parts) % 2**64])
    assert undisturbed(7, 0, 2, 3) == state
    assert undisturbed(7, 0, 2, 2) != state


@pytest.fixture
def episode(tmp_path):
    """An episode with two rounds, of three hosts and then of two."""
    middle = undisturbed(0, 0, 20, 3)
    rounds = [
        {"step": 0, "state": 0, "hosts": ["0", "1", "2"], "round": 0},
        {"step": 20, "state": middle, "hosts": ["0", "2"], "round": 1},
    ]
    (tmp_path / "checkpoint.json").write_text(json.dumps([30, undisturbed(middle, 20, 30, 2)]))

    def write(rounds):
        (tmp_path / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rounds))

    write(rounds)
    return SimpleNamespace(folder=tmp_path, min_nodes=2, rounds=rounds, write=write, random=random.Random(0))


def test_history_without_a_fault_passes(episode):
    check_history(episode)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hosts": ["0", "0"]}, "a round with the hosts"),
        ({"hosts": ["0"]}, "a round with the hosts"),
        ({"hosts": ["0", "1", "2"]}, "the bits differ between step 20 and step 30"),
        ({"step": 19}, "the bits differ"),
        ({"state": 5}, "the bits differ between step 0 and step 20"),
    ],
)
def test_history_with_a_wrong_member_or_a_wrong_bit_is_found(episode, change, message):
    episode.write([episode.rounds[0], episode.rounds[1] | change])
    with pytest.raises(EpisodeError, match=message):
        check_history(episode)
