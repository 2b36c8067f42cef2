"""Fifty steps of Megatron's command lines have the losses of Megatron-core, from the same weights and data."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.megatron_curves import CASES, FAMILIES, SCHEDULES, VARIANTS, WSD_STYLES, curves

pytestmark = [
    pytest.mark.complete,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def peer():
    return pytest.importorskip("megatron.core.transformer", reason="megatron-core is not installed (an optional peer)")


@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_losses_of_fifty_steps_are_those_of_megatron_core(kind, schedule):
    found = curves(kind, schedule)
    assert found.difference < TOLERANCE
    assert found.ours[-1] < found.ours[0] - 0.2
    assert max(found.norms) > 1.0, "gradients are clipped"


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in VARIANTS])
def test_tolerance_separates_the_schedules(kind):
    """With the schedule of another case, a curve would differ by more than the tolerance."""
    found = {name: curves(kind, name).theirs for name in SCHEDULES}
    for one, other in itertools.combinations(found, 2):
        assert max(abs(a - b) for a, b in zip(found[one], found[other], strict=True)) > 5 * TOLERANCE, (one, other)
    assert len([name for name in found if name.startswith("WSD ")]) > len(WSD_STYLES)
