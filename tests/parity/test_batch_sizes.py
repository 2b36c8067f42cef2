"""Batch sizes and capacities of experts against Megatron-core's own functions."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config.batch_schedule import SUFFIXES, parse_batch_size_schedule
from dynmo_train.models.experts.moe_shape import MoeShape

pytestmark = pytest.mark.complete


@pytest.fixture(scope="module")
def calculators() -> Any:
    name = "megatron.core.num_microbatches_calculator"
    found = pytest.importorskip(name, reason="megatron-core is not installed (an optional peer)")
    if not hasattr(found, "StepBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("this release of megatron-core has no --step-batch-size-schedule")
    return found


def schedules(count: int) -> list[tuple[str, int]]:
    """Random option values and sequence lengths; some have two sizes at one sample, or none at 0."""
    numbers = random.Random(1)
    made = []
    for _ in range(count):
        pairs = [
            f"{numbers.uniform(0, 9):.{numbers.randint(0, 3)}f}{numbers.choice([*SUFFIXES, 'k', 'b'])}"
            f":{numbers.randint(1, 64)}{numbers.choice(['', 'k', '.5'])}"
            for _ in range(numbers.randint(0, 5))
        ]
        if numbers.random() < 0.9:
            pairs.append(f"0:{numbers.randint(1, 64)}")
        numbers.shuffle(pairs)
        made.append((numbers.choice([" ", ",", ", "]).join(pairs), numbers.choice([1, 7, 1024, 2048])))
    return made


def test_schedules_are_those_of_megatron_core(calculators: Any) -> None:
    refused = 0
    for text, seq_length in schedules(400):
        try:
            theirs = calculators.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, seq_length)
        except (AssertionError, IndexError, ValueError):
            refused += 1
            with pytest.raises(UsageError):
                parse_batch_size_schedule(text, seq_length)
            continue
        sizes = parse_batch_size_schedule(text, seq_length)
        assert list(sizes.entries) == theirs.schedule, text
        for at in {near for begin, _ in theirs.schedule for near in (begin - 1, begin, begin + 1) if near >= 0}:
            theirs.update(at, consistency_check=False)
            assert sizes.at(at) == theirs.get_current_global_batch_size(), (text, at)
    assert 20 < refused < 200


@pytest.mark.parametrize("samples", [1, 29, 30, 31, 300, 305])
def test_train_samples_are_the_steps_of_megatron_lm(calculators: Any, samples: int) -> None:
    text = "0:4 480:6 960:10"
    theirs = calculators.StepBatchsizeNumMicroBatchesCalculator(2, 1, False, 1, text, 16)
    steps = consumed = 0
    # The loop of Megatron-LM's ``update_train_iters``.
    while consumed < samples:
        theirs.update(consumed, consistency_check=True)
        consumed, steps = consumed + theirs.get_current_global_batch_size(), steps + 1
    ours = parse_batch_size_schedule(text, 16)
    assert (ours.steps_for(samples), ours.consumed_after(steps)) == (steps, consumed)


def test_capacity_is_that_of_megatron_core() -> None:
    name = "megatron.core.transformer.moe.moe_utils"
    theirs = pytest.importorskip(name, reason="megatron-core is not installed (an optional peer)").get_capacity
    assert "min_capacity" in inspect.signature(theirs).parameters
    for tokens in (16, 64, 100):
        for factor in (0.25, 1.0, 1.25):
            for minimum in (0, 4, 11):
                shape = MoeShape(num_experts=8, top_k=2, capacity_factor=factor, min_capacity=minimum)
                assert shape.capacity(tokens) == theirs(tokens * 2, 8, factor, minimum), (tokens, factor, minimum)
