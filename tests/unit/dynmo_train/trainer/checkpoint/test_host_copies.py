"""Copies for checkpoints that are written while training continues."""

from __future__ import annotations

import torch

from dynmo_train.trainer.checkpoint.engine_checkpoint import HostBuffers


def test_prepared_copy_with_more_rows_is_used_for_the_rows_that_are_stored():
    copies = HostBuffers()
    copies.prepare({"word": (torch.Size([128, 3]), torch.float32), "count": (torch.Size([]), torch.float32)})
    prepared = {name: tensor.data_ptr() for name, tensor in copies._held.items()}
    for value in (1.0, 2.0):
        stored = copies.of("word", torch.full((97, 3), value))
        assert stored.shape == (97, 3)
        assert stored.is_contiguous()
        assert stored.eq(value).all()
        assert stored.data_ptr() == prepared["word"]
    assert copies.of("count", torch.tensor(4.0)).data_ptr() == prepared["count"]


def test_copy_of_another_shape_or_type_gets_memory_of_its_own():
    copies = HostBuffers()
    copies.prepare({"weight": (torch.Size([4, 3]), torch.float32)})
    for tensor in (torch.ones(5, 3), torch.ones(4, 2), torch.ones(4), torch.ones(4, 3, dtype=torch.bfloat16)):
        assert torch.equal(copies.of("weight", tensor), tensor)
