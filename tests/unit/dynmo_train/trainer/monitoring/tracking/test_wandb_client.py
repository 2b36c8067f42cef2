"""Offline runs of W&B's own client, read back; and what happens without a client, a login or a network."""

from __future__ import annotations

import json
import sys

import pytest

from dynmo_train._common.errors import MissingExtraError
from dynmo_train.trainer.monitoring.tracking.tracker_thread import ScalarRecord
from dynmo_train.trainer.monitoring.tracking.wandb_client import WandbClient, WandbRun, check_wandb
from tests.unit.dynmo_train.trainer.monitoring.tracking.wandb_files import read_offline
from tests.waiting import wait_for

RECORDS = [
    ScalarRecord(step=2, time_s=1.0, scalars={"lm loss": 2.5, "learning-rate": 1e-3}),
    ScalarRecord(step=4, time_s=2.0, scalars={"lm loss": float("nan")}),
    # Repeated after a resume from an older checkpoint.
    ScalarRecord(step=2, time_s=3.0, scalars={"lm loss": 2.25}),
]
EVENTS = [{"time_utc": "2026-11-23T12:00:00Z", "step": 4, "kind": "migration", "message": "plan 1 applied", "bytes": 5}]


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    # The client looks for an API key in the home folder, and asks for none without a terminal.
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    module = pytest.importorskip("wandb", reason="wandb is not installed")
    yield module
    module.teardown()


def client(folder, **config):
    names = WandbRun(project="project", name="first", entity="team", run_id="0123456789abcdef", folder=folder)
    return WandbClient(names, config)


def offline_runs(folder):
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    # The process of the client writes the last records after ``finish`` has returned.
    wait_for(lambda: all("exit_code" in read_offline(path) for path in paths), "the end of the file")
    return [read_offline(path) for path in paths]


def test_offline_run_has_scalars_options_and_events(wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = client(tmp_path / "run", train_iters=24, load=None, freeze_schedule=[[10, 3]])
    writer.start()
    writer.write(RECORDS)
    writer.write_events(EVENTS)
    writer.finish(0)
    [found] = offline_runs(tmp_path / "run")
    assert (found["id"], found["project"], found["name"], found["exit_code"]) == (
        "0123456789abcdef",
        "project",
        "first",
        0,
    )
    assert found["entity"] == "team"
    assert {"train_iters": 24, "load": None, "freeze_schedule": [[10, 3]]}.items() <= found["config"].items()
    assert found["metrics"] == {"iteration": "", "*": "iteration"}
    rows = [(row["iteration"], str(row["lm loss"]), row["_timestamp"]) for row in found["rows"][:3]]
    assert rows == [(2, "2.5", 1.0), (4, "nan", 2.0), (2, "2.25", 3.0)]
    assert found["rows"][0]["learning-rate"] == 1e-3
    [table] = (tmp_path / "run").glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["time_utc", "step", "kind", "message"],
        "data": [["2026-11-23T12:00:00Z", 4, "migration", "plan 1 applied"]],
    }
    # Nothing of the client is in the training log or between its messages.
    assert capsys.readouterr() == ("", "")


@pytest.mark.complete
def test_resumed_run_has_the_same_id_and_new_options(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for iters in (12, 24):
        writer = client(tmp_path / str(iters), train_iters=iters)
        writer.start()
        writer.finish(None if iters == 12 else 0)
    [first], [second] = offline_runs(tmp_path / "12"), offline_runs(tmp_path / "24")
    assert first["id"] == second["id"]
    assert [first["config"]["train_iters"], second["config"]["train_iters"]] == [12, 24]
    assert [first["exit_code"], second["exit_code"]] == [1, 0]


@pytest.mark.complete
def test_run_without_login_is_written_offline(wandb, tmp_path, capsys):
    writer = client(tmp_path / "run")
    writer.start()
    writer.write(RECORDS)
    writer.finish(0)
    [found] = offline_runs(tmp_path / "run")
    assert len(found["rows"]) == 3
    message = capsys.readouterr().err
    assert "warning: Weights & Biases: not logged in: run `wandb login`, or set WANDB_API_KEY" in message
    [folder] = (tmp_path / "run").glob("wandb/offline-run-*")
    assert f"wandb sync {folder}" in message


@pytest.mark.complete
def test_run_without_network_is_written_offline(wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    # Port 9 of this machine refuses connections.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    writer = client(tmp_path / "run")
    writer.start()
    writer.write(RECORDS)
    writer.finish(0)
    [found] = offline_runs(tmp_path / "run")
    assert len(found["rows"]) == 3
    assert "the run is written offline" in capsys.readouterr().err


def test_missing_client_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"'wandb' is not installed; run: pip install 'dynmo-toolkit\[wandb\]'"):
        check_wandb()
