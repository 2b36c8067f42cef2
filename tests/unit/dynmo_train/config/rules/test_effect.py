"""Options without effect are refused or cause a warning; invalid values do not hide conflicts."""

from __future__ import annotations

import pytest

from dynmo_train._common.document import DocumentError
from dynmo_train.config import DefaultContext, config_of, option_specs, resolve_checked, validate
from dynmo_train.config.fields import values_of
from dynmo_train.config.rules.effect import EFFECTS, effect_warnings
from dynmo_train.config.rules.task_effect import task_warnings
from dynmo_train.config.sections.evaluation import FinetuneConfig, GenerateConfig, InferenceConfig
from tests.tables import table
from tests.unit.dynmo_train.config.small_config import SMALL

# Other options that disable an option which has an effect by default.
WITHOUT = {
    "rope_scaling_factor": {"family": "llama"},
    "relative_attention_num_buckets": {"family": "t5"},
    "relative_attention_max_distance": {"family": "t5"},
    "kv_channels": {"family": "llama", "multi_latent_attention": True},
    "split": {"data_path": None, "train_data_path": "a", "valid_data_path": "b"},
    **{
        name: {"data_path": None, "hf_dataset": "a", "tokenizer_model": "t", "eval_iters": 0}
        for name in ("data_impl", "sample_order", "data_cache_path")
    },
    "eval_interval": {"eval_iters": 0},
    **{name: {"sft": True} for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")},
    "pack_to": {"balance": "online"},
    "min_throughput_fraction": {"balance": "online"},
    "balance_lockstep": {"balance": "online"},
    "loss_spike_action": {"check_for_nan_in_loss_and_grad": False, "save_interval": 2},
    "hysteresis": {"fp16": True, "loss_scale": 8.0},
    **{name: {"optimizer": "sgd"} for name in ("adam_beta1", "adam_beta2", "adam_eps")},
}
WITH = {
    "muon_tp_mode": {"optimizer": "muon", "world_size": 2, "tensor_model_parallel_size": 2},
    "moe_expert_capacity_factor": {"num_experts": 4},
    "moe_eval_capacity_factor": {"num_experts": 4, "moe_expert_capacity_factor": 1.0},
    "moe_min_capacity": {"num_experts": 4, "moe_expert_capacity_factor": 1.0},
    "pruning_freq": {"sparsify": True},
    "pack_to": {"balance": "online", "world_size": 2, "global_batch_size": 4},
    "emb_comm_opt": {"world_size": 2, "pipeline_model_parallel_size": 1, "global_batch_size": 8},
    "split": {},
    "rebalance_interval": {"balance": "online"},
}
OTHER = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": "0.5",
    "moe_routing": "expert-choice",
    "split": "80,20,0",
    "selective_grad_comp_way": "1",
}


def other_value(name):
    """An allowed value of an option that is not its default."""
    spec = option_specs()[name]
    if name in OTHER:
        return OTHER[name]
    if spec.choices:
        return next(choice for choice in spec.choices if choice != spec.default)
    if spec.kind is bool:
        return not spec.default
    if spec.kind is str:
        return "x"
    limits = spec.declaration
    candidates = (1, 2, 3, 0.5, 0.25, 0.125, 64)
    fits = [spec.kind(n) for n in candidates if spec.convert(spec.kind(n))[1] is None and spec.kind(n) == n]
    assert fits, limits
    return next(value for value in fits if value != spec.default)


def messages_of(name, world_size=1, **values):
    config = config_of(DefaultContext(world_size=world_size), **{**SMALL, **values, name: other_value(name)})
    flag = option_specs()[name].flag
    refused = [problem for problem in validate(config, world_size) if problem.path == flag]
    warned = [warning for warning in effect_warnings(config) if warning.startswith(f"{flag} has no effect")]
    return refused, warned


