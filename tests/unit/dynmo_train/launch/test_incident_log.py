"""Incidents of a launch: what a failed round has lost, who caused it, and how restarts are counted."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime

import jsonschema
import pytest

from dynmo_train._common.document import WriterError
from dynmo_train.formats.incident import INCIDENT_KINDS, Incident
from dynmo_train.formats.run_lines import append_event
from dynmo_train.launch.exit_status import Failure
from dynmo_train.launch.incident_log import (
    Progress,
    death_incident,
    node_of_rank,
    read_progress,
    restart_environment,
    restart_incident,
    restarts_used,
    unrecorded_end,
    write_incident,
)
from dynmo_train.launch.run_lock import hold, release
from tests.paths import ROOT

SCHEMA = json.loads((ROOT / "dynmo_train/formats/run_lines.schema.json").read_text())["$defs"]["events.jsonl"]["anyOf"]
PROGRESS = Progress(step=130, checkpoint=100, saved_at=1000.0)


def incident_schema():
    return next(each for each in SCHEMA if each["title"] == "incident")


def test_incident_record_follows_the_schema():
    assert incident_schema()["properties"]["incident"]["enum"] == list(INCIDENT_KINDS)
    for kind in INCIDENT_KINDS:
        incident = Incident(
            incident=kind, message="m", cause="c", step=3, ranks=[1], hosts=["h"], phase="forward 2", stacks="logs"
        )
        jsonschema.validate(incident.record(datetime.now(UTC)), incident_schema())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"incident": "mishap"}, "incident: must be one of"),
        ({"ranks": [-1]}, "must be at least 0"),
        ({"seconds_lost": -1.0}, "seconds_lost: must be within"),
        ({"steps_lost": None}, "steps_lost: must be an integer"),
        ({"cause": ""}, "cause: must not be empty"),
    ],
)
def test_append_event_refuses_an_invalid_incident(tmp_path, change, words):
    record = Incident(incident="hang", message="m", cause="c", step=3).record(datetime.now(UTC))
    with pytest.raises(WriterError, match=words):
        append_event(tmp_path / "events.jsonl", record | change)
    assert not (tmp_path / "events.jsonl").exists()


def test_progress_counts_the_steps_after_the_newest_checkpoint(tmp_path):
    assert read_progress(tmp_path) == Progress(step=0, checkpoint=0, saved_at=None)
    folder = tmp_path / "checkpoints" / "step-00000100"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    os.utime(folder / "manifest.json", (1000, 1000))
    (tmp_path / "checkpoints" / "LATEST").write_text("step-00000100")
    lines = [json.dumps({"step": step, "lm_loss": 1.0}) for step in range(1, 131)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\nbroken\n{"step": 131')
    assert read_progress(tmp_path) == PROGRESS
    assert PROGRESS.steps_lost == 30


@pytest.mark.parametrize(
    ("restarts", "checkpoint", "at_restart", "expected"),
    [
        (0, 100, None, 0),
        (2, 100, 100, 2),  # no newer checkpoint: the failure repeats
        (2, 120, 100, 0),
        (2, 80, 100, 2),  # a damaged checkpoint was skipped
        (3, 0, 0, 3),
    ],
)
def test_restarts_are_reset_by_a_newer_checkpoint(restarts, checkpoint, at_restart, expected):
    assert restarts_used(restarts, checkpoint=checkpoint, checkpoint_of_restart=at_restart) == expected


def test_death_names_the_rank_that_ended_first_and_its_host():
    failures = [Failure(rank=0, code=1, log=""), Failure(rank=3, code=-9, log="")]
    incident = death_incident(failures, [], {0: "a", 3: "b"}, PROGRESS, 12.5)
    assert (incident.incident, incident.ranks, incident.hosts) == ("process_death", [3], ["b"])
    assert incident.cause == "killed by SIGKILL"
    assert incident.message == ("rank 3 on b was killed by SIGKILL; lost 30 steps and 12.5 s since the last checkpoint")
    assert (incident.steps_lost, incident.seconds_lost) == (30, 12.5)


@pytest.mark.parametrize(
    ("events", "step", "environment", "is_found"),
    [
        ([], 12, {}, True),
        ([("2026-01-02T00:00:01Z", "checkpoint", {})], 12, {}, True),
        ([("2026-01-02T00:00:01Z", "stopped", {})], 12, {}, False),
        ([("2026-01-01T23:00:00Z", "stopped", {})], 12, {}, True),  # of an earlier start
        ([("2026-01-02T00:00:01Z", "incident", {"incident": "node_loss"})], 12, {}, False),
        ([("2026-01-02T00:00:01Z", "incident", {"incident": "restart"})], 12, {}, True),
        ([], 20, {}, False),  # complete
        ([], 0, {}, False),
        ([], 12, restart_environment("a process failed"), False),  # the launcher has recorded it
        ([], 12, {"DYNMO_GENERATION": "1"}, False),  # the others have continued
        ([], 12, {"lock": "held"}, False),
    ],
)
def test_start_killed_with_its_launcher_is_recorded_by_the_next_one(tmp_path, events, step, environment, is_found):
    if step:
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        os.utime(tmp_path / "metrics.jsonl", (1767312010.0, 1767312010.0))
    for time_utc, kind, detail in events:
        record = {"time_utc": time_utc, "step": 1, "kind": kind, "message": "m", **detail}
        (tmp_path / "events.jsonl").write_text(json.dumps(record) + "\n")
    before = {
        "created_utc": "2026-01-02T00:00:00Z",
        "config": {"training": {"train_iters": 20}},
        "hosts": ["a", "b"],
    }
    lock = hold(tmp_path) if "lock" in environment else None
    incident = unrecorded_end(tmp_path, before, environment)
    release(lock)
    assert (incident is not None) == is_found
    if incident is not None:
        assert (incident.step, incident.steps_lost, incident.seconds_lost, incident.hosts) == (12, 12, 10.0, ["a"])
        assert incident.message.endswith("lost 12 steps and 10.0 s since the last checkpoint")


def test_lost_node_is_an_incident_of_its_host():
    incident = death_incident([Failure(rank=0, code=1, log="")], ["host3"], {0: "a"}, PROGRESS, 1.0)
    assert (incident.incident, incident.hosts, incident.ranks) == ("node_loss", ["host3"], ())


def test_node_of_rank_follows_the_processes_of_the_nodes():
    assert [node_of_rank(rank, (2, 1, 3)) for rank in range(6)] == [0, 0, 1, 2, 2, 2]


def test_restart_counts_the_pause_since_the_failure():
    environment = restart_environment("a process failed")
    since = json.loads(environment["DYNMO_RESTART"])["since"]
    incident = restart_incident(environment, 100, since + 7.25)
    assert (incident.incident, incident.step, incident.cause) == ("restart", 100, "a process failed")
    assert incident.seconds_lost == pytest.approx(7.25)
    assert restart_incident({}, 100, since) is None
    assert restart_incident({"DYNMO_RESTART": "{"}, 100, since) is None


def test_incident_on_a_full_disk_is_a_warning(tmp_path, capsys):
    (tmp_path / "events.jsonl").mkdir()
    write_incident(tmp_path, Incident(incident="hang", message="rank 1 hangs", cause="c", step=3))
    assert "cannot write an incident" in capsys.readouterr().err
