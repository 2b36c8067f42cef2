"""Options of the model in a checkpoint: a run with them has the same model."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config.resolve import resolve
from dynmo_train.formats.checkpoint import CheckpointError
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.families.t5 import T5
from dynmo_train.models.registry import CAUSAL, family_of, named_as
from dynmo_train.trainer.checkpoint.engine_checkpoint import check_same_model
from dynmo_train.trainer.checkpoint.model_keys import TRAINING_KEYS, extension_text, keys_of_extension
from dynmo_train.trainer.checkpoint.model_options import checkpoint_options, model_options, training_options
from tests.distributed.families import COMMON, SAMPLES
from tests.tables import table
from tests.unit.dynmo_train.trainer.checkpoint.test_engine_checkpoint import checkpoint_of

TRAINING = {"lr": 1e-3, "train_iters": 1, "data_path": "none", "micro_batch_size": 1, "seq_length": 16}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.5] * 4, "original_max_position_embeddings": 8}
PLAIN = LlamaShape(**COMMON, num_layers=4)
SHAPES = {
    "gates": replace(PLAIN, activation="clamped_swiglu", swiglu_offset=0.5, softmax_off_by_one=True),
    "phi": replace(PLAIN, rotary_fraction=0.5, sliding_window=5, tied_embeddings=True),
    "olmo": replace(PLAIN, norm_placement="post", qk_norm="projection"),
    "qwen": replace(
        PLAIN, attention_bias="qkv", qk_norm="head", layer_types=("full_attention", "sliding_attention") * 2
    ),
    "long": replace(PLAIN, rotary_scaling={"rope_type": "longrope", "factor": 2.0, **FACTORS}),
}
BOUNDED = replace(SAMPLES["mixtral"].family.shape.moe, eval_capacity_factor=2.0, min_capacity=4)
SHAPES["bounded experts"] = replace(PLAIN, moe=BOUNDED)
FAMILIES = {name: sample.family for name, sample in SAMPLES.items()} | {
    name: Llama(shape) for name, shape in SHAPES.items()
}
# T5's own arithmetic always has this activation.
FAMILIES["t5-relative"] = T5(replace(FAMILIES["t5-relative"].shape, activation="relu"))


def without_none(values):
    return {name: value for name, value in values.items() if value is not None}


def resolved(model, family, **flags):
    options = {**TRAINING, "make_vocab_size_divisible_by": 64}
    return resolve(flags={**options, **flags}, checkpoint=model_options(model), command={"family": family})


def without_training(model):
    """The description of a model, as JSON, without what belongs to its training."""
    return {name: value for name, value in json.loads(json.dumps(model)).items() if name not in TRAINING_KEYS}


@table("name", FAMILIES)
def test_options_of_a_model_give_the_same_model(name):
    stored = FAMILIES[name].manifest()
    config = resolved(stored, stored["family"])
    assert without_training(family_of(config).manifest()) == without_training(stored)
    assert config.sources["hidden_size"] == "checkpoint"


@table("name", [name for name, family in FAMILIES.items() if family.name in CAUSAL])
def test_decoder_has_the_same_model_under_either_name(name):
    stored = FAMILIES[name].manifest()
    other = CAUSAL[1 - CAUSAL.index(stored["family"])]
    family = family_of(resolved(stored, other))
    assert family.name == other
    assert family.manifest() != stored
    check_same_model(checkpoint_of(stored), family, resumes=False)
    assert without_training(named_as(family.manifest(), stored["family"])) == without_training(stored)


def test_given_option_that_differs_is_refused_when_weights_are_loaded():
    stored = FAMILIES["llama"].manifest()
    family = family_of(resolved(stored, "gpt", hidden_size=64))
    with pytest.raises(CheckpointError, match="hidden_size is 32 there and 64 here"):
        check_same_model(checkpoint_of(stored), family)


def test_alias_of_an_option_has_precedence_over_the_checkpoint():
    stored = FAMILIES["t5"].manifest()
    assert resolved(stored, "t5", encoder_num_layers=7).model.num_layers == 7
    assert resolved(stored, "t5").model.num_layers == stored["num_layers"] != 7


def test_incomplete_description_of_a_model_is_one_error():
    stored = dict(FAMILIES["llama"].manifest())
    del stored["hidden_size"]
    with pytest.raises(UsageError, match=r"does not describe its model: .*hidden_size"):
        model_options(stored)


def test_path_without_a_checkpoint_has_no_options(tmp_path):
    assert checkpoint_options(tmp_path, "gpt", {}).values == {}
    assert checkpoint_options(tmp_path / "missing", "gpt", {}).values == {}


def test_what_belongs_to_the_training_is_not_taken_and_named():
    of_training = {
        "moe_aux_loss_coeff": 0.02,
        "moe_z_loss_coeff": 0.001,
        "moe_capacity_factor": 1.25,
        "moe_token_drop_policy": "position",
    }
    stored = {**FAMILIES["mixtral"].manifest(), **of_training}
    config = resolved(stored, "llama")
    shape = family_of(config).shape.moe
    assert shape.coefficients == {}
    with pytest.raises(CheckpointError, match=r"\(--moe-aux-loss-coeff 0\.02 continues the training"):
        check_same_model(checkpoint_of(stored), family_of(config))
    assert (shape.z_loss_coeff, shape.capacity_factor, shape.drop_policy) == (0.0, None, "probs")
    assert not {name for name, source in config.sources.items() if source == "checkpoint"} & {
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_token_drop_policy"),
    }
    assert set(training_options(stored)) >= {
        *("--moe-aux-loss-coeff 0.02", "--moe-z-loss-coeff 0.001", "--moe-expert-capacity-factor 1.25"),
        "--moe-token-drop-policy position",
    }


YARN = '{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}'


@table(
    ("name", "options", "refused"),
    [
        ("llama", {"max_position_embeddings": 64}, None),
        ("llama", {"max_position_embeddings": 64, "rotary_scaling": YARN, "rotary_base": 5e5}, None),
        ("t5-relative", {"max_position_embeddings": 64}, None),
        ("llama", {"max_position_embeddings": 16}, "--max-position-embeddings 32 trains the model"),
        ("t5", {"max_position_embeddings": 64}, "max_position_embeddings is 32 there and 64 here"),
        ("long", {"rotary_scaling": None}, "--rotary-scaling '{"),
    ],
)
def test_positions_without_weights_may_be_extended(name, options, refused):
    """A rotation that is not given is a forgotten option; learned positions have weights."""
    stored = {**FAMILIES[name].manifest(), "max_position_embeddings": 32}
    taken = {**model_options(stored), "max_position_embeddings": 32}
    values = {**TRAINING, "make_vocab_size_divisible_by": 64, **taken, **options}
    given = {key: values.pop(key) for key in options if values[key] is not None}
    config = resolve(flags={**TRAINING, **given}, checkpoint=without_none(values), command={"family": stored["family"]})
    may_change = keys_of_extension(config, stored)
    if refused is None:
        check_same_model(checkpoint_of(stored), family_of(config), may_change=may_change)
        assert extension_text(stored, family_of(config).manifest(), may_change).count(" there and ") == len(options)
        return
    with pytest.raises(CheckpointError, match=re.escape(refused)):
        check_same_model(checkpoint_of(stored), family_of(config), may_change=may_change)


def test_longer_samples_leave_out_the_positions_of_the_checkpoint(tmp_path, monkeypatch):
    """--use-checkpoint-args with --seq-length beyond the checkpoint's positions, where these have no weights."""
    (tmp_path / "config.json").touch()
    for name, length, expected in (("llama", 64, None), ("llama", 16, 32), ("bert", 64, 32)):
        stored = {**FAMILIES[name].manifest(), "max_position_embeddings": 32}
        monkeypatch.setattr(f"{checkpoint_options.__module__}._foreign_model", lambda *_, stored=stored: stored)
        found = checkpoint_options(tmp_path, stored["family"], {"seq_length": length}).values
        assert found.get("max_position_embeddings") == expected
