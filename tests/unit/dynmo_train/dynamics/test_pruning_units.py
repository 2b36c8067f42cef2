"""Units of pruning: what the weakest are, the masks that prune them, and narrower layers against masked dense ones."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dynmo_train.dynamics import tuning
from dynmo_train.dynamics.pruning_units import PruningRule, transposable_masks, units_of
from dynmo_train.dynamics.tuning import threshold_of
from dynmo_train.models.attention.self_attention import SelfAttention
from dynmo_train.models.layers.feed_forward import Mlp
from dynmo_train.models.layers.linear import PrunableLinear
from dynmo_train.models.layers.sparse_formats import SparseTable, is_in_blocks, is_semi_structured

CPU = torch.device("cpu")


def drawn(module):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def attention(groups=4):
    norm = torch.nn.LayerNorm(32)
    return drawn(SelfAttention(width=32, heads=4, groups=groups, norm=norm, device=CPU))


def mlp(activation="gelu_tanh"):
    return drawn(Mlp(width=32, inner=64, activation=activation, norm=torch.nn.LayerNorm(32), device=CPU))


def weakest(units, share):
    order = units.scores.argsort()
    keep = torch.ones(len(order), dtype=torch.bool)
    keep[order[: round(share * len(order))]] = False
    return units.prune(keep)


def test_two_of_four_prunes_the_two_smallest():
    layer = drawn(PrunableLinear(64, 64, CPU))
    [units] = units_of(layer, PruningRule(mode="2:4"))
    [(_, mask)] = weakest(units, 1.0)
    assert is_semi_structured(mask)
    assert float(mask.float().mean()) == 0.5
    groups = layer.weight.detach().abs().view(-1, 4)
    assert torch.equal((groups * mask.view(-1, 4)).sum(1), groups.topk(2, dim=1).values.sum(1))
    [(_, half)] = weakest(units, 0.5)
    assert float(half.float().mean()) == 0.75


def test_transposable_tiles_keep_the_best_of_all_masks():
    """Against brute force over the masks of each tile, on a weight with edges that are not pruned."""
    layer = drawn(PrunableLinear(10, 14, CPU))
    [units] = units_of(layer, PruningRule(mode="2:4-transposable"))
    assert len(transposable_masks()) == 90
    [(_, mask)] = weakest(units, 1.0)
    assert bool(mask[12:].all())
    assert bool(mask[:, 8:].all())
    magnitudes = layer.weight.detach().abs()
    for row in range(0, 12, 4):
        for column in range(0, 8, 4):
            tile, keep = magnitudes[row : row + 4, column : column + 4], mask[row : row + 4, column : column + 4]
            assert keep.sum(0).tolist() == keep.sum(1).tolist() == [2, 2, 2, 2]
            rows = [[i, j] for i in range(4) for j in range(i)]
            sums = [
                float(sum(tile[i, chosen].sum() for i, chosen in enumerate(each)))
                for each in itertools.product(rows, repeat=4)
                if sorted(itertools.chain(*each)) == [0, 0, 1, 1, 2, 2, 3, 3]
            ]
            assert float((tile * keep).sum()) == pytest.approx(max(sums))
    [(_, half)] = weakest(units, 0.5)
    assert int((~half).sum()) == 3 * 8


def test_transposable_mask_is_two_of_four_in_both_directions():
    layer = drawn(PrunableLinear(64, 64, CPU))
    [units] = units_of(layer, PruningRule(mode="2:4-transposable"))
    [(_, mask)] = weakest(units, 1.0)
    assert is_semi_structured(mask)
    assert is_semi_structured(mask.t())
    # Pruned again, the mask stays: weights that are zero have the lowest score.
    with torch.no_grad():
        layer.weight.mul_(mask)
    [units] = units_of(layer, PruningRule(mode="2:4-transposable"))
    [(_, again)] = weakest(units, 1.0)
    assert torch.equal(again, mask)


def test_block_units_include_smaller_edge_blocks():
    layer = drawn(PrunableLinear(64, 96, CPU))
    [units] = units_of(layer, PruningRule(mode="block"))
    tiles = layer.weight.detach().abs().view(3, 32, 2, 32).mean((1, 3)).view(-1)
    torch.testing.assert_close(units.scores, tiles)
    [(_, mask)] = weakest(units, 0.5)
    assert is_in_blocks(mask)
    assert float(mask.float().mean()) == 0.5
    [small] = units_of(layer, PruningRule(mode="block", block_size=16))
    assert len(small.scores) == 24
    [uneven] = units_of(drawn(PrunableLinear(40, 33, CPU)), PruningRule(mode="block"))
    assert len(uneven.scores) == 4
    assert sum(m.numel() - int(m.sum()) for _, m in uneven.prune(torch.tensor([True, True, True, False]))) == 8


def apply(masks, structured):
    for layer, mask in masks:
        with torch.no_grad():
            layer.weight.mul_(mask)
        layer.set_mask(mask, SparseTable(structured=structured))


@pytest.mark.parametrize(("make", "kind", "units_count"), [
    (attention, "heads", 4), (lambda: attention(groups=2), "heads", 2), (mlp, "columns", 64),
    (lambda: mlp("swiglu"), "columns", 64),
], ids=["heads", "groups", "columns", "gated"])  # fmt: skip
def test_structured_pruning_equals_masked_layer_at_lower_cost(make, kind, units_count):
    narrow, masked, whole = make(), make(), make()
    for module, structured in ((narrow, True), (masked, False)):
        [units] = units_of(module, PruningRule(mode="structured"))
        assert units.kind == kind
        assert len(units.scores) == units_count
        apply(weakest(units, 0.5), structured)
    # Biases of pruned rows in the masked module multiply pruned columns only.
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    y, expected = narrow(inputs[0]), masked(inputs[1])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    for (name, ours), theirs in zip(narrow.named_parameters(), masked.parameters(), strict=True):
        owner = narrow.get_submodule(name.rpartition(".")[0])
        row_mask = owner.mask if name.endswith("weight") and isinstance(owner, PrunableLinear) else 1.0
        if name.endswith("bias") and isinstance(owner, PrunableLinear) and owner.rows is not None:
            row_mask = owner.mask.any(1)
        torch.testing.assert_close(ours.grad * row_mask, theirs.grad * row_mask, rtol=1e-4, atol=1e-4, msg=name)
    counts = {}
    for label, module in (("narrow", narrow), ("whole", whole)):
        with FlopCounterMode(display=False) as counter:
            module(x)
        counts[label] = counter.get_total_flops()
    assert counts["narrow"] == counts["whole"] / 2


def test_structured_units_keep_the_strongest():
    for module in (attention(), mlp()):
        assert all(units.keeps_strongest for units in units_of(module, PruningRule(mode="structured")))


def test_threshold_is_the_lowest_faster_sparsity():
    times = [(0.5, 3.0), (0.7, 0.9), (0.8, 1.1), (0.9, 0.5)]
    assert threshold_of(times, dense_s=1.0) == 0.9
    assert threshold_of(times, dense_s=2.0) == 0.7
    assert threshold_of(times, dense_s=0.5) == 2.0


def test_timed_with_one_thread_leaves_out_what_the_process_waits_for():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds, result = tuning.timed(torch.device("cpu"), lambda: time.sleep(0.2) or "done")
    finally:
        torch.set_num_threads(threads)
    assert result == "done"
    assert seconds < 0.1


def test_measured_backward_by_weight_is_a_time_of_its_own():
    product = tuning.measure_product("block", 0.5, 64, 64, 32, torch.device("cpu"), 2)
    assert 0.01 < product.backward_weight < 100
