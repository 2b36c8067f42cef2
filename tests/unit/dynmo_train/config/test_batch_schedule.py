"""Batch-size ramp-up and curriculum, compared with plain loops."""

from __future__ import annotations

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config.batch_schedule import BatchPositions, BatchSizes, Curriculum, merged_ranges, parse_ranges
from dynmo_train.config.parse import batch_sizes_of

GPT3 = BatchSizes(start=16, increment=16, ramp_samples=5_859_375, final=1536)
SMALL = BatchSizes(start=2, increment=2, ramp_samples=50, final=8)


def test_batch_sizes_ramp_of_gpt3():
    assert [GPT3.at(consumed) for consumed in (0, 61_677, 61_678, 5_859_375, 5_859_376)] == [16, 16, 32, 1536, 1536]
    assert GPT3.sizes()[:2] + GPT3.sizes()[-2:] == [16, 32, 1520, 1536]


def test_batch_sizes_small_ramp_equals_loop():
    # Three parts of 50 / 3 samples: 2 until 16.7, 4 until 33.3, 6 until 50, then 8.
    sizes, consumed = [], 0
    for _ in range(20):
        sizes.append(SMALL.at(consumed))
        consumed += sizes[-1]
    assert sizes == [2] * 9 + [4] * 4 + [6] * 3 + [8] * 4
    assert [SMALL.consumed_after(steps) for steps in (0, 9, 13, 16, 20)] == [0, 18, 34, 52, 84]


@pytest.mark.parametrize(
    "sizes", [SMALL, BatchSizes.constant(8), BatchSizes(start=8, increment=4, ramp_samples=10, final=8)]
)
@pytest.mark.parametrize("samples", [0, 7, 17, 18, 33, 52, 53, 100, 123])
def test_steps_for_fits_into_the_samples(sizes, samples):
    steps = sizes.steps_for(samples)
    assert sizes.consumed_after(steps) <= samples < sizes.consumed_after(steps + 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16 16", "START INCREMENT SAMPLES"),
        ("a b c", "'a b c': must be START"),
        ("3 2 10", "must be . plus a multiple"),
        ("9 1 10", "must be . plus a multiple"),
    ],
)
def test_batch_sizes_of_invalid_ramp_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        batch_sizes_of(text, 8)


def test_curriculum_lengths_equal_worked_values():
    linear = Curriculum(shortest=64, longest=1024, steps=100, multiple=8, root=1.0)
    assert [linear.at(step) for step in (1, 2, 50, 99, 100, 500)] == [72, 80, 544, 1008, 1024, 1024]
    root = Curriculum(shortest=64, longest=1024, steps=100, multiple=8, root=2.0)
    assert [root.at(step) for step in (1, 25, 100)] == [160, 544, 1024]
    assert Curriculum(shortest=5, longest=32, steps=10, multiple=8, root=1.0).at(1) == 5


def walk(positions, steps, consumed=0):
    """First samples of the next batches, one by one."""
    begins = []
    for _ in range(steps):
        begins.append(consumed := positions.begin(consumed))
        consumed += positions.sizes.at(consumed)
    return begins, consumed


@pytest.mark.parametrize(
    ("skipped", "begins"),
    [
        ((), [0, 4, 8, 12]),
        (((8, 10),), [0, 4, 10, 14]),
        (((4, 8), (8, 12)), [0, 12, 16, 20]),
        (((0, 4), (6, 7)), [7, 11, 15, 19]),
        (((5, 6), (13, 14)), [0, 6, 14, 18]),
    ],
)
def test_batch_positions_have_no_sample_of_a_skipped_range(skipped, begins):
    positions = BatchPositions(sizes=BatchSizes.constant(4), skipped=merged_ranges(skipped))
    assert walk(positions, 4) == (begins, begins[-1] + 4)
    assert [positions.following(begin) for begin in begins[:-1]] == begins[1:]


@pytest.mark.parametrize("sizes", [BatchSizes.constant(4), BatchSizes(start=2, increment=2, ramp_samples=24, final=8)])
def test_batch_positions_after_steps_are_those_step_by_step(sizes):
    positions = BatchPositions(sizes=sizes, skipped=((9, 11), (40, 57), (58, 60)))
    for consumed in (0, 8, 41):
        for steps in range(30):
            assert positions.consumed_after(steps, consumed) == walk(positions, steps, consumed)[1]


def test_merged_ranges_are_disjoint():
    assert merged_ranges([(8, 12), (0, 4)], [(4, 6), (10, 11)]) == ((0, 6), (8, 12))


@pytest.mark.parametrize("text", ["4", "4:4", "8:4", "a:b", "-1:4", "4:8,9:10"])
def test_parse_ranges_of_another_form_are_refused(text):
    with pytest.raises(UsageError, match="must be BEGIN:END ranges"):
        parse_ranges("--skip-train-samples", text)
    assert parse_ranges("--skip-train-samples", "16:32 0:4") == ((0, 4), (16, 32))
