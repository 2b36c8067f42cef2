"""The names of a classifier's classes stay in the manifest through every command that writes one."""

import json
import sys

import numpy as np
import pytest

from dynmo_ckpt.cli import main
from dynmo_ckpt.huggingface.models import hf_config
from dynmo_ckpt.huggingface.source_config import export_config, source_of, with_class_names
from tests.unit.dynmo_ckpt import families, native_checkpoints

NAMES = ["contradiction", "entailment", "neutral"]
SOURCE = {
    "format": "huggingface",
    "config": {"model_type": "megatron-bert", "eos_token_id": 5},
    "generation_config": None,
}


def classifier(count):
    return families.bert(binary_head=False, tied_embeddings=False, task_head="classification", num_classes=count)


@pytest.mark.parametrize("hidden", [16, 32])
def test_with_class_names_replaces_imported_labels(hidden):
    """Where the source's configuration describes the model (16), and where only its irrelevant keys are kept (32)."""
    model = classifier(3)
    theirs = {f"LABEL_{at}": at for at in range(3)}
    labels = {"id2label": {str(at): name for name, at in theirs.items()}, "label2id": theirs}
    config = {**hf_config(model, "float32", None), **labels, "hidden_size": hidden}
    carried = export_config(source_of(config, None), model, hf_config(model, "float32", None))
    found = with_class_names(carried, {"model": model, "x_class_names": NAMES})
    assert found["id2label"] == {str(at): name for at, name in enumerate(NAMES)}
    assert found["label2id"] == {name: at for at, name in enumerate(NAMES)}
    assert "num_labels" not in found


@pytest.mark.parametrize("names", [NAMES[:2], [*NAMES, "other"], ["a", "a", "b"], [1, 2, 3], "abc", 3, None])
def test_with_class_names_of_other_number_keeps_config(names):
    model = classifier(3)
    config = hf_config(model, "float32", None)
    assert with_class_names(config, {"model": model, "x_class_names": names}) == config


def test_export_config_of_another_head_drops_labels():
    model = classifier(3)
    config = {**hf_config(classifier(2), "float32", None), "id2label": {"0": "no", "1": "yes"}}
    config |= {"label2id": {"no": 0, "yes": 1}, "eos_token_id": 7}
    found = export_config(source_of(config, None), model, hf_config(model, "float32", None))
    assert (found["num_labels"], found["eos_token_id"]) == (3, 7)
    assert not {"id2label", "label2id"} & set(found)


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*args):
        monkeypatch.setattr(sys, "argv", ["dynmo-ckpt", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        done = capsys.readouterr()
        assert not stop.value.code, done.out + done.err

    return call


def test_convert_keeps_class_names_and_source_in_manifest(run, tmp_path):
    """Also after several commands, and they reach the configuration that is exported in the end."""
    m = families.bert(binary_head=False, tied_embeddings=False, task_head="classification", num_classes=3)
    weights = families.parameters(m | {"binary_head": True})
    weights = {name: value for name, value in weights.items() if name not in ("head.weight", "head.bias")}
    weights = {name: value for name, value in weights.items() if not name.startswith(("head.dense", "head.binary"))}
    weights |= {"head.classification.weight": np.ones((3, m["hidden_size"]), np.float32)}
    weights |= {"head.classification.bias": np.zeros(3, np.float32)}
    stages = native_checkpoints.even_stages(m, 2)
    native_checkpoints.save(tmp_path / "in", weights, m, partition=stages, x_class_names=NAMES, source=SOURCE)
    run("merge", tmp_path / "in", tmp_path / "merged")
    run("reshard", tmp_path / "merged", tmp_path / "resharded", "--tp", "2", "--pp", "2")
    run("split", tmp_path / "resharded", tmp_path / "split", "--pp", "3")
    run("convert", tmp_path / "split", tmp_path / "converted", "--to", "native")
    for name in ("merged", "resharded", "split", "converted"):
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert manifest["x_class_names"] == NAMES, name
        assert manifest["source"]["config"]["eos_token_id"] == 5, name
    run("convert", tmp_path / "converted", tmp_path / "hf", "--to", "hf", "--no-check-logits")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert list(config["id2label"].values()) == NAMES
    assert config["eos_token_id"] == 5
