"""Option lists of published scripts: each flag is known, and the configuration is that of the script."""

from __future__ import annotations

import math
import shlex
import tomllib
from pathlib import Path

import typer

from dynmo_train.cli import app
from dynmo_train.config import option_specs, resolve_checked
from dynmo_train.config.compat.flags import FLAGS
from dynmo_train.config.compat.project_defaults import torchtitan_defaults
from dynmo_train.config.compat.translate import MULTI_WORD_FLAGS, declared_name, translate
from dynmo_train.config.options import DefaultContext
from tests.tables import table

FOLDER = Path(__file__).parent / "megatron"
SCRIPTS = tomllib.loads((FOLDER / "scripts.toml").read_text())
COMMANDS = typer.main.get_command(app).commands["pretrain"].commands
LLAMA3 = {
    "model.num_layers": 32,
    "model.hidden_size": 4096,
    "model.ffn_hidden_size": 14336,
    "model.num_attention_heads": 32,
    "model.num_query_groups": 8,
    "model.kv_channels": 128,
    "model.activation": "swiglu",
    "model.normalization": "rmsnorm",
    "model.position_embedding_type": "rotary",
    "model.rotary_base": 1000000,
    "model.add_bias_linear": False,
    "model.untie_embeddings_and_output_weights": True,
    "model.vocab_size": 128256,
    "parallel.zero_stage": 1,
    "precision.bf16": True,
    "precision.fp8_format": "hybrid",
    "optimizer.decoupled_lr": 5e-4,
    "optimizer.decoupled_min_lr": 4.5e-5,
    "training.global_batch_size": 128,
    "data.split": "'99,1,0'",
}
EXPECTED = {
    "gpt3-175b": {
        "model.num_layers": 96,
        "model.hidden_size": 12288,
        "model.ffn_hidden_size": 49152,
        "parallel.tensor_model_parallel_size": 8,
        "parallel.pipeline_model_parallel_size": 16,
        "parallel.data_parallel_size": 1,
        "optimizer.lr_warmup_fraction": 0.001,
        "precision.fp16": True,
        "training.step_batch_size_schedule": "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536",
        "training.train_iters": 500000,
        "optimizer.lr_decay_iters": 430000,
    },
    "llama3-8b-fp8": LLAMA3,
    "llama3-8b-fsdp": {**LLAMA3, "parallel.zero_stage": 3},
    "mixtral-8x7b": {
        "model.num_experts": 8,
        "model.moe_router_topk": 2,
        "model.moe_router_pre_softmax": False,
        "model.moe_router_load_balancing_type": "aux_loss",
        "model.moe_aux_loss_coeff": "1e-2",
        "model.num_query_groups": 8,
        "model.activation": "swiglu",
        "parallel.pipeline_model_parallel_size": 4,
        "parallel.expert_model_parallel_size": 8,
        "parallel.data_parallel_size": 8,
        "optimizer.lr_warmup_iters": 500,
    },
    "bert-340m": {
        "model.num_layers": 24,
        "parallel.tensor_model_parallel_size": 8,
        "parallel.pipeline_model_parallel_size": 16,
        "optimizer.lr_decay_style": "linear",
        "precision.fp16": True,
    },
    "t5-220m": {
        "model.num_layers": 12,
        "model.decoder_num_layers": 12,
        "model.seq_length": 512,
        "model.decoder_seq_length": 128,
        "model.ffn_hidden_size": 3072,
        "precision.bf16": True,
    },
    "qwen3-30b-a3b": {
        "model.num_experts": 128,
        "model.moe_router_topk": 8,
        "model.moe_ffn_hidden_size": 768,
        "model.qk_norm": "head",
        "model.num_query_groups": 4,
        "model.kv_channels": 128,
        "model.rotary_base": 1000000,
        "model.add_bias_linear": False,
        "model.max_position_embeddings": 40960,
    },
    "t5-11b": {
        "model.num_layers": 24,
        "model.decoder_num_layers": 24,
        "model.ffn_hidden_size": 10240,
        "model.decoder_seq_length": 128,
        "data.calculate_per_token_loss": True,
        "parallel.tensor_model_parallel_size": 4,
        "parallel.data_parallel_size": 2,
    },
    "deepseek-v3": {
        "model.multi_latent_attention": True,
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_force_load_balancing": True,
        "model.mtp_num_layers": 1,
        "parallel.zero_stage": 3,
        "parallel.grad_reduce_in_bf16": True,
    },
    "gpt-oss": {
        "model.moe_router_bias": False,  # the script has --disable-bias-linear
        "model.activation": "clamped_swiglu",
        "model.swiglu_alpha": 1.702,
        "model.swiglu_limit": 7.0,
        "model.swiglu_offset": 1.0,
        "model.attention_sinks": True,
        "model.attention_dropout": 0.1,  # Megatron's default: the script has no --attention-dropout
        "model.attention_window": 128,
        "model.layer_type_pattern": ("sliding_attention", "full_attention"),
        "model.rotary_scaling_object": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 131072,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "attention_factor": 0.1 * math.log(32) + 1,
        },
        "model.add_bias_linear": False,
        "model.num_experts": 4,
    },
    "deepspeed-moe": {
        "model.num_experts": 64,
        "model.moe_expert_capacity_factor": 1.0,
        "model.moe_eval_capacity_factor": 1.0,
        "model.moe_min_capacity": 4,
        "parallel.expert_model_parallel_size": 8,
    },
    "deepspeed-zero-bubble": {
        "training.train_samples": 146484375,
        "optimizer.lr_decay_samples": 146484375,
        "optimizer.lr_warmup_samples": 1464843,
        "parallel.schedule": "zero-bubble",
    },
    "deepspeed-llama2": {
        "model.num_query_groups": 4,
        "model.activation": "swiglu",
        "model.normalization": "rmsnorm",
        "model.position_embedding_type": "rotary",
        "run.deepspeed_config": ".ckpt/deepspeed.json",
        "parallel.tensor_model_parallel_size": 2,
        "parallel.pipeline_model_parallel_size": 2,
    },
    "deepspeed-gpt-distributed-mp": {"parallel.pipeline_model_parallel_size": 2, "precision.fp16": True},
}
SIZES = {
    "gpt3-175b": 128,
    "bert-340m": 128,
    "mixtral-8x7b": 32,
    "deepspeed-llama2": 8,
    "llama3-8b-fp8": 8,
    "llama3-8b-fsdp": 8,
}


