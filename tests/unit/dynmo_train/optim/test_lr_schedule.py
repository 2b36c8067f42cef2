"""Learning rate, freezing front and seeds: pure functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dynmo_train.config import config_of
from dynmo_train.config.validate import validate
from dynmo_train.dynamics.freezing import frozen_items
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.optim.lr_schedule import LearningRate
from dynmo_train.parallel.seeding import seeded, stable_seed
from dynmo_train.trainer.settings_from_config import learning_rate, weight_decay
from tests.tables import table

FAMILY = Gpt(
    GptShape(
        num_layers=3,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=4,
        vocab_size=11,
        padded_vocab_size=16,
    )
)


# Made by megatron-core's own classes from the flags of each case.
MEGATRON = json.loads((Path(__file__).parent / "megatron_schedules.json").read_text())
SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4, "vocab_size": 8}


@table("case", MEGATRON["cases"], ids=lambda case: str(list(case["flags"].values())[4:]))
def test_schedules_of_megatrons_flags_are_bit_identical(case):
    config = config_of(**SHAPE, data_path="none", micro_batch_size=1, **case["flags"])
    assert not validate(config, 1)
    rate, decay = learning_rate(config), weight_decay(config)
    samples, found = 0, []
    for _ in case["updates"]:
        found.append([samples, rate.at(samples), decay.at(samples)])
        samples += config.batch_sizes.at(samples)
    assert found == case["updates"]


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("linear", {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1, 111: 0.1}),
        ("cosine", {10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}),
        ("constant", {5: 0.5, 10: 1.0, 500: 1.0}),
        ("inverse-square-root", {0: 0.0, 5: 0.5, 10: 1.0, 40: 0.5, 110: 0.301511344578, 111: 0.1}),
    ],
)
def test_learning_rate_of_each_style_has_expected_values(style, expected):
    rate = LearningRate(peak=1.0, floor=0.1, style=style, warmup_steps=10, decay_steps=110)
    assert {step: round(rate.at(step), 12) for step in expected} == expected


def test_freeze_schedule_grows_the_frozen_prefix():
    schedule = ((4, 1), (9, 2))
    assert frozen_items(FAMILY.items, schedule, 3) == ()
    assert frozen_items(FAMILY.items, schedule, 4) == ("embedding", "layers.0.attention", "layers.0.mlp")
    assert frozen_items(FAMILY.items, schedule, 100)[-1] == "layers.1.mlp"


def test_seeds_depend_on_every_part_and_on_nothing_else():
    assert stable_seed(1, 2, "layers.0.mlp") == stable_seed(1, 2, "layers.0.mlp")
    seeds = {stable_seed(a, b, c) for a in range(3) for b in range(3) for c in ("x", "y")}
    assert len(seeds) == 18
    assert stable_seed("1", "23") != stable_seed("12", "3")


def test_seeding_puts_the_generator_back():
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    with seeded(torch.device("cpu"), 1, "item"):
        inside = F.dropout(torch.ones(8), 0.5)
    assert torch.equal(torch.rand(3), expected)
    with seeded(torch.device("cpu"), 1, "item"):
        assert torch.equal(F.dropout(torch.ones(8), 0.5), inside)


def test_initial_weights_do_not_depend_on_the_order_of_building():
    cpu = torch.device("cpu")
    first = FAMILY.build("layers.1.mlp", cpu)
    torch.rand(100)
    FAMILY.build("embedding", cpu)
    second = FAMILY.build("layers.1.mlp", cpu)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    head, embedding = FAMILY.build("head", cpu), FAMILY.build("embedding", cpu)
    assert torch.equal(head.weight, embedding.word.weight)
