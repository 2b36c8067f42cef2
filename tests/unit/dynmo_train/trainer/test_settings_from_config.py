"""Values that a run derives from its configuration."""

from __future__ import annotations

import pytest

from dynmo_train.config import config_of
from dynmo_train.models.registry import family_of
from dynmo_train.trainer.settings_from_config import flops_counter
from tests.unit.dynmo_train.config.small_config import SMALL


def model_flops(**options):
    config = config_of(**SMALL | {"num_experts": 4, "moe_router_topk": 2} | options)
    return flops_counter(config, family_of(config))(1, 32)


@pytest.mark.parametrize(("factor", "share"), [(0.25, 0.25), (1.0, 1.0), (2.0, 1.0)])
def test_model_flops_count_the_tokens_within_the_capacity(factor, share):
    both, one = (model_flops(moe_router_topk=number) for number in (2, 1))
    experts = 2 * (both - one)
    assert model_flops(moe_expert_capacity_factor=factor) == pytest.approx(both - experts * (1 - share), rel=1e-6)
