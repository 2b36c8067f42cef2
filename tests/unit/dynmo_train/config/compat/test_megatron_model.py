"""Flags of Megatron that mean something only together: activation, windows, rotation, lengths in tokens."""

from __future__ import annotations

import shlex

import pytest

from dynmo_train.config import validate
from dynmo_train.config.compat.translate import translate
from tests.tables import table

from .test_translate import config_from, declared

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 2 --lr 1e-3 --mock-data"
)


def model_of(words, family="gpt", length="--train-iters 10"):
    return config_from(f"{SIZES} {length} {words}", family, vocab_size=100)[0].model


def problems_of(words):
    return [problem.path for problem in translate(shlex.split(words), "gpt", declared("gpt")).problems]


@table(
    ("words", "arguments", "notes"),
    [
        ("--packing", "--pack-to 2 --balance online", 0),
        ("--packing --packed-num-gpus 3 --load-balance", "--balance online --pack-to 3", 0),
        ("--packed-num-gpus 3 --packing --balance offline", "--balance offline --pack-to 3", 0),
        ("--packed-num-gpus 3 --load-balance --balancer diffusion", "--balance online --balancer diffusion", 1),
        ("--pruning-type gradual --sparsify", "--sparsify", 1),
    ],
)
def test_dynmos_packing_releases_ranks(words, arguments, notes):
    translation = translate(words.split(), "bert", declared("bert"))
    assert (" ".join(translation.arguments), len(translation.notes)) == (arguments, notes)


@table(
    ("words", "activation", "slope", "limit", "offset"),
    [
        ("--quick-geglu", "quick_geglu", 1.702, 7.0, 0.0),
        ("--quick-geglu --glu-linear-offset 1.0", "quick_geglu", 1.702, 7.0, 1.0),
        ("--activation-func-clamp-value 5 --quick-geglu", "clamped_swiglu", 1.702, 5.0, 0.0),
        ("--quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7", "clamped_swiglu", 1.702, 7.0, 1.0),
        ("--swiglu --activation-func-clamp-value 10", "clamped_swiglu", 1.0, 10.0, 0.0),
        ("--swiglu", "swiglu", 1.702, 7.0, 1.0),
        ("--squared-relu", "squared_relu", 1.702, 7.0, 1.0),
        ("--openai-gelu --no-bias-gelu-fusion", "gelu_tanh", 1.702, 7.0, 1.0),
        ("", "gelu_tanh", 1.702, 7.0, 1.0),
        ("--no-bias-gelu-fusion", "gelu", 1.702, 7.0, 1.0),
        ("--disable-bias-linear", "gelu", 1.702, 7.0, 1.0),
        ("--disable-bias-linear --swiglu --no-bias-gelu-fusion", "swiglu", 1.702, 7.0, 1.0),
        ("--no-bias-gelu-fusion --activation relu", "relu", 1.702, 7.0, 1.0),
    ],
)
def test_activation_follows_from_all_flags(words, activation, slope, limit, offset):
    model = model_of(words)
    found = (model.activation, model.swiglu_alpha, model.swiglu_limit, model.swiglu_offset)
    assert found == (activation, slope, limit, offset)


@pytest.mark.parametrize(
    ("words", "window", "types"),
    [
        ("--window-size 127,0", 128, None),
        ("--window-size '(127,0)' --window-attn-skip-freq 1", 128, ["full"] * 4),
        ("--window-attn-skip-freq 2 --window-size 7,0", 8, ["sliding", "full"] * 2),
        ("--window-size 7,0 --window-attn-skip-freq 4", 8, ["sliding"] * 3 + ["full"]),
        ("--window-size 7,0 --window-attn-skip-freq [1,1,0]+[1]", 8, ["sliding", "sliding", "full", "sliding"]),
        ("--window-size -1,0 --window-attn-skip-freq 2", None, None),
        ("--window-attn-skip-freq 2", None, None),
    ],
)
def test_window_of_each_layer_is_that_of_megatron(words, window, types):
    model = model_of(words)
    assert model.attention_window == window
    pattern = model.layer_type_pattern
    assert (None if pattern is None else [pattern[at % len(pattern)].split("_")[0] for at in range(4)]) == types


@pytest.mark.parametrize(
    ("words", "sinks", "off_by_one"),
    [("vanilla", False, False), ("learnable", True, False), ("off-by-one", False, True)],
)
def test_type_of_softmax_selects_the_sinks(words, sinks, off_by_one):
    model = model_of(f"--softmax-type {words} --attention-dropout 0")
    assert (model.attention_sinks, model.softmax_off_by_one) == (sinks, off_by_one)


def test_yarn_positions_scale_without_a_rope_type():
    words = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8"
    model = model_of(words)
    assert model.position_embedding_type == "rotary"
    assert (model.rotary_scaling_object["factor"], "truncate" in model.rotary_scaling_object) == (4.0, False)
    assert model_of(f"{words} --no-yarn-correction-range-round-to-int").rotary_scaling_object["truncate"] is False
    assert model_of("--position-embedding-type rope --rope-type rope").rotary_scaling_object is None


def test_interpolated_positions_are_linear_scaling():
    model = model_of("--position-embedding-type rope --rotary-seq-len-interpolation-factor 4")
    assert model.rotary_scaling_object == {"rope_type": "linear", "factor": 4.0}


