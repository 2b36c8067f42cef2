"""Adaptive freezing: slopes, traces and distances of plasticity."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.dynamics.plasticity import PlasticityRule, PlasticityTrace, observe, similarity_distance, slope
from dynmo_train.pipeline.frozen_cache import FrozenPrefixCache, sample_hashes

RULE = PlasticityRule(interval=10, window=3, tolerance=0.2, patience=2, max_layers=1)


def test_slope_fits_a_line():
    assert slope([1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert slope([0.0, 1.0, 0.0]) == 0.0
    assert slope([4.0, 1.0]) == pytest.approx(-3.0)


def test_observe_consecutive_small_slopes_freeze_the_layer():
    trace = PlasticityTrace()
    for value in (0.0, 1.0, 2.0, 2.2, 2.3):
        trace = observe(trace, value, RULE)
        assert trace.frozen_layers == 0
    assert trace.steepest == pytest.approx(1.0)
    assert trace.patience_count == 1
    assert observe(trace, 2.31, RULE) == PlasticityTrace(frozen_layers=1)
    assert observe(trace, 9.0, RULE).patience_count == 0


def test_observe_at_max_layers_freezes_no_further_layer():
    trace = PlasticityTrace(frozen_layers=1, values=(1.0, 1.0), steepest=1.0, patience_count=5)
    assert observe(trace, 1.0, RULE).frozen_layers == 1


def test_similarity_distance_is_zero_only_for_equal_similarities():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))[0]
    assert float(similarity_distance(x, x)) == 0.0
    assert float(similarity_distance(x, x @ rotation)) < 1e-10
    assert float(similarity_distance(x, x.roll(1, 1))) > 1e-3


def test_frozen_prefix_cache_over_its_limit_drops_the_oldest():
    cache = FrozenPrefixCache(limit_bytes=3 * 4 * 4)
    rows = torch.arange(16.0).view(4, 4)
    keys = torch.tensor([11, 12, 13, 14])
    cache.put(0, keys, {"hidden": rows})
    assert cache.num_bytes == 48
    assert cache.get(0, keys) is None
    assert cache.get(1, keys[1:]) is None
    assert torch.equal(cache.get(0, keys[[3, 1]])["hidden"], rows[[3, 1]])


def test_sample_hashes_depend_on_all_inputs_except_labels():
    ids = torch.tensor([[1, 2], [1, 3], [1, 2]])
    keys = sample_hashes({"ids": ids, "labels": torch.arange(6).view(3, 2)}).tolist()
    assert keys[0] == keys[2] != keys[1]
    other = sample_hashes({"ids": ids, "types": torch.tensor([[0, 0], [0, 0], [0, 1]])}).tolist()
    assert other[0] != other[2]
