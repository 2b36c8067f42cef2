"""Runs of MLflow's own client in a folder, read back by it; and what happens without a client or a database."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest

from dynmo_train._common.errors import EXIT_RELAUNCH, MissingExtraError, UsageError
from dynmo_train.trainer.monitoring.tracking.mlflow_client import MlflowClient, MlflowRun, check_mlflow
from dynmo_train.trainer.monitoring.tracking.tracker_thread import ScalarRecord

RECORDS = [
    ScalarRecord(step=2, time_s=1.0, scalars={"lm loss": 2.5, "lm loss validation ppl": 12.5, "a@b": 1.0}),
    ScalarRecord(step=4, time_s=2.0, scalars={"lm loss": float("nan")}),
]


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return pytest.importorskip("mlflow", reason="mlflow is not installed")


def client(folder, experiment="experiment", segment=0, **config):
    run = MlflowRun(
        tracking_uri=f"file:{folder / 'store'}",
        experiment=experiment,
        name="first",
        tags={"dynmo.segment": str(segment)},
        id_file=folder / "mlflow.json",
    )
    events = folder / "events.jsonl"
    events.write_text('{"step": 4, "message": "plan 1 applied"}\n')
    return MlflowClient(run, config, events)


def runs(mlflow, folder, experiment="experiment"):
    reader = mlflow.MlflowClient(tracking_uri=f"file:{folder / 'store'}")
    return reader, reader.search_runs([reader.get_experiment_by_name(experiment).experiment_id])


def test_run_has_scalars_options_and_events(mlflow, tmp_path):
    writer = client(tmp_path, train_iters=24, load=None, **{f"option_{number}": number for number in range(250)})
    writer.start()
    writer.write(RECORDS)
    writer.write_events([{"step": 2, "message": "frozen"}, {"step": 4, "message": "plan 1 applied"}])
    writer.finish(0)
    reader, [found] = runs(mlflow, tmp_path)
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert len(found.data.params) == 252
    assert (found.data.params["train_iters"], found.data.params["load"]) == ("24", "None")
    losses = reader.get_metric_history(found.info.run_id, "lm loss")
    assert [(each.step, each.timestamp) for each in losses] == [(2, 1000), (4, 2000)]
    assert losses[0].value == 2.5
    assert math.isnan(losses[1].value)
    assert {"lm loss validation ppl": 12.5, "a_b": 1.0}.items() <= found.data.metrics.items()
    assert found.data.tags["mlflow.note.content"] == "* step 4: plan 1 applied\n* step 2: frozen"
    assert [each.path for each in reader.list_artifacts(found.info.run_id)] == ["events.jsonl"]


def test_resumed_run_continues_the_same_run(mlflow, tmp_path):
    for segment, iters in enumerate((12, 24)):
        writer = client(tmp_path, segment=segment, train_iters=iters, lr=0.1)
        writer.start()
        assert runs(mlflow, tmp_path)[1][0].info.status == "RUNNING"
        writer.write([ScalarRecord(step=iters, time_s=1.0, scalars={"lm loss": 2.5})])
        writer.finish(None if iters == 12 else 0)
    reader, [found] = runs(mlflow, tmp_path)
    assert json.loads((tmp_path / "mlflow.json").read_text())["run_id"] == found.info.run_id
    assert [each.step for each in reader.get_metric_history(found.info.run_id, "lm loss")] == [12, 24]
    # MLflow refuses another value of a parameter.
    assert found.data.params == {"train_iters": "12", "lr": "0.1"}
    assert {"dynmo.segment": "1", "resumed.train_iters": "24"}.items() <= found.data.tags.items()
    assert "resumed.lr" not in found.data.tags
    assert found.info.status == "FINISHED"


def test_new_run_where_the_earlier_one_is_gone(mlflow, tmp_path):
    client(tmp_path).start()
    reader, [first] = runs(mlflow, tmp_path)
    reader.delete_run(first.info.run_id)
    client(tmp_path).start()
    _, [second] = runs(mlflow, tmp_path)
    assert second.info.run_id != first.info.run_id
    client(tmp_path, experiment="other").start()
    _, [third] = runs(mlflow, tmp_path, "other")
    assert third.info.run_id not in (first.info.run_id, second.info.run_id)
    id_file = tmp_path / "mlflow.json"
    id_file.write_text(json.dumps(json.loads(id_file.read_text()) | {"run_id": "0"}))
    client(tmp_path, experiment="other").start()
    assert len(runs(mlflow, tmp_path, "other")[1]) == 2


@pytest.mark.parametrize(
    ("exit_code", "status"),
    [(0, "FINISHED"), (None, "FAILED"), (3, "FAILED"), (143, "KILLED"), (EXIT_RELAUNCH, "KILLED")],
)
def test_status_follows_from_the_exit_code(mlflow, tmp_path, exit_code, status):
    writer = client(tmp_path)
    writer.start()
    assert runs(mlflow, tmp_path)[1][0].info.status == "RUNNING"
    writer.finish(exit_code)
    assert runs(mlflow, tmp_path)[1][0].info.status == status


def test_server_that_is_away_raises_and_starts_no_second_run(mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = "http://127.0.0.1:9"
    document = {"tracking_uri": uri, "experiment": "experiment", "run_id": "1"}
    (tmp_path / "mlflow.json").write_text(json.dumps(document))
    run = MlflowRun(tracking_uri=uri, experiment="experiment", name="first", tags={}, id_file=tmp_path / "mlflow.json")
    writer = MlflowClient(run, {}, tmp_path / "events.jsonl")
    with pytest.raises(mlflow.MlflowException, match=r"runs/get.*Connection"):
        writer.start()
    assert json.loads((tmp_path / "mlflow.json").read_text()) == document


def test_missing_client_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"'mlflow' is not installed; run: pip install 'dynmo-\w+\[mlflow\]'"):
        check_mlflow(None)


def test_database_without_the_whole_of_mlflow_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(get_tracking_uri=lambda: "sqlite:///mlflow.db"))
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(UsageError, match=r"sqlite:///mlflow.db: a database needs the whole of MLflow; run: pip"):
        check_mlflow(None)
    with pytest.raises(UsageError, match="needs the whole of MLflow"):
        check_mlflow("postgresql+psycopg://server/db")
    check_mlflow("http://server")
    check_mlflow("/folder")
