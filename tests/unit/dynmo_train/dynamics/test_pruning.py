"""The pruning schedule against the formula, and the distributed selection against sorting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo_train.dynamics.pruning import CubicSchedule, kth_magnitude_bits

SCHEDULE = CubicSchedule(start=100, end=140, every=10, initial=0.0, final=0.9)


def test_cubic_schedule_follows_zhu_and_gupta():
    assert [round(SCHEDULE.at(step), 4) for step in (100, 110, 120, 130, 140, 999)] == [
        0.0,
        0.5203,
        0.7875,
        0.8859,
        0.9,
        0.9,
    ]


def test_cubic_schedule_is_due_at_its_steps_and_at_the_end():
    assert [step for step in range(200) if SCHEDULE.is_due(step)] == [100, 110, 120, 130, 140]
    uneven = CubicSchedule(start=3, end=12, every=4, initial=0.0, final=0.5)
    assert [step for step in range(30) if uneven.is_due(step)] == [3, 7, 11, 12]
    assert uneven.at(12) == 0.5
    assert [uneven.next_after(step) for step in (0, 3, 6, 7, 11, 12)] == [3, 7, 7, 11, 12, None]
    assert CubicSchedule(start=5, end=5, every=1, initial=0.1, final=0.5).at(5) == 0.5


def bits_of(value: float) -> int:
    return int(torch.tensor([value], dtype=torch.float32).abs().view(torch.int32))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60),
    st.integers(1, 5),
    st.data(),
)
def test_kth_magnitude_bits_equals_sorting(values, parts, data):
    """Values spread over parts as over workers; the sum over workers is the plain sum of the parts' histograms."""
    rank = data.draw(st.integers(1, len(values)))
    tensor = torch.tensor(values, dtype=torch.float32)
    expected = sorted(bits_of(v) for v in tensor.tolist())[rank - 1]
    assert kth_magnitude_bits(list(tensor.chunk(parts)), rank, total=lambda counts: counts) == expected


def test_kth_magnitude_bits_over_several_workers_equals_one():
    """Each worker has a part and adds the others' counts: all find the same magnitude."""
    generator = torch.Generator().manual_seed(1)
    workers = [torch.randn(1000, generator=generator) for _ in range(3)]
    everything = torch.cat(workers)
    for rank in (1, 777, 1500, 3000):
        expected = int(everything.abs().sort().values[rank - 1].view(torch.int32))
        assert kth_magnitude_bits(workers, rank, total=lambda counts: counts) == expected


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3.4e38])
def test_kth_magnitude_bits_extreme_values(value):
    assert kth_magnitude_bits([torch.full((4,), value)], 2, total=lambda c: c) == bits_of(value)
