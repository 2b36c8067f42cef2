"""Host memory for checkpoints that are written while training continues."""

from __future__ import annotations

import torch

from dynmo_train.trainer.checkpoint.engine_checkpoint import HostBuffers


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
