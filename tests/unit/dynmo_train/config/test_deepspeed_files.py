"""DeepSpeed files as they are published: each key is an option, has no effect and is reported, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynmo_train.config import config_of, option_specs, validate
from dynmo_train.config.compat.deepspeed import parse_deepspeed
from tests.tables import table

FILES = json.loads((Path(__file__).parent / "megatron" / "deepspeed_files.json").read_text())
MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 1024, "vocab_size": 100,
    "train_iters": 200, "mock_data": True,
}  # fmt: skip
DEFAULTS = {"micro_batch_size": 1, "lr": 1e-4}


def leaves(document, prefix=""):
    """Dotted names of all values but those of an optimizer's or curriculum's inner objects."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not prefix:
            yield from leaves(value, f"{name}.")
        else:
            yield name


@pytest.mark.parametrize("name", FILES["accepted"])
def test_published_file_is_a_valid_configuration(name):
    found = parse_deepspeed(FILES["accepted"][name])
    assert found.problems == ()
    assert set(found.values) <= option_specs().keys()
    values = {**DEFAULTS, **found.values}
    world = 1
    if values.get("gradient_accumulation_steps") == 1:
        values["micro_batch_size"] = values["global_batch_size"]
    assert validate(config_of(**MODEL, **values), world) == []


def test_no_key_of_a_file_is_silent():
    """Changing any value changes an option, or the key is reported as ignored."""
    for document in FILES["accepted"].values():
        found = parse_deepspeed(document)
        for name in leaves(document):
            section, _, key = name.partition(".")
            is_off = isinstance(document[section], dict) and document[section].get("enabled", True) is False
            if is_off or name in found.ignored or section in found.ignored:
                continue
            less = {each: dict(value) if isinstance(value, dict) else value for each, value in document.items()}
            inner = less[section] if key else less
            value = inner.pop(key or section)
            is_auto = value == "auto" or (name == "fp16.loss_scale" and value == 0)
            # What the parser reads in another way than by a change of its values.
            is_nested = name in ("optimizer.params", "curriculum_learning.schedule_config")
            is_default = name in ("optimizer.type", "curriculum_learning.curriculum_type", "zero_optimization.stage")
            is_length = name == "curriculum_learning.max_difficulty"
            changed = parse_deepspeed(less).values != found.values
            assert changed or is_auto or is_nested or is_default or is_length, name


@table("path", FILES["refused"])
def test_key_that_changes_the_training_is_refused(path):
    [problem] = parse_deepspeed(FILES["refused"][path]).problems
    assert problem.path == path
    assert any(word in problem.message for word in ("use ", "remove it", "remove the section"))


@pytest.mark.parametrize("document", FILES["off"], ids=lambda each: next(iter(each)))
def test_section_that_is_off_has_no_effect(document):
    assert parse_deepspeed(document).problems == ()
