"""Recipes have the published numbers of parameters, counted on the meta device."""

from __future__ import annotations

import pytest
import torch

from dynmo_train._common.errors import UsageError
from dynmo_train.config import DefaultContext, check, resolve
from dynmo_train.config.presets import read_recipe, recipe_names
from dynmo_train.models.layer_list import parameters_of
from dynmo_train.models.registry import family_of
from tests.tables import table

REST = {"micro_batch_size": 1, "train_iters": 5000, "lr": 1e-4, "data_path": "corpus"}
# Exact counts: of GPT-2 medium and BERT large with their vocabularies padded to 128, of Llama 2 as published,
# of the small models of the guides.
EXACT = {
    "gpt-345m": ("gpt", {"vocab_size": 50257}, 354_871_296),
    "bert-345m": ("bert", {"vocab_size": 30522}, 336_297_858),
    "llama-2-7b": ("llama", {}, 6_738_415_616),
    "llama-2-13b": ("llama", {}, 13_015_864_320),
    "llama-2-70b": ("llama", {}, 68_976_648_192),
    "tutorial": ("gpt", {"vocab_size": 1024}, 269_696),
    "tutorial-bert": ("bert", {"vocab_size": 1024}, 179_458),
    "tutorial-ict": ("ict", {"vocab_size": 1024}, 339_712),
    "tutorial-t5": ("t5", {"vocab_size": 1024}, 304_384),
}
SIZES = ("1.7", "3.6", "7.5", "18.4", "39.1", "76.1", "145.6", "310.1")


def count(name: str, family: str, **changes) -> int:
    """Parameters of the model of a recipe, tied ones once."""
    values = REST | read_recipe(name, family) | changes
    config = resolve(flags={}, file=values, command={"family": family}, context=DefaultContext())
    check(config, 1)
    model = family_of(config)
    return sum(
        parameter.numel()
        for item in model.items
        for name, parameter in parameters_of(item.name, model.build(item.name, torch.device("meta"))).items()
        if name not in model.ties
    )


@table("name", EXACT)
def test_recipe_parameter_count_is_exact(name):
    family, changes, expected = EXACT[name]
    assert count(name, family, **changes) == expected


@pytest.mark.parametrize("size", SIZES)
def test_recipe_parameter_count_equals_published_table(size):
    """Table 1 of arXiv:2104.04473 rounds to a tenth of a billion, with a vocabulary of 51,200."""
    billions = count(f"gpt-{size}b", "gpt", vocab_size=51200) / 1e9
    assert billions == pytest.approx(float(size), abs=0.051)


def test_recipe_gpt3_parameter_count_equals_published():
    assert count("gpt-175b", "gpt", vocab_size=50257) / 1e9 == pytest.approx(174.6, abs=0.05)


def test_recipes_are_all_tested():
    tested = {*EXACT, *(f"gpt-{size}b" for size in SIZES), "gpt-175b", "quickstart"}
    assert tested == set(recipe_names())


def test_read_recipe_unknown_name_or_family_is_refused():
    with pytest.raises(UsageError, match="did you mean llama-2-7b"):
        read_recipe("llama2-7b", "llama")
    with pytest.raises(UsageError, match="use pretrain llama"):
        read_recipe("llama-2-7b", "gpt")


def test_pretrain_recipe_sets_required_options():
    from typer.testing import CliRunner

    from dynmo_train.cli import app

    done = CliRunner().invoke(app, ["pretrain", "llama", "--recipe", "llama-2-7b", "--micro-batch-size", "1"])
    assert "5 problems" not in str(done.exception)
    message = str(done.exception)
    assert "--train-iters" in message
    assert "--num-layers" not in message
