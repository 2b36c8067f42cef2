"""Host memory for checkpoints that are written while training continues, and checks of the stored model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dynmo_train.formats.checkpoint import CheckpointError
from dynmo_train.trainer.checkpoint.engine_checkpoint import HostBuffers, check_same_model
from tests.distributed.families import SAMPLES


def test_host_buffer_with_more_rows_is_reused():
    buffers = HostBuffers()
    buffers.allocate({"word": (torch.Size([128, 3]), torch.float32), "count": (torch.Size([]), torch.float32)})
    allocated = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    for value in (1.0, 2.0):
        stored = buffers.copy("word", torch.full((97, 3), value))
        assert stored.shape == (97, 3)
        assert stored.is_contiguous()
        assert stored.eq(value).all()
        assert stored.data_ptr() == allocated["word"]
    assert buffers.copy("count", torch.tensor(4.0)).data_ptr() == allocated["count"]


def test_host_buffer_of_another_shape_or_dtype_is_replaced():
    buffers = HostBuffers()
    buffers.allocate({"weight": (torch.Size([4, 3]), torch.float32)})
    for tensor in (torch.ones(5, 3), torch.ones(4, 2), torch.ones(4), torch.ones(4, 3, dtype=torch.bfloat16)):
        assert torch.equal(buffers.copy("weight", tensor), tensor)


def mixtral(policy):
    family = SAMPLES["mixtral"].family
    return type(family)(replace(family.shape, moe=replace(family.shape.moe, drop_policy=policy)))


def checkpoint_of(model):
    return SimpleNamespace(manifest={"model": model, "optimizer": {}}, directory="step-1")


def test_check_same_model_accepts_manifests_without_a_drop_policy():
    """Earlier versions wrote none, and dropped the tokens of the lowest probability."""
    model = mixtral("probs").manifest()
    del model["moe_token_drop_policy"]
    check_same_model(checkpoint_of(model), mixtral("probs"))
    with pytest.raises(CheckpointError, match="moe_token_drop_policy is None there and 'position' here"):
        check_same_model(checkpoint_of(model), mixtral("position"))
    check_same_model(checkpoint_of(model), mixtral("position"), resumes=False)


def test_check_same_model_refuses_what_the_run_does_not_have():
    """The weights of these would be left out without a message."""
    family = SAMPLES["llama"].family
    stored = type(family)(replace(family.shape, qk_norm="head", norm_placement="sandwich")).manifest()
    message = "norm_placement is 'sandwich' there and not here; qk_norm is 'head' there and not here"
    with pytest.raises(CheckpointError, match=message):
        check_same_model(checkpoint_of(stored), family)
    check_same_model(checkpoint_of(family.manifest()), family)
