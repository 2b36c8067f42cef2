"""The directory of a new and of a resumed run, and its log files."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynmo_train._common.document import DocumentError, append_line
from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_document, config_of
from dynmo_train.formats.run import read_run, take_resize_request
from dynmo_train.formats.run_lines import append_metrics
from dynmo_train.launch.worker import LAUNCH_FILE_VARIABLE
from dynmo_train.trainer import run_directory
from dynmo_train.trainer.run_directory import (
    choose_path,
    open_run_directory,
    open_run_directory_on_rank0,
    source_commit,
)
from tests.tables import table

SMALL = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 4,
    "vocab_size": 10,
    "micro_batch_size": 1,
    "train_iters": 3,
    "lr": 0.1,
    "data_path": "corpus",
}
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def begin(**changes):
    return open_run_directory(config_of(**SMALL | changes), world_size=2, hosts=["a"], engine={"device": "cpu"})


def test_new_run_has_directories_and_configuration(tmp_path):
    run = begin(run_dir=str(tmp_path / "r"))
    assert sorted(entry.name for entry in run.path.iterdir()) == [
        *("checkpoints", "plans", "requests", "run.json", "run.lock")
    ]
    document = read_run(run.run_json)
    assert document["run_id"] == run.run_id
    assert (document["segment"], document["world_size"], document["hosts"]) == (0, 2, ["a"])
    assert document["engine"] == {"device": "cpu"}
    assert document["config"]["model"]["num_layers"] == 2
    assert (
        document["config_sources"]["model"] | {"num_layers": "flag", "ffn_hidden_size": "derived"}
        == (document["config_sources"]["model"])
    )
    config = config_of(**SMALL | {"run_dir": str(tmp_path / "r")})
    assert {name: document[name] for name in ("config", "config_sources")} == config_document(config)
    assert {"python", "dynmo", "torch", "numpy"} <= document["versions"].keys()


@table(
    ("text", "written"),
    [
        ("https://me:secret@track.example/x", "https://***@track.example/x"),
        ("0.5 s3://key:secret@b/a 0.5 b", "0.5 s3://***@b/a 0.5 b"),
        ("https://b.example/x?X-Amz-Signature=ab1&versionId=3", "https://b.example/x?X-Amz-Signature=***&versionId=3"),
        ("https://a.example/c?sig=ab%2B&access_token=q", "https://a.example/c?sig=***&access_token=***"),
        ("https://a.example/x?version=3", "https://a.example/x?version=3"),
        ("me@example.org?key=3", "me@example.org?key=3"),
    ],
)
def test_credentials_of_urls_are_not_written(text, written, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dynmo-train", f"--mlflow-tracking-uri={text}"])
    run = begin(run_dir=str(tmp_path / "r"), mlflow_tracking_uri=text)
    document = read_run(run.run_json)
    assert document["config"]["tracking"]["mlflow_tracking_uri"] == written
    assert document["command_line"] == ["dynmo-train", f"--mlflow-tracking-uri={written}"]
    others_may_read = run.run_json.stat().st_mode & 0o077
    assert not others_may_read or text == written


@pytest.mark.parametrize("other", ["missing", "another run"])
def test_run_directory_that_nodes_do_not_share_is_refused_at_the_start(tmp_path, monkeypatch, other):
    """Every rank saves its layers there: without a shared folder each save would fail, up to the last step."""
    there = begin(run_dir=str(tmp_path / "there")).path if other == "another run" else tmp_path / "there"
    views = {"node 0": [str(tmp_path / "r"), None, 0], "node 1": [str(there), "0" * 16, 0]}
    world, config = SimpleNamespace(is_rank0=True, size=1, host="h"), config_of(**SMALL, run_dir=str(tmp_path / "r"))
    monkeypatch.setattr(run_directory, "run_on_all_ranks", lambda _world, make: make())
    monkeypatch.setattr(run_directory, "broadcast_object", lambda _world, value: value)
    monkeypatch.setattr(run_directory.check_is_shared, "__defaults__", (0.0,))
    assert open_run_directory_on_rank0(world, config, hosts=["h"], engine={}).path == Path(views["node 0"][0])
    shutil.rmtree(tmp_path / "r")
    monkeypatch.setattr(run_directory, "broadcast_object", lambda _world, _value: views["node 1"])
    with pytest.raises(UsageError, match=r"on h is not the run directory of rank 0.* all nodes share"):
        open_run_directory_on_rank0(world, config, hosts=["h"], engine={})


def test_source_commit_is_of_the_clone_whatever_git_is_configured_to_do(tmp_path, monkeypatch):
    """Foreign configuration has no effect: neither the programs that it names nor another repository."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    marker, configuration, clone = tmp_path / "executed", tmp_path / ".gitconfig", tmp_path / "clone"
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *words, clone] if "init" in words else ["git", "-C", clone, *words], check=True)
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    subprocess.run(["git", "-C", clone, "config", "core.fsmonitor", f"touch {marker}"], check=True)
    configuration.write_text(f"[core]\n\tfsmonitor = touch {marker}\n")
    for name, value in {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": f"touch {marker}",
        "GIT_CONFIG_GLOBAL": str(configuration),
        "GIT_CONFIG_SYSTEM": str(configuration),
        "GIT_DIR": str(tmp_path),
        "GIT_EXTERNAL_DIFF": f"touch {marker}",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_directory, "__file__", str(clone / "dynmo_train/trainer/run_directory.py"))
    assert source_commit() == {"commit": commit.stdout.strip()}
    assert not marker.exists()
    # An installed package: no clone at its root, whatever is around it.
    monkeypatch.setattr(run_directory, "__file__", str(tmp_path / "site/dynmo_train/trainer/run_directory.py"))
    assert source_commit() == {}


