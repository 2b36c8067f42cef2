"""Batch-size ramp-up and curriculum, compared with plain loops."""

from __future__ import annotations

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config.batch_schedule import (
    BatchPositions,
    BatchSizes,
    Curriculum,
    SteppedBatchSizes,
    merged_ranges,
    parse_batch_size_schedule,
    parse_ranges,
)
from dynmo_train.config.parse import batch_sizes_of
from tests.tables import table

GPT3 = BatchSizes(start=16, increment=16, ramp_samples=5_859_375, final=1536)
STEPPED = SteppedBatchSizes(entries=((0, 2), (5, 4), (6, 3), (40, 8)))
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


def test_schedule_of_gpt3_steps_at_its_tokens():
    gpt3 = parse_batch_size_schedule("0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536", 2048)
    # 2,400,000,000 tokens are 1,171,875 samples of 2,048.
    table = {0: 16, 1_171_874: 16, 1_171_875: 320, 2_343_750: 624, 5_859_374: 1232, 5_859_375: 1536, 10**9: 1536}
    assert {consumed: gpt3.at(consumed) for consumed in table} == table
    assert (gpt3.start, gpt3.final, gpt3.sizes()) == (16, 1536, [16, 320, 624, 928, 1232, 1536])
    # 73,243 steps of 16 consume 1,171,888 samples; the next has 320.
    assert [gpt3.consumed_after(steps) for steps in (73_242, 73_243, 73_244)] == [1_171_872, 1_171_888, 1_172_208]


def test_steps_of_the_batch_size_equal_a_plain_loop():
    for consumed in (0, 3, 5, 39, 40, 77):
        position, steps, sizes = consumed, 0, []
        while position < 100:
            assert STEPPED.consumed_after(steps, consumed) == position
            sizes.append(8 if position >= 40 else 3 if position >= 6 else 4 if position >= 5 else 2)
            assert STEPPED.at(position) == sizes[-1]
            for samples in range(position + 1, position + sizes[-1] + 1):
                assert STEPPED.steps_for(samples, consumed) == steps + 1
            position, steps = position + sizes[-1], steps + 1
        assert STEPPED.steps_for(consumed, consumed) == 0


def test_schedule_of_pairs_in_any_order_and_format():
    assert parse_batch_size_schedule("1e3:.5K,0:8.9 1.5k:1K", 4).entries == ((0, 8), (250, 500), (375, 1000))


@table(
    ("text", "message"),
    [
        ("", "must have 1 to"),
        ("4:8", "the first at 0"),
        ("0:8 nan:9", "'nan:9' must be TOKENS:SIZE"),
        ("0:8 1e99:9", "must be TOKENS:SIZE"),
        ("0:8 -4:9", "must be TOKENS:SIZE"),
        ("0:8 1_000:9", "must be TOKENS:SIZE"),
        ("0:0", "a size of 1 or more"),
        ("0:0.9", "a size of 1 or more"),
        ("0:inf", "must be TOKENS:SIZE"),
        ("0", "must be TOKENS:SIZE"),
        ("0:8:9", "must be TOKENS:SIZE"),
        ("0:8 40:9 43:7", "sizes 9 and 7 are both at sample 10"),
        ("0:8 3:9", "sizes 8 and 9 are both at sample 0"),
        (" ".join(f"{4 * at}:1" for at in range(70_000)), "65,536"),
    ],
)
def test_schedule_of_another_form_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_batch_size_schedule(text, 4)


@table("sizes", [SMALL, BatchSizes.constant(8), BatchSizes(start=8, increment=4, ramp_samples=10, final=8)])
@table("samples", [0, 7, 17, 18, 33, 52, 53, 100, 123])
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


@pytest.mark.parametrize(
    "sizes", [BatchSizes.constant(4), BatchSizes(start=2, increment=2, ramp_samples=24, final=8), STEPPED]
)
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
