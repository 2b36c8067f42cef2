"""A short selection of the fault campaign, and its checks against results that are wrong on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.faults import campaign_episode, mounts
from tests.faults.campaign_episode import Episode, LostError, Reference
from tests.faults.campaign_faults import FAULTS, pairs
from tests.faults.campaign_workloads import WORKLOADS
from tests.faults.fault_campaign import draw, table
from tests.faults.forked_programs import descendants
from tests.paths import ROOT


def campaign(*words: str) -> str:
    """The output of a campaign in which nothing may be lost."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.fault_campaign", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.complete
@pytest.mark.distributed
def test_random_faults_of_training_data_and_checkpoints_lose_nothing():
    names = ("train-async", "prep-merge", "prep-dedup", "ckpt-merge")
    words = [word for name in names for word in ("--workload", name)]
    output = campaign("--seed", "1", "--minutes", "0.8", "--episodes", "12", "--parallel", "2", *words)
    assert "| 0 |" in output.splitlines()[-1]


def test_power_loss_during_a_conversion_leaves_nothing_that_is_not_whole():
    if (reason := mounts.reason_to_skip()) is not None:
        pytest.skip(reason)
    output = campaign("--kind", "power loss", "--workload", "ckpt-merge", "--minutes", "0.5", "--episodes", "4")
    assert "power loss" in output


def test_draws_are_those_of_the_seed_and_reach_every_fault():
    choices = [(fault, workload) for fault in FAULTS for workload in WORKLOADS.values() if fault.applies(workload)]
    drawn = [draw(choices, 3, number) for number in range(len(FAULTS))]
    assert drawn == [draw(choices, 3, number) for number in range(len(FAULTS))]
    assert {fault.name for fault, _ in drawn} == {fault.name for fault in FAULTS}
    assert drawn != [draw(choices, 4, number) for number in range(len(FAULTS))]


def test_kinds_select_faults_by_a_part_of_their_name():
    assert {fault.name for fault, _ in pairs(["SIGTERM", "clock"])} == {"SIGTERM of any process", "clock jumps"}


def test_table_counts_tries_and_what_was_lost():
    one = {"fault": "clock jumps", "workload": "prep-merge", "tries": 3, "problem": ""}
    rows = table([one, one | {"workload": "ckpt-merge", "problem": "bits differ"}]).splitlines()
    assert rows[2] == "| clock jumps | ckpt, prep | 2 | 6 | 5 | 1 |"
    assert rows[-1] == "| all | | 2 | 6 | 5 | 1 |"


@pytest.fixture
def episode(tmp_path, monkeypatch):
    """An episode of ``merge`` whose undisturbed run leaves ``out.jsonl`` with one row."""
    # Processes of other tests in this process are not the episode's: it must neither wait for them nor kill them.
    before = {each.pid for each in descendants()}
    monkeypatch.setattr(
        campaign_episode, "descendants", lambda: [each for each in descendants() if each.pid not in before]
    )
    monkeypatch.setattr(campaign_episode, "end_descendants", lambda: None)
    place = tmp_path / "work"
    place.mkdir()
    (place / "out.jsonl").write_text("row\n")
    workload = WORKLOADS["prep-merge"]
    reference = Reference(result=workload.result(place), cpu_s=1.0, file_calls=0, num_bytes=4)
    return Episode(
        workload=workload,
        folder=tmp_path,
        place=place,
        inputs=tmp_path,
        half_run=tmp_path,
        random=Random(0),
        references={workload.name: reference},
        limit_s=1.0,
    )


def ended(episode: Episode, code: int, text: str, signal_number: int = 0) -> None:
    """Let the episode wait for a process that printed ``text`` and ended."""
    pid = os.fork()
    if not pid:
        if signal_number:
            os.kill(os.getpid(), signal_number)
        os._exit(code)
    episode.logs = {pid: episode.folder / "log"}
    episode.logs[pid].write_text(text)


def test_episode_with_the_bits_of_the_undisturbed_run_passes(episode):
    ended(episode, 0, "done")
    assert episode.wait() == [0]
    episode.check_committed()
    episode.compare()


@pytest.mark.parametrize("content", ["", "ro", "Row\n"])
def test_output_that_differs_is_lost(episode, content):
    (episode.place / "out.jsonl").write_text(content)
    with pytest.raises(LostError, match=r"out\.jsonl has its final name and differs"):
        episode.check_committed()
    with pytest.raises(LostError, match=r"1 of 1 bits differ, the first is out\.jsonl"):
        episode.compare()


@pytest.mark.parametrize(
    ("code", "text", "signal_number", "message"),
    [
        (1, "Traceback (most recent call last):\n  ...\nKeyError: 3", 0, "traceback: KeyError: 3"),
        (1, "", 0, "exit code 1 without a message"),
        (0, "done", signal.SIGKILL, "ended by signal 9, which nobody sent"),
    ],
)
def test_end_that_a_user_must_not_see_is_lost(episode, code, text, signal_number, message):
    ended(episode, code, text, signal_number)
    with pytest.raises(LostError, match=message):
        episode.wait()


def test_command_that_does_not_end_is_lost(episode):
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    episode.logs = {pid: Path(os.devnull)}
    try:
        with pytest.raises(LostError, match="hang: the command does not end within 1 s"):
            episode.wait()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
