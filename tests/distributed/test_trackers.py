"""Runs of two processes with Weights & Biases and MLflow, read back; and what a missing client ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.whole_runs import command, lines, write_data
from tests.documents.markdown import blocks
from tests.paths import ROOT
from tests.unit.dynmo_train.trainer.monitoring.tracking.wandb_files import read_offline

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]
GUIDE = ROOT / "dynmo_train" / "trainer" / "monitoring" / "README.md"


def bash(script, folder):
    # The programs of this environment, whatever PATH has.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The folder in which the block of the guide was run."""
    for name in ("wandb", "mlflow"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    folder = tmp_path_factory.mktemp("tracked")
    bash("dynmo-prep sample-corpus --output data/corpus.jsonl; dynmo-prep pipeline quickstart --work-dir data", folder)
    [block] = [each for each in blocks(GUIDE.read_text(encoding="utf-8")) if "WANDB_MODE" in each.text]
    done = bash(block.text, folder)
    assert "warning: Weights & Biases" not in done.stderr
    assert "warning: MLflow" not in done.stderr
    return folder


def steps_and_losses(run):
    return {line["step"]: line["lm_loss"] for line in lines(run / "metrics.jsonl") if "lm_loss" in line}


def test_wandb_continues_one_run_written_by_one_rank(tracked):
    run = tracked / "runs" / "tracked"
    found = [read_offline(path) for path in sorted(run.glob("wandb/offline-run-*/*.wandb"))]
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    assert [(each["id"], each["name"], each["exit_code"]) for each in found] == [(run_id, "tracked", 0)] * 2
    rows = [row for each in found for row in each["rows"] if "lm loss" in row]
    assert [row["iteration"] for row in rows] == [5, 10, 15, 20]
    losses = steps_and_losses(run)
    for row in rows:
        last = [losses[step] for step in range(row["iteration"] - 4, row["iteration"] + 1)]
        assert row["lm loss"] == pytest.approx(sum(last) / 5)
    assert any("lm loss validation ppl" in row for row in found[1]["rows"])
    assert [each["config"]["train_iters"] for each in found] == [10, 20]
    tables = sorted(run.glob("wandb/offline-run-*/files/media/table/*.json"), key=os.path.getmtime)
    messages = [row[-1] for row in json.loads(tables[-1].read_text())["data"]]
    assert messages == [event["message"] for event in lines(run / "events.jsonl")]


def test_mlflow_continues_one_run_written_by_one_rank(tracked, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    reader = mlflow.MlflowClient(tracking_uri=f"file:{tracked / 'runs' / 'mlflow'}")
    [found] = reader.search_runs([reader.get_experiment_by_name("dynmo").experiment_id])
    assert (found.info.run_name, found.info.status) == ("tracked", "FINISHED")
    assert found.data.params["train_iters"] == "10"
    assert found.data.tags["resumed.train_iters"] == "20"
    assert "saved step-00000020" in found.data.tags["mlflow.note.content"].splitlines()[0]
    history = reader.get_metric_history(found.info.run_id, "lm loss")
    losses = steps_and_losses(tracked / "runs" / "tracked")
    expected = {last: sum(losses[step] for step in range(last - 4, last + 1)) / 5 for last in (5, 10, 15, 20)}
    assert {each.step: each.value for each in history} == pytest.approx(expected)
    assert len(history) == 4


@pytest.mark.parametrize(("module", "option"), [("wandb", "--wandb-project"), ("mlflow", "--mlflow-experiment")])
def test_missing_client_ends_the_run_before_it_starts(tmp_path, module, option):
    # Found before an installed one.
    (tmp_path / f"{module}.py").write_text("raise ImportError\n")
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command(data, run, 2, option, "x"), env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    remedy = f"the module '{module}' is not installed; run: pip install 'dynmo-toolkit[{module}]'"
    assert done.stderr.count(remedy) == 1
    assert "Traceback" not in done.stderr
    assert not run.exists()
