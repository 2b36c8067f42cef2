"""A checkpoint with a weight that the run's model does not have is refused by name."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from dynmo_ckpt.formats.checkpoint import seal
from tests.distributed.whole_runs import arguments, run_command, train, write_data
from tests.distributed.workers import run_workers
from tests.levels import complete_but
from tests.unit.dynmo_ckpt import native_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
EXTRA = "layers.0.attention.extra.weight"


def add_weight(checkpoint, role):
    """Add a weight to a manifest, stored where another one is."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    name = next(name for name in manifest["tensors"] if name.endswith("attention.norm.weight"))
    manifest["tensors"][EXTRA] = {**manifest["tensors"][name], "role": role}
    path.write_bytes(seal(manifest))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The data and the checkpoint of a run of two steps."""
    folder = tmp_path_factory.mktemp("saved")
    data = write_data(folder / "data")
    train(data, folder / "run", 1, train_iters="2", lr_decay_iters="2", eval_interval="2")
    return data, folder / "run" / "checkpoints" / "step-00000002"


def load(data, folder, checkpoint, *extra):
    """Resume in one process; its exit code and stderr."""
    options = {"train_iters": "3", "lr_decay_iters": "3", "eval_interval": "3"}
    words = arguments(data, folder / "run", "--load", str(checkpoint), *extra, **options)
    return run_workers(run_command, 1, words, joins=False)[0]


@pytest.mark.parametrize("role", complete_but(["parameter", "buffer"], "parameter"))
@pytest.mark.parametrize("options", complete_but([[], ["--finetune"], ["--no-load-optim"]], []))
def test_extra_weight_is_refused_by_name(saved, tmp_path, role, options):
    data, checkpoint = saved
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    add_weight(tmp_path / checkpoint.name, role)
    code, stderr = load(data, tmp_path, tmp_path / checkpoint.name, *options)
    assert code == 2, stderr
    assert f"has 1 weights that the model of this run does not have: '{EXTRA}'" in " ".join(stderr.split())


def test_unchanged_checkpoint_is_loaded(saved, tmp_path):
    data, checkpoint = saved
    code, stderr = load(data, tmp_path, checkpoint)
    assert code == 0, stderr


def open_for_evaluation(folder):
    """The message by which an evaluation refuses the checkpoint, on each rank; empty where it opens it."""
    from dynmo_train._common.errors import UsageError
    from dynmo_train.config.fields import values_of
    from dynmo_train.config.sections.evaluation import GenerateConfig, InferenceConfig
    from dynmo_train.evaluation.model_checkpoint import evaluation_world, open_causal_model

    size = int(os.environ["WORLD_SIZE"])
    options = {"load": str(folder), "device": "cpu", "pipeline_model_parallel_size": size}
    place = values_of(InferenceConfig, options)
    with evaluation_world(place, GenerateConfig(), size) as world:
        try:
            open_causal_model(place, world, {})
        except UsageError as error:
            return str(error)
        except SystemExit as end:
            return f"exit {end.code}"
    return ""


@pytest.mark.parametrize("layer", complete_but(range(4), 0))
def test_evaluation_refuses_the_weight_whatever_rank_checks_it(tmp_path, layer):
    m = native_checkpoints.model(num_layers=4, padded_vocab_size=36, max_position_embeddings=24)
    native_checkpoints.save(tmp_path / "native", native_checkpoints.parameters(m, seed=4), m)
    assert run_workers(open_for_evaluation, 2, tmp_path / "native", joins=False) == ["", ""]
    path = tmp_path / "native" / "manifest.json"
    manifest = json.loads(path.read_text())
    tensors = manifest["tensors"]
    tensors[f"layers.{layer}.mlp.extra.weight"] = dict(tensors["layers.0.mlp.norm.weight"])
    path.write_bytes(seal(manifest))
    first, second = run_workers(open_for_evaluation, 2, tmp_path / "native", joins=False)
    assert f"does not have: 'layers.{layer}.mlp.extra.weight'" in first
    assert second == "exit 2"