@table(("name", "refuse"), [(name, effect.refuse) for effect in EFFECTS for name in effect.options])
def test_effect_option_without_effect_is_refused_or_reported(name, refuse):
    refused, warned = messages_of(name, **WITHOUT.get(name, {}))
    assert (len(refused), len(warned)) == ((1, 0) if refuse else (0, 1))


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"greedy": True, "temperature": 0.7, "top_k": 5}, ["--top-k", "--temperature"]),
        ({"temperature": 0.0, "top_p": 0.9, "seed": 7}, ["--seed", "--top-p"]),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 7}, []),
        ({"top_p": 0.0, "seed": 7}, ["--seed"]),
        ({"genfile": "a", "sample_output_file": "b"}, ["--sample-output-file"]),
        ({"prompts": "a", "sample_input_file": "b"}, ["--sample-input-file"]),
        ({"interactive": True, "genfile": "a"}, ["--genfile"]),
        ({"interactive": True}, []),
    ],
)
def test_task_warnings_generate_option_without_effect_is_reported(given, flags):
    warned = task_warnings(GenerateConfig(**given))
    assert [warning.partition(" has no effect ")[0] for warning in warned] == flags


FILES = {"vocab_file": "v.json", "merge_file": "m.txt"}


@table(
    ("given", "flags"),
    [
        ({}, []),
        ({"bf16": True}, []),
        ({"bf16": True, "fp16": True}, ["--fp16"]),
        ({"tokenizer_model": "t.json"}, []),
        ({**FILES, "tokenizer_type": "GPT2BPETokenizer"}, []),
        ({**FILES, "tokenizer_type": "GPT2BPETokenizer", "tokenizer_model": "t.json"}, ["--tokenizer-model"]),
        ({**FILES, "tokenizer_type": "BertWordPieceLowerCase"}, ["--merge-file"]),
        ({"tokenizer_model": "t.json", "vocab_file": "v.txt"}, ["--vocab-file"]),
        ({"tokenizer_type": "BertWordPieceCase"}, ["--tokenizer-type"]),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "t.model"}, []),
    ],
)
def test_task_warnings_evaluate_option_without_effect_is_reported(given, flags):
    warned = task_warnings(values_of(InferenceConfig, {"load": "run", **given}))
    assert [warning.partition(" has no effect ")[0] for warning in warned] == flags


def test_task_warnings_finetune_epochs_without_data_is_reported():
    values = {"valid_data": "d", "epochs": 2}
    assert task_warnings(FinetuneConfig(**values)) == ["--epochs has no effect without --train-data"]
    assert task_warnings(FinetuneConfig(**values, train_data="t")) == []


@table("name", WITH)
def test_effect_option_with_effect_is_accepted(name):
    assert messages_of(name, **WITH[name]) == ([], [])


def problems(**values):
    with pytest.raises(DocumentError) as error:
        resolve_checked(flags={**SMALL, **values}, file={}, command={"family": "gpt"}, context=DefaultContext())
    return sorted(problem.path for problem in error.value.problems)


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"num_layers": 0, "min_lr": 1.0}, ["--min-lr", "--num-layers"]),
        (
            {"seed": -1, "bf16": True, "fp16": True, "freeze_tied": True},
            ["--fp16", "--freeze-tied", "--seed"],
        ),
        ({"lr_decay_style": "none", "num_attention_heads": 5}, ["--hidden-size", "--lr-decay-style"]),
        ({"train_iters": None, "max_position_embeddings": 8}, ["--seq-length", "--train-iters"]),
        (
            {"data_path": None, "moe_expert_capacity_factor": 2.0, "use_error_feedback": True},
            ["--data-path", "--moe-expert-capacity-factor", "--use-error-feedback"],
        ),
        ({"lr": 0.0, "min_lr": 1.0}, ["--lr"]),  # no lower than which --lr?
        ({"micro_batch_size": 0, "global_batch_size": 7}, ["--micro-batch-size"]),
        ({"hidden_size": 0, "num_attention_heads": 3}, ["--hidden-size"]),
    ],
)
def test_resolve_checked_invalid_value_hides_no_conflict(values, flags):
    assert problems(**values) == flags


def test_resolve_checked_missing_options_make_no_conflict():
    with pytest.raises(DocumentError) as error:
        resolve_checked(flags={}, file={}, command={"family": "gpt"}, context=DefaultContext())
    assert {problem.kind for problem in error.value.problems} == {"missing"}