def test_resumed_run_keeps_its_id_and_counts_segments(tmp_path):
    place = str(tmp_path / "r")
    first = begin(save=place)
    second = begin(save=place, load=place)
    third = begin(save=place, load=f"{place}/checkpoints/step-00000002")
    assert [run.segment for run in (first, second, third)] == [0, 1, 2]
    assert first.run_id == second.run_id == third.run_id
    assert read_run(third.run_json)["segment"] == 2


def test_directory_of_another_run_is_refused(tmp_path):
    place = str(tmp_path / "r")
    begin(run_dir=place)
    with pytest.raises(UsageError, match="already contains a run"):
        begin(run_dir=place)
    with pytest.raises(UsageError, match="already contains a run"):
        begin(run_dir=place, load=str(tmp_path / "elsewhere"))


def test_two_runs_have_different_ids(tmp_path):
    assert begin(run_dir=str(tmp_path / "a")).run_id != begin(run_dir=str(tmp_path / "b")).run_id


def test_run_directory_is_given_or_a_free_name():
    assert choose_path(config_of(**SMALL, run_dir="x"), NOON, Path.exists) == Path("x")
    assert choose_path(config_of(**SMALL, save="y"), NOON, Path.exists) == Path("y")
    taken = {Path("runs/20260131T120000Z-gpt"), Path("runs/20260131T120000Z-gpt-2")}
    assert choose_path(config_of(**SMALL), NOON, taken.__contains__) == Path("runs/20260131T120000Z-gpt-3")


def test_run_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the run directory"):
        begin(run_dir=str(tmp_path / "file" / "r"))


def test_log_files_are_json_lines(tmp_path):
    run = begin(run_dir=str(tmp_path / "r"))
    append_metrics(run.metrics, {"step": 1, "loss": 2.5})
    append_metrics(run.metrics, {"step": 2, "loss": float("nan")})
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None},
    ]
    append_line(run.events, run.event_record("plan_applied", "plan 1 moved 2 items", step=10, pause_ns=5))
    event = json.loads(run.events.read_text())
    assert event.pop("time_utc").endswith("Z")
    assert event == {"step": 10, "kind": "plan_applied", "message": "plan 1 moved 2 items", "pause_ns": 5}


def test_launcher_gets_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCH_FILE_VARIABLE, str(tmp_path / "run_directory"))
    run = begin(run_dir=str(tmp_path / "r"))
    assert (tmp_path / "run_directory").read_text() == str(run.path.resolve())


def test_resize_request_is_read_once(tmp_path):
    run = begin(run_dir=str(tmp_path / "r"))
    assert take_resize_request(run.path) is None
    (run.requests / "resize.json").write_text('{"workers": 4}')
    assert take_resize_request(run.path) == 4
    assert take_resize_request(run.path) is None


@pytest.mark.parametrize("text", ["", "4", '{"workers": 0}', '{"workers": 1.5}', "{}", '{"workers": 2, "more": 1}'])
def test_invalid_resize_request_is_refused(tmp_path, text):
    run = begin(run_dir=str(tmp_path / "r"))
    (run.requests / "resize.json").write_text(text)
    with pytest.raises(DocumentError, match=r"resize\.json"):
        take_resize_request(run.path)
