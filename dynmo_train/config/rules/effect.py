"""Options without effect: a table of the condition under which each option has an effect.

An option counts as given if the command line or a file sets it to another value than its default. If the user would
miss what the option requests, the run is refused. Otherwise a warning is printed: for parameters of a disabled feature,
and for options that depend on the number of processes, because a run that lost ranks resumes with the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..._common.document import Problem
from ..resolve import option_specs
from ..schema import Config
from .problem import Rule, conflict


@dataclass(frozen=True, kw_only=True)
class EffectRule:
    """The condition under which options have an effect.

    Attributes:
        options: names of the options.
        when: whether they have an effect in a configuration.
        without: continues the message "has no effect".
        refuse: whether the lack of effect is an error; else a warning.
    """

    options: tuple[str, ...]
    when: Callable[[Config], bool]
    without: str
    refuse: bool = False


def _freezes(config: Config) -> bool:
    return bool(config.freezing.freeze_schedule or config.freezing.freeze_adaptive)


def _compresses(config: Config) -> bool:
    return config.compression.inter_grad_comp or config.compression.grad_comp


def _scales(config: Config) -> bool:
    return config.precision.fp16 and config.precision.loss_scale is None


def _several(config: Config) -> bool:
    return config.parallel.pipeline_model_parallel_size > 1


def _replicas(config: Config) -> bool:
    return config.parallel.data_ranks > 1


def _has_capacity(config: Config) -> bool:
    model = config.model
    return model.moe_expert_capacity_factor is not None or model.base_family not in ("gpt", "llama")


EFFECTS: tuple[EffectRule, ...] = (
    EffectRule(
        options=(
            "moe_router_topk",
            "moe_routing",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_router_load_balancing_type",
            "moe_router_score_function",
            "moe_router_pre_softmax",
            "moe_router_topk_scaling_factor",
            "moe_router_enable_expert_bias",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_group_experts",
            "moe_ffn_hidden_size",
            "moe_layer_freq",
            "moe_expert_capacity_factor",
            "moe_shared_expert_intermediate_size",
        ),
        when=lambda c: c.model.num_experts is not None or c.model.base_family not in ("gpt", "llama"),
        without="without --num-experts",
        refuse=True,
    ),
    EffectRule(
        options=("moe_pad_expert_input_to_capacity", "moe_eval_capacity_factor", "moe_min_capacity"),
        when=_has_capacity,
        without="without --moe-expert-capacity-factor",
        refuse=True,
    ),
    EffectRule(
        options=("moe_shared_expert_gate",),
        when=lambda c: (
            c.model.moe_shared_expert_intermediate_size is not None or c.model.base_family not in ("gpt", "llama")
        ),
        without="without --moe-shared-expert-intermediate-size",
        refuse=True,
    ),
    EffectRule(
        options=("moe_router_bias_update_rate",),
        when=lambda c: c.model.moe_router_enable_expert_bias or c.model.base_family not in ("gpt", "llama"),
        without="without --moe-router-enable-expert-bias",
    ),
    EffectRule(options=("moe_token_drop_policy",), when=_has_capacity, without="without --moe-expert-capacity-factor"),
    EffectRule(
        options=("rope_scaling_factor",),
        when=lambda c: c.model.use_rope_scaling or c.model.base_family != "llama",
        without="without --use-rope-scaling",
    ),
    EffectRule(
        options=("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        when=lambda c: c.model.multi_latent_attention or c.model.base_family not in ("gpt", "llama"),
        without="without --multi-latent-attention",
        refuse=True,
    ),
    EffectRule(
        options=("kv_channels",),
        when=lambda c: not c.model.multi_latent_attention,
        without="with --multi-latent-attention; use --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim",
    ),
    EffectRule(
        options=("rotary_scaling_factor",),
        when=lambda c: c.model.rope_type == "yarn" or c.model.base_family not in ("gpt", "llama"),
        without="without --rope-type yarn",
        refuse=True,
    ),
    EffectRule(
        options=(
            "mscale",
            "mscale_all_dim",
            "yarn_original_max_position_embeddings",
            "yarn_beta_fast",
            "yarn_beta_slow",
            "yarn_correction_range_round_to_int",
        ),
        when=lambda c: c.model.yarn_object is not None or c.model.base_family not in ("gpt", "llama"),
        without="without --rotary-scaling-factor above 1",
    ),
    EffectRule(
        options=("mtp_loss_scaling_factor",),
        when=lambda c: c.model.mtp_num_layers > 0 or c.model.base_family not in ("gpt", "llama"),
        without="without --mtp-num-layers",
    ),
    EffectRule(
        options=("relative_attention_num_buckets", "relative_attention_max_distance"),
        when=lambda c: c.model.position_embedding_type == "relative" or c.model.base_family != "t5",
        without="without --position-embedding-type relative",
    ),
    EffectRule(
        options=("mask_prob", "short_seq_prob", "whole_word_masking"),
        when=lambda c: c.model.base_family in ("bert", "t5"),
        without="for families other than bert and t5",
    ),
    EffectRule(
        options=("split",), when=lambda c: bool(c.data.data_path), without="with --train-data-path or --hf-dataset"
    ),
    EffectRule(
        options=(
            "hf_dataset_name",
            "hf_dataset_split",
            "hf_dataset_revision",
            "hf_text_field",
            "hf_shuffle_buffer",
            "hf_valid_split",
            "hf_valid_dataset",
        ),
        when=lambda c: c.data.hf_dataset is not None,
        without="without --hf-dataset",
        refuse=True,
    ),
    EffectRule(
        options=("data_impl", "sample_order", "data_cache_path"),
        when=lambda c: c.data.hf_dataset is None,
        without="with --hf-dataset",
    ),
    EffectRule(options=("sft_packing",), when=lambda c: c.data.sft, without="without --sft", refuse=True),
    EffectRule(options=("sample_order", "data_cache_path"), when=lambda c: not c.data.sft, without="with --sft"),
    EffectRule(
        options=("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        when=lambda c: not c.data.sft,
        without="with --sft, whose samples state where conversations begin and what is learned",
        refuse=True,
    ),
    EffectRule(
        options=("zero_gradient_sync",), when=lambda c: c.parallel.zero_stage > 0, without="without --zero-stage"
    ),
    EffectRule(
        options=("hsdp",),
        when=lambda c: c.parallel.zero_stage > 0 and _replicas(c),
        without="without --zero-stage and several data-parallel replicas",
    ),
    EffectRule(
        options=("DDP_impl", "zero_stage", "grad_reduce_in_bf16"),
        when=_replicas,
        without="with one data-parallel replica",
    ),
    EffectRule(options=("emb_comm_opt",), when=_replicas, without="with one data-parallel replica"),
    EffectRule(
        options=("torch_compile_backend",), when=lambda c: c.training.torch_compile, without="without --torch-compile"
    ),
    EffectRule(
        options=("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
        when=lambda c: c.tracking.wandb_project is not None,
        without="without --wandb-project",
    ),
    EffectRule(
        options=("mlflow_tracking_uri", "mlflow_run_name"),
        when=lambda c: c.tracking.mlflow_experiment is not None,
        without="without --mlflow-experiment",
    ),
    EffectRule(options=("eval_interval",), when=lambda c: c.training.eval_iters > 0, without="with --eval-iters 0"),
    EffectRule(
        options=("curriculum_steps", "curriculum_multiple", "curriculum_schedule"),
        when=lambda c: c.training.curriculum_shortest is not None,
        without="without --curriculum-shortest",
    ),
    EffectRule(
        options=("curriculum_root_degree",),
        when=lambda c: c.training.curriculum_shortest is not None and c.training.curriculum_schedule == "fixed_root",
        without="without --curriculum-shortest and --curriculum-schedule fixed_root",
    ),
    EffectRule(
        options=("async_tensor_parallel",),
        when=lambda c: c.parallel.sequence_parallel and not c.training.torch_compile and not c.precision.uses_float8,
        without="without --sequence-parallel, or with --torch-compile or --fp8",
    ),
    EffectRule(
        options=("fp8_recipe", "first_last_layers_bf16"),
        when=lambda c: c.precision.uses_float8,
        without="without --fp8",
        refuse=True,
    ),
    EffectRule(
        options=("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        when=lambda c: c.precision.first_last_layers_bf16,
        without="without --first-last-layers-bf16",
        refuse=True,
    ),
    EffectRule(
        options=("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        when=_scales,
        without="without --fp16 and dynamic loss scaling",
    ),
    EffectRule(
        options=(
            "pruning_start_iter",
            "pruning_end_iter",
            "pruning_freq",
            "initial_sparsity",
            "final_sparsity",
            "pruning_mode",
            "pruning_scope",
        ),
        when=lambda c: c.pruning.sparsify,
        without="without --sparsify",
    ),
    EffectRule(
        options=("pruning_block_size",),
        when=lambda c: c.pruning.sparsify and c.pruning.pruning_mode == "block",
        without="without --sparsify and --pruning-mode block",
    ),
    EffectRule(
        options=("freeze_tied", "freeze_cache_activations"),
        when=_freezes,
        without="without --freeze-schedule or --freeze-adaptive",
        refuse=True,
    ),
    EffectRule(
        options=("freeze_interval", "freeze_window", "freeze_tolerance", "freeze_patience"),
        when=lambda c: c.freezing.freeze_adaptive,
        without="without --freeze-adaptive",
    ),
    EffectRule(
        options=("mod_every", "mod_router_loss_weight"),
        when=lambda c: c.depth.mod_capacity is not None,
        without="without --mod-capacity",
    ),
    EffectRule(
        options=(
            "early_exit_loss_weight",
            "early_exit_threshold",
            "early_exit_measure",
            "early_exit_loss_tokens",
            "early_exit_loss_vocabulary",
            "exit_layer_weight",
            "early_exit_key_values",
        ),
        when=lambda c: c.exits.early_exit_layers is not None,
        without="without --early-exit-layers",
    ),
    EffectRule(
        options=("sparse_attention_buckets", "sparse_attention_block"),
        when=lambda c: c.attention.sparse_attention,
        without="without --sparse-attention",
    ),
    EffectRule(
        options=("inter_grad_comp_rank",),
        when=lambda c: c.compression.inter_grad_comp,
        without="without --inter-grad-comp",
    ),
    EffectRule(
        options=("inter_grad_comp_epilogue_only",),
        when=lambda c: c.compression.inter_grad_comp,
        without="without --inter-grad-comp",
        refuse=True,
    ),
    EffectRule(
        options=("grad_comp_rank", "grad_comp_warm_up", "grad_comp_warm_up_iters"),
        when=lambda c: c.compression.grad_comp,
        without="without --grad-comp",
    ),
    EffectRule(
        options=("selective_grad_comp",),
        when=lambda c: c.compression.grad_comp,
        without="without --grad-comp",
        refuse=True,
    ),
    EffectRule(
        options=("selective_grad_comp_way",),
        when=lambda c: c.compression.selective_grad_comp,
        without="without --selective-grad-comp",
        refuse=True,
    ),
    EffectRule(
        options=("use_error_feedback", "check_orth_error_acti", "check_comp_speed", "check_comp_ratio"),
        when=_compresses,
        without="without --inter-grad-comp or --grad-comp",
        refuse=True,
    ),
    EffectRule(
        options=("error_feedback_across_steps",),
        when=lambda c: c.compression.inter_grad_comp and c.compression.use_error_feedback,
        without="without --inter-grad-comp and --use-error-feedback",
        refuse=True,
    ),
    EffectRule(
        options=(
            "rebalance_interval",
            "balancer",
            "balance_policy",
            "balance_min_gain",
            "planner",
            "planner_timeout_s",
        ),
        when=lambda c: c.balance.balance == "online",
        without="without --balance online",
    ),
    EffectRule(
        options=("balance_experts",),
        when=lambda c: c.balance.balance == "online" and c.parallel.expert_model_parallel_size > 1,
        without="without --balance online and --expert-model-parallel-size above 1",
    ),
    EffectRule(
        options=("moe_expert_slots",),
        when=lambda c: c.parallel.expert_model_parallel_size > 1,
        without="without --expert-model-parallel-size above 1",
    ),
    EffectRule(
        options=("moe_expert_chunk_rows",),
        when=lambda c: c.parallel.moe_expert_slots is not None,
        without="without --moe-expert-slots",
    ),
    EffectRule(
        options=("expert_plan", "expert_rebalance_interval"),
        when=lambda c: c.parallel.expert_model_parallel_size > 1,
        without="without --expert-model-parallel-size above 1",
    ),
    EffectRule(
        options=("pack_to", "min_throughput_fraction", "balance_lockstep"),
        when=_several,
        without="with a pipeline size of 1",
    ),
    EffectRule(
        options=("emulate_scale",),
        when=lambda c: c.emulation.emulate is not None,
        without="without --emulate",
        refuse=True,
    ),
    EffectRule(
        options=("dry_run_device", "dry_run_processes", "dry_run_format"),
        when=lambda c: c.run.dry_run,
        without="without --dry-run",
    ),
    EffectRule(
        options=("sgd_momentum",),
        when=lambda c: c.optimizer.optimizer == "sgd",
        without="without --optimizer sgd",
    ),
    EffectRule(
        options=(
            "muon_momentum",
            "muon_nesterov",
            "muon_num_ns_steps",
            "muon_coefficient_type",
            "muon_scale_mode",
            "muon_extra_scale_factor",
            "muon_split_qkv",
        ),
        when=lambda c: c.optimizer.optimizer == "muon",
        without="without --optimizer muon",
    ),
    EffectRule(
        options=("muon_tp_mode",),
        when=lambda c: c.optimizer.optimizer == "muon" and c.parallel.tensor_model_parallel_size > 1,
        without="without --optimizer muon and tensor parallelism",
    ),
    EffectRule(
        options=("adam_beta1", "adam_beta2", "adam_eps"),
        when=lambda c: c.optimizer.optimizer in ("adam", "muon"),
        without="without --optimizer adam or muon",
    ),
    EffectRule(
        options=("loss_spike_window",),
        when=lambda c: c.training.loss_spike_threshold is not None,
        without="without --loss-spike-threshold",
    ),
    EffectRule(
        options=("loss_spike_action",),
        when=lambda c: c.training.loss_spike_threshold is not None or c.training.check_for_nan_in_loss_and_grad,
        without="without --loss-spike-threshold and with --no-check-for-nan-in-loss-and-grad",
        refuse=True,
    ),
    EffectRule(
        options=("loss_spike_skip_batches", "loss_spike_max_rollbacks"),
        when=lambda c: c.training.loss_spike_action == "rollback",
        without="without --loss-spike-action rollback",
    ),
    EffectRule(options=("finetune", "no_load_optim"), when=lambda c: c.run.load is not None, without="without --load"),
)


def is_given(config: Config, name: str) -> bool:
    """Whether the command line or a file sets an option to another value than its default."""
    spec = option_specs()[name]
    value = getattr(config.concern(spec.concern), name)
    return config.sources.get(name) in ("flag", "file") and value != spec.default


def _without_effect(config: Config, *, refuse: bool) -> Iterator[tuple[str, str]]:
    for effect in EFFECTS:
        if effect.refuse == refuse and not effect.when(config):
            for name in effect.options:
                if is_given(config, name):
                    yield option_specs()[name].flag, effect.without


def _refused(config: Config, _world_size: int) -> Iterator[Problem]:
    for flag, without in _without_effect(config, refuse=True):
        yield conflict(flag, f"has no effect {without}; remove it")


def effect_warnings(config: Config) -> list[str]:
    """One message per given option that has no effect."""
    return [f"{flag} has no effect {without}" for flag, without in _without_effect(config, refuse=False)]


EFFECT_RULES: tuple[Rule, ...] = (_refused,)
