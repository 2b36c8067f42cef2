"""The forward engine loads weights in the compute dtype, without gradients, and shares tied weights."""

from __future__ import annotations

import pytest
import torch

from dynmo_train._common.errors import UsageError
from dynmo_train.config.fields import values_of
from dynmo_train.config.sections.evaluation import InferenceConfig
from dynmo_train.evaluation.forward_engine import load_forward_engine
from dynmo_train.evaluation.model_checkpoint import ModelCheckpoint
from dynmo_train.formats.checkpoint import open_checkpoint
from dynmo_train.models.registry import family_of_manifest
from dynmo_train.parallel.process_groups import destroy_world, init_world
from tests.unit.dynmo_ckpt import native_checkpoints


@pytest.fixture
def source(tmp_path):
    model = native_checkpoints.model()
    native_checkpoints.save(tmp_path / "native", native_checkpoints.parameters(model, seed=4), model)
    checkpoint = open_checkpoint(tmp_path / "native")
    return ModelCheckpoint(checkpoint=checkpoint, family=family_of_manifest(checkpoint.manifest["model"]))


@pytest.fixture
def world():
    yield init_world("cpu")
    destroy_world()


def load(source, world, **options):
    inference = values_of(InferenceConfig, {"load": "unused", "device": "cpu"} | options)
    return load_forward_engine(source, inference, world, tokens=4)


@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16)])
def test_forward_engine_has_weights_of_the_compute_dtype_alone(source, world, options, dtype):
    engine = load(source, world, **options)
    parameters = [parameter for module in engine.modules.values() for parameter in module.parameters()]
    assert {(parameter.dtype, parameter.requires_grad) for parameter in parameters} == {(dtype, False)}
    stored = source.checkpoint.load(["layers.0.mlp.fc1.weight"])["layers.0.mlp.fc1.weight"]
    assert torch.equal(engine.modules["layers.0.mlp"].fc1.weight, stored.to(dtype))


def test_forward_engine_shares_tied_weights(source, world):
    engine = load(source, world)
    owner, copy = engine.modules["embedding"].word.weight, engine.modules["head"].weight
    assert copy.data_ptr() == owner.data_ptr()


def test_window_length_beyond_the_positions_is_refused(source):
    positions = source.model["max_position_embeddings"]
    assert source.window_length(None) == positions
    with pytest.raises(UsageError, match=f"has {positions} positions"):
        source.window_length(positions + 1)
