"""The prunable linear layer against the plain dense one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dynmo_train.models.layers.linear import PrunableLinear
from dynmo_train.models.layers.sparse_formats import (
    BLOCK,
    BUILT_IN,
    CSR,
    DENSE,
    SEMI_STRUCTURED,
    SparseTable,
    block_size,
)
from dynmo_train.models.layers.sparse_products import csr_pattern
from tests.tables import table

CPU = torch.device("cpu")


def layer_with(sparsity: float, threshold: float, outputs: int = 48, inputs: int = 40) -> PrunableLinear:
    generator = torch.Generator().manual_seed(3)
    layer = PrunableLinear(inputs, outputs, CPU)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=generator))
        layer.bias.copy_(torch.randn(outputs, generator=generator))
        mask = torch.rand(outputs, inputs, generator=generator) >= sparsity
        layer.weight.mul_(mask)
    layer.set_mask(mask, SparseTable(thresholds={CSR: threshold}))
    return layer


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("threshold", [0.0, 2.0], ids=["csr", "dense"])
def test_csr_linear_equals_dense_product_and_gradients(sparsity, threshold):
    layer = layer_with(sparsity, threshold)
    assert layer.form == (CSR if threshold == 0.0 else DENSE)
    x = torch.randn(3, 5, 40, requires_grad=True)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    plain_x = x.detach().clone().requires_grad_()
    grad = torch.randn(3, 5, 48)
    y, expected = layer(x), F.linear(plain_x, weight, bias)
    y.backward(grad)
    expected.backward(grad)
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad * layer.mask, weight.grad * layer.mask, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, bias.grad)
    if threshold == 0.0:
        assert not layer.weight.grad[~layer.mask].any()


def test_prunable_linear_sparsity_counts_pruned_weights():
    layer = layer_with(0.75, 0.85)
    assert not layer.weight[~layer.mask].any()
    assert layer.sparsity == pytest.approx(0.75, abs=0.05)
    assert layer.form == DENSE


def test_prunable_linear_written_weight_reaches_sparse_product():
    layer = layer_with(0.9, 0.85)
    x = torch.randn(4, 40)
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    layer.weights_changed()
    torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias))


def test_csr_pattern_matches_the_mask():
    mask = torch.tensor([[True, False, True], [False, False, False], [False, True, True]])
    pattern = csr_pattern(mask)
    assert pattern.rows.tolist() == [0, 2, 2, 4]
    assert pattern.columns.tolist() == [0, 2, 1, 2]
    assert pattern.rows_t.tolist() == [0, 1, 2, 4]
    assert pattern.columns_t.tolist() == [0, 2, 0, 2]
    values = torch.arange(9.0).view(-1)[pattern.flat]
    assert values[pattern.order_t].tolist() == [0.0, 7.0, 2.0, 8.0]


def mask_of(sparsity: float, pattern: str) -> torch.Tensor:
    if pattern == "blocks":
        blocks = torch.arange(16).view(4, 4) >= round(16 * sparsity)
        return blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)
    if pattern == "fours":
        return torch.tensor([True, False, True, False]).repeat(128, 32)
    return (torch.arange(128 * 128) % 100 >= round(100 * sparsity)).view(128, 128)


@table(
    ("sparsity", "pattern", "device", "form"),
    [
        (0.84, "spread", "cpu", DENSE),
        (0.86, "spread", "cpu", CSR),
        (0.86, "spread", "cuda", DENSE),
        (0.99, "spread", "cuda", CSR),
        (0.5, "fours", "cuda", SEMI_STRUCTURED),
        (0.5, "fours", "cpu", DENSE),
        (0.75, "blocks", "cuda", BLOCK),
        (0.625, "blocks", "cuda", DENSE),
        (0.625, "blocks", "cpu", BLOCK),
        (0.4375, "blocks", "cpu", DENSE),
    ],
)
def test_sparse_table_form_depends_on_mask_table_and_device(sparsity, pattern, device, form):
    assert SparseTable(thresholds=BUILT_IN).form(mask_of(sparsity, pattern), device) == form


def test_sparse_table_shape_threshold_overrides_general_one():
    table = SparseTable(thresholds={CSR: 0.85, "csr 128x128": 0.95})
    assert table.form(mask_of(0.9, "spread"), "cpu") == DENSE
    assert table.form(mask_of(0.9, "spread")[:64], "cpu") == CSR


def test_sparse_table_block_size_rule_precedes_the_general_one():
    blocks = (torch.arange(16).view(4, 4) >= 8).repeat_interleave(16, 0).repeat_interleave(16, 1)
    blocks[0, :16] = ~blocks[0, :16]
    assert block_size(blocks) == 0
    blocks = ((torch.arange(16).view(4, 4) % 3) == 0).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert block_size(blocks) == 16
    assert SparseTable(thresholds={"block": 0.5}).form(blocks, "cpu") == BLOCK
    assert SparseTable(thresholds={"block": 0.5, "block16": 0.9}).form(blocks, "cpu") == DENSE
    assert SparseTable(thresholds={"cuda.2:4": 0.5, "cuda.2:4-transposable": 0.9}).threshold("cuda.2:4", 1, 1) == 0.5


@table("size", [16, 32, 64])
@table("sparsity", [0.25, 0.75, 1.0])
def test_block_linear_equals_dense_product_and_gradients(size, sparsity):
    count = (128 // size) * (192 // size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(size))
    mask = (order >= round(sparsity * count)).view(128 // size, 192 // size)
    mask = mask.repeat_interleave(size, 0).repeat_interleave(size, 1)
    layer = PrunableLinear(192, 128, CPU)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(128, 192, generator=torch.Generator().manual_seed(1)))
        layer.weight.mul_(mask)
    layer.set_mask(mask, SparseTable(thresholds={"block": 0.0}))
    assert layer.form == BLOCK
    x = torch.randn(2, 5, 192, requires_grad=True)
    plain_x = x.detach().clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    y, expected = layer(x), F.linear(plain_x, weight, layer.bias)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(layer.weight.grad, weight.grad * layer.mask, rtol=1e-4, atol=1e-3)


def test_block_linear_multiplies_nonzeros_alone_in_both_directions():
    """Operations of all GEMMs of forward and backward: none is dense."""
    mask = mask_of(0.75, "blocks")
    layer = PrunableLinear(128, 128, CPU, bias=False)
    layer.set_mask(mask, SparseTable(thresholds={"block": 0.0}))
    x = torch.randn(16, 128, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    dense = 3 * 2 * 16 * 128 * 128
    assert counter.get_total_flops() == dense // 4


def test_csr_linear_needs_fewer_operations():
    """Operations counted: the CSR product multiplies the kept weights alone."""
    layer = layer_with(0.9, 0.85, outputs=64, inputs=64)
    assert layer.pattern is not None
    assert len(layer.pattern.flat) == int(layer.mask.sum()) < 0.15 * layer.weight.numel()