def declared(family):
    return {
        name: 0 if option.is_flag else option.nargs
        for option in COMMANDS[family].params
        for name in (*option.opts, *option.secondary_opts)
    }


def translated(name):
    script = SCRIPTS[name]
    return translate(shlex.split(script["words"]), script["family"], declared(script["family"]))


@table("name", SCRIPTS)
def test_each_flag_of_a_script_is_known(name):
    translation, own = translated(name), declared(SCRIPTS[name]["family"])
    assert [word for word in translation.arguments if word.startswith("--") and word not in own] == []
    assert sorted(problem.path for problem in translation.problems) == []
    assert all(": " in note for note in translation.notes)


@table("name", SCRIPTS)
def test_configuration_of_a_script_has_its_sizes(name):
    family = SCRIPTS[name]["family"]
    context = COMMANDS[family].make_context(family, [*translated(name).arguments])
    flags = {key: value for key, value in context.params.items() if key in option_specs() and value is not None}
    config = resolve_checked(
        flags=flags,
        file={} if "vocab_size" in flags else {"vocab_size": 50257},
        command={"family": family},
        context=DefaultContext(world_size=SIZES.get(name, 8)),
    )
    found = {}
    for key in EXPECTED.get(name, {}):
        concern, _, option = key.partition(".")
        found[key] = getattr(config.concern(concern), option)
    assert found == EXPECTED.get(name, {})


PARSER = [line.split() for line in (FOLDER / "options.txt").read_text().splitlines() if not line.startswith("#")]


def test_each_option_of_megatron_is_known_with_its_number_of_values():
    assert len(PARSER) == 876
    # Older releases and other projects give these another number; scripts split the schedule into words.
    other = {"--lazy-mpu-init", "--profile", "--pretrained-checkpoint", "--step-batch-size-schedule"}
    wrong = []
    for name, count in PARSER:
        expected = None if count in "*+?" else int(count)
        for family in COMMANDS:
            own = declared(family)
            ours = declared_name(name, own, FLAGS)
            values = MULTI_WORD_FLAGS.get(ours, own[ours]) if ours in own else FLAGS[name].num_values
            if values != expected and name not in other:
                wrong.append((family, name, values, expected))
    assert wrong == []


FIELDS = [line for line in (FOLDER / "torchtitan_fields.txt").read_text().splitlines() if not line.startswith("#")]
BRIDGE = [line for line in (FOLDER / "bridge_fields.txt").read_text().splitlines() if not line.startswith("#")]
# Fields of Megatron-Bridge with another name than the option of Megatron-LM; None: no option of pre-training.
BRIDGE_NAMES = {
    "checkpoint.fully_parallel_save": "--ckpt-fully-parallel-save",
    "dataset.blend": "--data-path",
    "dataset.blend_per_split": "--train-data-path",
    "dataset.random_seed": "--seed",
    "dataset.skip_getting_attention_mask_from_dataset": "--no-create-attention-mask-in-dataloader",
    "ddp.average_in_collective": "--ddp-average-in-collective",
    "ddp.check_for_nan_in_grad": "--no-check-for-nan-in-loss-and-grad",
    "ddp.grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "mixed_precision.grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "dist.enable_megatron_core_experimental": "--enable-experimental",
    "model.apply_dsa_kernel_fusion": "--dsa-kernel-backend",
    "model.apply_rope_fusion": "--no-rope-fusion",
    "model.bias_activation_fusion": "--no-bias-gelu-fusion",
    "model.microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "model.moe_a2a_overlap": "--overlap-moe-expert-parallel-comm",
    "model.num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "model.num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "model.params_dtype": "--bf16",
    "model.pipeline_dtype": "--bf16",
    "model.quant_recipe": "--te-precision-config-file",
    "model.use_fused_mhc": "--enable-mhc-connections",
    "model.use_te_rng_tracker": "--te-rng-tracker",
    "model.virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "model.yarn_mscale": "--mscale",
    "model.yarn_mscale_all_dim": "--mscale-all-dim",
    "model.yarn_rotary_scaling_factor": "--rotary-scaling-factor",
    "scheduler.max_lr": "--lr",
    **dict.fromkeys(("model.csa_compress_ratios", "model.mtp_eval_in_bf16"), "--experimental-attention-variant"),
    **dict.fromkeys(
        (
            *("dataset.dataset_kwargs", "dataset.dataset_root", "dataset.do_test", "dataset.do_validation"),
            *("dataset.hf_output_root", "dataset.hf_validation_proportion", "dataset.max_train_samples"),
            *("dataset.preprocessing", "tokenizer.hf_tokenizer_kwargs", "tokenizer.rank"),
        )
    ),
}


