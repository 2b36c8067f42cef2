"""When adaptive freezing freezes: slopes, courses and distances."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.dynamics.plasticity import Course, PlasticityRule, observe, similarity_distance, slope
from dynmo_train.pipeline.frozen_cache import FrozenPrefixCache, sample_hashes

RULE = PlasticityRule(interval=10, window=3, tolerance=0.2, patience=2, most=1)


def test_the_slope_is_the_least_squares_one():
    assert slope([1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert slope([0.0, 1.0, 0.0]) == 0.0
    assert slope([4.0, 1.0]) == pytest.approx(-3.0)


def test_a_layer_freezes_when_its_course_stays_calm_and_the_next_begins_anew():
    course = Course()
    for value in (0.0, 1.0, 2.0, 2.2, 2.3):
        course = observe(course, value, RULE)
        assert course.frozen_layers == 0
    assert course.steepest == pytest.approx(1.0)
    assert course.calm == 1
    assert observe(course, 2.31, RULE) == Course(frozen_layers=1)
    assert observe(course, 9.0, RULE).calm == 0


def test_no_more_layers_freeze_than_allowed():
    course = Course(frozen_layers=1, values=(1.0, 1.0), steepest=1.0, calm=5)
    assert observe(course, 1.0, RULE).frozen_layers == 1


def test_the_distance_is_zero_for_the_same_similarities_alone():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))[0]
    assert float(similarity_distance(x, x)) == 0.0
    assert float(similarity_distance(x, x @ turn)) < 1e-10
    assert float(similarity_distance(x, x.roll(1, 1))) > 1e-3


def test_the_cache_is_bounded_and_drops_the_oldest():
    cache = FrozenPrefixCache(limit_bytes=3 * 4 * 4)
    rows = torch.arange(16.0).view(4, 4)
    keys = torch.tensor([11, 12, 13, 14])
    cache.put(0, keys, {"hidden": rows})
    assert cache.held_bytes == 48
    assert cache.get(0, keys) is None
    assert cache.get(1, keys[1:]) is None
    assert torch.equal(cache.get(0, keys[[3, 1]])["hidden"], rows[[3, 1]])


def test_keys_are_of_all_inputs_but_the_labels():
    ids = torch.tensor([[1, 2], [1, 3], [1, 2]])
    keys = sample_hashes({"ids": ids, "labels": torch.arange(6).view(3, 2)}).tolist()
    assert keys[0] == keys[2] != keys[1]
    other = sample_hashes({"ids": ids, "types": torch.tensor([[0, 0], [0, 0], [0, 1]])}).tolist()
    assert other[0] != other[2]