def test_interval_of_experts_counts_from_the_last_of_each_group():
    experts = "--num-experts 2 --moe-router-topk 1"
    assert model_of(f"{experts} --expert-interval 2").expert_layers == (0, 1, 0, 1)
    assert model_of(f"{experts} --expert-interval 1").expert_layers is None
    assert model_of(f"{experts} --moe-layer-freq 2").expert_layers == (1, 0, 1, 0)


def config_of_length(words):
    return config_from(f"{SIZES} {words}", vocab_size=100)[0]


def test_lengths_in_tokens_become_samples():
    words = "--train-tokens 3200 --lr-decay-tokens 1.6e3 --lr-warmup-tokens 64 --lr-decay-style cosine"
    config = config_of_length(words)
    assert config.training.train_samples == 100
    assert (config.optimizer.lr_decay_samples, config.optimizer.lr_warmup_samples) == (50, 2)


def test_lengths_in_tokens_become_steps_of_a_run_in_steps():
    words = "--train-tokens 3200 --lr-decay-tokens 1600 --lr-warmup-tokens 128 --global-batch-size 2 --train-iters {}"
    assert config_of_length(words.format(1000)).training.train_iters == 50
    config = config_of_length(words.format(30))
    assert (config.training.train_iters, config.optimizer.lr_decay_iters) == (30, 25)
    assert config.optimizer.lr_warmup_iters == 2


@pytest.mark.parametrize(
    ("words", "capacity"),
    [
        # The defaults of Megatron-DeepSpeed's options.
        ("--moe-train-capacity-factor 2.0", (2.0, 1.0, 4)),
        ("--moe-train-capacity-factor 2.0 --moe-eval-capacity-factor 1.5 --moe-min-capacity 0", (2.0, 1.5, 0)),
        # Megatron-LM has one factor, and no minimum.
        ("--moe-expert-capacity-factor 2.0", (2.0, None, 0)),
    ],
)
def test_capacity_of_experts_has_the_defaults_of_the_program(words, capacity):
    model = config_of_length(f"--num-experts 4 --train-iters 2 {words}").model
    assert (model.moe_expert_capacity_factor, model.moe_eval_capacity_factor, model.moe_min_capacity) == capacity


@table(
    "words",
    [
        "--glu-linear-offset 1.0 --swiglu",
        "--quick-geglu --swiglu",
        "--quick-geglu --glu-linear-offset nan",
        "--quick-geglu --activation-func-clamp-value x",
        "--window-size 128",
        "--window-size 5,5",
        "--window-size x,0",
        "--window-size -7,0",
        "--window-size 7,0 --window-attn-skip-freq [2]",
        "--window-size 7,0 --window-attn-skip-freq __import__('os')",
        "--train-tokens 100",
        "--train-tokens x --seq-length 8",
        "--train-tokens 100 --seq-length 8 --train-iters 10",
        "--expert-interval 3 --num-layers 4",
        "--expert-interval x --num-layers 4",
    ],
)
def test_combination_that_megatron_has_not_is_refused_or_an_error(words):
    assert len(problems_of(words)) == 1


def test_flag_without_effect_is_a_note():
    translation = translate(shlex.split("--window-attn-skip-freq 2 --glu-linear-offset 1"), "gpt", declared("gpt"))
    assert {note.partition(":")[0] for note in translation.notes} == {"--window-attn-skip-freq", "--glu-linear-offset"}


def test_sinks_of_zero_and_learned_ones_exclude_each_other():
    words = "--softmax-type off-by-one --attention-sinks --attention-dropout 0"
    config, _ = config_from(f"{SIZES} --train-iters 1 {words}", vocab_size=100)
    assert [problem.path for problem in validate(config, 1)] == ["--softmax-off-by-one"]


@pytest.mark.parametrize("words", ["--swiglu-offset 1", "--swiglu-alpha 2 --activation swiglu"])
def test_shape_of_a_gate_requires_its_activation(words):
    config, _ = config_from(f"{SIZES} --train-iters 1 {words}", vocab_size=100)
    assert [problem.path for problem in validate(config, 1)] == [words.split()[0]]


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ("--group-query-attention", 1),
        ("--group-query-attention --num-query-groups 2", 2),
        ("--num-key-value-heads 2 --group-query-attention", 2),
        ("", 4),
    ],
)
def test_grouped_queries_without_a_number_are_one_group(words, groups):
    assert model_of(words).num_query_groups == groups


def test_missing_positions_are_not_replaced_by_learned_ones():
    assert problems_of(f"{SIZES} --no-position-embedding") == ["--no-position-embedding"]
    assert problems_of(f"{SIZES} --no-position-embedding --config FILE") == []
    for words in ("--use-rotary-position-embeddings", "--position-embedding-type rope"):
        assert model_of(f"--no-position-embedding {words}").position_embedding_type == "rotary"
    assert model_of("--no-position-embedding", "llama").position_embedding_type == "rotary"
    words = shlex.split("--no-position-embedding --group-query-attention")
    assert len(translate(words, "bert", declared("bert")).problems) == 2


@pytest.mark.parametrize(("words", "has_bias"), [("", True), ("--disable-bias-linear", False)])
def test_router_of_gpt_oss_has_a_bias_where_layers_have(words, has_bias):
    assert model_of(f"--enable-gpt-oss --num-experts 4 {words}").moe_router_bias == has_bias
    assert not model_of(f"--enable-gpt-oss {words}").moe_router_bias
