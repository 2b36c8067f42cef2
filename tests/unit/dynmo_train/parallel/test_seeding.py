"""Seeds of random numbers: a function of what is computed, and of all of it."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.parallel.seeding import seeded, stable_seed

CPU = torch.device("cpu")
PARTS = (1234, 7, 3, "layers.0.attention")


def draw(*parts: int | str) -> torch.Tensor:
    with seeded(CPU, *parts):
        return torch.nn.functional.dropout(torch.ones(256), 0.5)


def test_stable_seed_is_the_same_in_every_version():
    assert stable_seed(*PARTS) == 6699032875742204963


@pytest.mark.parametrize("place", range(4))
def test_seeded_draws_depend_on_seed_step_microbatch_and_item(place):
    other = list(PARTS)
    other[place] = "layers.1.attention" if place == 3 else 91
    assert not torch.equal(draw(*PARTS), draw(*other))


def test_seeded_draws_repeat_and_leave_the_generator_as_it_was():
    before = torch.get_rng_state()
    assert torch.equal(draw(*PARTS), draw(*PARTS))
    assert torch.equal(torch.get_rng_state(), before)


def test_stable_seed_separates_its_parts():
    assert stable_seed(1, 23) != stable_seed(12, 3)