def is_known(flag):
    return flag in FLAGS or any(declared_name(flag, declared(family), FLAGS) in declared(family) for family in COMMANDS)


def test_each_field_of_torchtitan_is_known():
    assert len(FIELDS) > 60
    assert [field for field in FIELDS if f"--{field}" not in FLAGS] == []


def test_each_field_of_megatron_bridge_has_an_option():
    assert len(BRIDGE) > 140
    unknown = []
    for field in BRIDGE:
        dashed = field.partition(".")[2].replace("_", "-")
        flags = [f"--{dashed}", f"--no-{dashed}", f"--disable-{dashed}"]
        if field in BRIDGE_NAMES:
            flags = [BRIDGE_NAMES[field]] if BRIDGE_NAMES[field] else []
        if flags and not any(map(is_known, flags)):
            unknown.append(field)
    assert unknown == []


TORCHTITAN_LLAMA = (
    "--optimizer.name AdamW --optimizer.lr 3e-4 --lr_scheduler.warmup_steps 200 --training.max_context_length 8192"
    " --training.num_tokens_per_train_step -1 --training.steps 1000 --training.max_norm 1.0"
    " --parallelism.tensor_parallel_degree 2 --parallelism.enable_sequence_parallel"
    " --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule Interleaved1F1B"
    " --activation_checkpoint.mode selective --checkpoint.interval 500 --metrics.log_freq 1 --validator.freq 5"
    " --num-layers 8 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 8192 --vocab-size 100"
    " --mock-data --micro-batch-size 1 --global-batch-size 8"
)


def test_configuration_of_torchtitan_has_its_sizes():
    translation = translate(shlex.split(TORCHTITAN_LLAMA), "llama", declared("llama"))
    assert not translation.problems
    values = COMMANDS["llama"].make_context("llama", list(translation.arguments)).params
    flags = {key: value for key, value in values.items() if key in option_specs() and value is not None}
    config = resolve_checked(flags=flags, file={}, command={"family": "llama"}, context=DefaultContext(world_size=8))
    assert (config.parallel.schedule, config.parallel.virtual_stages_per_worker) == ("interleaved-1f1b", 2)
    assert (config.parallel.sequence_parallel, config.parallel.data_parallel_size) == (True, 2)
    assert (config.model.seq_length, config.training.train_iters, config.training.eval_interval) == (8192, 1000, 5)
    assert config.training.recompute_granularity == "selective"


@table(
    ("words", "given", "processes", "expected"),
    [
        ("--num-layers 2", {}, 8, None),
        ("--training.steps 20", {"train_iters": 20}, 1, {"lr_warmup_iters": 20, "eval_iters": 0, "bf16": True}),
        ("--training.seq_len 64", {"seq_length": 64}, 2, {"train_iters": 10_000, "zero_stage": 3, "lr": 8e-4}),
        (
            "--parallelism.pipeline_parallel_degree 2 --validation.freq 5 --checkpoint.enable",
            {"pipeline_model_parallel_size": 2, "eval_interval": 5},
            2,
            {"micro_batch_size": 1, "gradient_accumulation_steps": 8, "save_interval": 500, "keep_checkpoints": 10},
        ),
        (
            "--parallelism.tensor_parallel_degree=2 --training.mixed_precision_param=float32",
            {"tensor_model_parallel_size": 2, "lr": 1e-4},
            2,
            {"sequence_parallel": True, "micro_batch_size": 8, "weight_decay": 0.1, "adam_beta2": 0.95},
        ),
    ],
)
def test_command_line_of_torchtitan_has_its_defaults(words, given, processes, expected):
    found = torchtitan_defaults(words.split(), given, "llama", processes)
    assert found.items() >= (expected or {}).items()
    assert bool(found) == (expected is not None)
    assert not found.keys() & given.keys()
    assert ("bf16" in found) == (bool(found) and "mixed_precision" not in words)
    assert not found.keys() - option_specs().keys()
