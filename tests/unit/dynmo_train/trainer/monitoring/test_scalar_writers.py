"""Which writers the options name, and with which names."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dynmo_train._common.errors import MissingExtraError
from dynmo_train.config import config_of
from dynmo_train.trainer.monitoring import scalar_writers
from dynmo_train.trainer.monitoring.scalar_writers import check_clients, named_options, scalar_writers_on_rank0
from dynmo_train.trainer.run_directory import RunDirectory
from tests.unit.dynmo_train.config.small_config import SMALL


@pytest.fixture
def made(monkeypatch):
    """The arguments of the clients that are made, by their name."""
    found = {}
    monkeypatch.setattr(scalar_writers, "run_on_all_ranks", lambda _world, make: make())
    monkeypatch.setattr(scalar_writers, "TrackerThread", lambda client, events: (client, events))
    for name in ("WandbClient", "MlflowClient"):
        monkeypatch.setattr(scalar_writers, name, lambda *words, name=name: found.update({name: words}) or name)
    return found


def writers(tmp_path, *, rank0=True, **options):
    directory = RunDirectory(path=tmp_path / "first", run_id="0123456789abcdef", segment=1)
    return scalar_writers_on_rank0(SimpleNamespace(is_rank0=rank0), config_of(**SMALL, **options), directory, step=2)


def test_no_writers_without_options(tmp_path, made):
    assert writers(tmp_path) == []
    assert made == {}


def test_names_are_those_of_the_run_directory(tmp_path, made):
    events = tmp_path / "first" / "events.jsonl"
    found = writers(tmp_path, wandb_project="p", mlflow_experiment="e")
    assert found == [("WandbClient", events), ("MlflowClient", events)]
    names, options = made["WandbClient"]
    assert (names.project, names.name, names.entity) == ("p", "first", None)
    assert (names.run_id, names.folder) == ("0123456789abcdef", tmp_path / "first")
    assert {"lr": SMALL["lr"], "wandb_project": "p", "tensorboard_dir": None}.items() <= options.items()
    place, _, log = made["MlflowClient"]
    assert (place.tracking_uri, place.experiment, place.name) == (None, "e", "first")
    assert place.tags == {"dynmo.run_id": "0123456789abcdef", "dynmo.segment": "1"}
    assert (place.id_file, log) == (tmp_path / "first" / "mlflow.json", events)


def test_names_are_those_of_the_options(tmp_path, made):
    wandb = {"wandb_project": "p", "wandb_exp_name": "n", "wandb_entity": "team", "wandb_save_dir": "w"}
    mlflow = {"mlflow_experiment": "e", "mlflow_run_name": "m", "mlflow_tracking_uri": "http://server"}
    writers(tmp_path, **wandb, **mlflow)
    names = made["WandbClient"][0]
    assert (names.name, names.entity, str(names.folder)) == ("n", "team", "w")
    place = made["MlflowClient"][0]
    assert (place.name, place.tracking_uri) == ("m", "http://server")


def test_other_ranks_have_no_writers(tmp_path, made):
    assert writers(tmp_path, rank0=False, wandb_project="p", tensorboard_dir=str(tmp_path / "board")) == []
    assert made == {}
    assert not (tmp_path / "board").exists()


@pytest.mark.parametrize(("module", "option"), [("wandb", "wandb_project"), ("mlflow", "mlflow_experiment")])
def test_clients_are_imported_only_where_an_option_names_them(monkeypatch, module, option):
    monkeypatch.setitem(sys.modules, module, None)
    check_clients(config_of(**SMALL))
    with pytest.raises(MissingExtraError):
        check_clients(config_of(**SMALL, **{option: "x"}))


def test_option_names_are_unique():
    config = config_of(**SMALL)
    assert named_options(config)["num_layers"] == SMALL["num_layers"]
    assert len(named_options(config)) > 150
