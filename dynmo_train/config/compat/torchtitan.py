"""Keys of torchtitan's TOML files (``[training] seq_len``, releases 0.1 and 0.2) and their options of this package.

On the command line they are flags: ``--training.seq_len 4096`` becomes ``--seq-length 4096``. In a file of ``--config``
they are errors that name our key. Later releases of torchtitan have no TOML files.
"""

from __future__ import annotations

from collections.abc import Mapping

from .flag import CompatFlag, becomes, ignored, refused

_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved-1f1b",
    "InterleavedZeroBubble": "zero-bubble",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
_TOKENIZER = "use --tokenizer-model with its tokenizer.json or tokenizer.model"
_DATASET = "use --hf-dataset with the name on the hub or a path: --hf-dataset allenai/c4 --hf-dataset-name en for c4"
_VALIDATION = "use --hf-valid-split, or --hf-valid-dataset with the name on the hub or a path"
_TRACE = "profile.jsonl has the times of all layers: --profile-interval"
_FP8 = "use --fp8 with --fp8-recipe; other formats are not supported"
_EXPORT = "not supported: use dynmo-ckpt convert after the run"
_RECOMPUTE = "--recompute-granularity covers whole layers, or all but matrix products"
_COMM = "collectives end after 10 minutes and are not traced"
_FAULTS = "not supported: use --max-restarts of dynmo-train launch"

TORCHTITAN: Mapping[str, CompatFlag] = {
    # Run
    "job.config_file": refused("use --config with a file of this package's keys", 1),
    "job.dump_folder": becomes("--run-dir", values=1),
    "job.description": ignored("--run-dir names the run", 1),
    "job.print_config": ignored("run.json has the configuration"),
    "job.save_config_file": ignored("run.json has the configuration", 1),
    "job.custom_config_module": refused("not supported: declare options in a package, see CONTRIBUTING.md", 1),
    "experimental.custom_import": refused("not supported: declare an entry point, see CONTRIBUTING.md", 1),
    "experimental.custom_args_module": refused("not supported: declare options in a package, see CONTRIBUTING.md", 1),
    "profiling.enable_profiling": ignored(_TRACE),
    "profiling.profile_freq": ignored(_TRACE, 1),
    "profiling.save_traces_folder": ignored(_TRACE, 1),
    "profiling.enable_memory_snapshot": ignored("--dry-run computes the peak memory of each worker"),
    "profiling.save_memory_snapshot_folder": ignored("--dry-run computes the peak memory of each worker", 1),
    "metrics.log_freq": becomes("--log-interval", values=1),
    "metrics.save_tb_folder": becomes("--tensorboard-dir", values=1),
    "metrics.enable_tensorboard": ignored("--tensorboard-dir writes event files"),
    "metrics.enable_wandb": ignored("Weights & Biases needs the name of a project: --wandb-project"),
    "metrics.save_for_all_ranks": ignored("one process writes the metrics of all"),
    "metrics.disable_color_printing": ignored("color is used on terminals only"),
    "memory_estimation.enable": becomes("--dry-run"),
    # Model
    "model.name": refused("use pretrain gpt or pretrain llama", 1),
    "model.flavor": refused("use --num-layers, --hidden-size and --num-attention-heads, or --recipe llama-2-7b", 1),
    "model.hf_assets_path": refused(_TOKENIZER, 1),
    "model.tokenizer_path": refused(_TOKENIZER, 1),
    "model.converters": refused(_FP8, None),
    "quantize.linear.float8.recipe_name": becomes("--fp8", "--fp8-recipe", values=1),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": ignored("parameters are gathered in bfloat16"),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": ignored("parameters are gathered in bfloat16"),
    "quantize.linear.float8.filter_fqns": refused(
        "use --first-last-layers-bf16; the output layer always stays in bfloat16", None
    ),
    "quantize.linear.mx.recipe_name": refused(_FP8, 1),
    "quantize.linear.mx.filter_fqns": refused(_FP8, None),
    "quantize.grouped_mm.float8.fqns": refused(_FP8, None),
    "quantize.grouped_mm.mx.fqns": refused(_FP8, None),
    # Optimizer
    "optimizer.name": becomes("--optimizer", values=1, renamed_values={"AdamW": "adam"}),
    "optimizer.lr": becomes("--lr", values=1),
    "optimizer.beta1": becomes("--adam-beta1", values=1),
    "optimizer.beta2": becomes("--adam-beta2", values=1),
    "optimizer.eps": becomes("--adam-eps", values=1),
    "optimizer.weight_decay": becomes("--weight-decay", values=1),
    "optimizer.implementation": ignored("there is one implementation", 1),
    "optimizer.fused": ignored("there is one implementation"),
    "optimizer.early_step_in_backward": ignored("no effect on results"),
    "lr_scheduler.warmup_steps": becomes("--lr-warmup-iters", values=1),
    "lr_scheduler.total_steps": becomes("--lr-decay-iters", values=1),
    "lr_scheduler.decay_type": becomes(
        "--lr-decay-style", values=1, reason="`linear` and `cosine`; `sqrt` does not exist"
    ),
    "lr_scheduler.decay_ratio": refused("use --lr-decay-style WSD with --lr-wsd-decay-iters", 1),
    "lr_scheduler.min_lr_factor": refused("use --min-lr: this factor times --lr", 1, neutral="0.0"),
    "lr_scheduler.lr_min": refused("use --min-lr: this factor times --lr", 1, neutral="0.0"),
    # Training
    "training.local_batch_size": becomes(
        "--micro-batch-size", values=1, reason="without a pipeline; it is the batch of a replica, with one microbatch"
    ),
    "training.batch_size": becomes(
        "--micro-batch-size", values=1, reason="without a pipeline; it is the batch of a replica, with one microbatch"
    ),
    "training.global_batch_size": becomes("--global-batch-size", values=1, neutral="-1"),
    "training.gradient_accumulation_steps": becomes("--gradient-accumulation-steps", values=1),
    "training.seq_len": becomes("--seq-length", values=1),
    "training.max_norm": becomes("--clip-grad", values=1),
    "training.steps": becomes("--train-iters", values=1),
    "training.seed": becomes("--seed", values=1),
    "training.warmup_steps": becomes("--lr-warmup-iters", values=1),
    "training.compile": becomes("--torch-compile"),
    "training.deterministic": ignored("runs are always deterministic"),
    "training.dataset": refused(_DATASET, 1),
    "training.dataset_path": becomes("--hf-dataset", values=1),
    "training.dataloader.num_workers": becomes("--num-workers", values=1),
    "training.dataloader.persistent_workers": ignored("workers run until the end"),
    "training.dataloader.pin_memory": ignored("no effect on results"),
    "training.dataloader.prefetch_factor": ignored("no effect on results", 1),
    "training.enable_cpu_offload": refused("offloading is not supported: leave it out; --zero-stage shards parameters"),
    "training.dtype": refused("use --bf16, with float32 masters: leave it out", 1, neutral="float32"),
    "training.mixed_precision_param": refused(
        "use --bf16 for bfloat16, nothing for float32",
        1,
        neutral="float32",
        by_value={"bfloat16": becomes("--bf16", values=1, drop_values=True)},
    ),
    "training.mixed_precision_reduce": ignored("see --accumulate-allreduce-grads-in-fp32", 1),
    "training.gc_freq": ignored("no effect on results", 1),
    "training.gc_debug": ignored("no effect on results"),
    "debug.seed": becomes("--seed", values=1),
    "debug.deterministic": ignored("runs are always deterministic"),
    "debug.deterministic_warn_only": ignored("runs are always deterministic"),
    "debug.moe_force_load_balance": refused("use --moe-routing balanced, which assigns tokens evenly"),
    # Parallelism
    "parallelism.data_parallel_replicate_degree": becomes(
        "--hsdp", values=1, reason="replicas of the shards of `--zero-stage`; leave it out for replicas alone"
    ),
    "parallelism.data_parallel_shard_degree": refused(
        "use --zero-stage 3, with --hsdp for replicas of the shards: leave it out",
        1,
        neutral="1",
        by_value={"-1": becomes("--zero-stage", "3", values=1, drop_values=True)},
    ),
    "parallelism.fsdp_reshard_after_forward": refused("always is --zero-stage 3, never is --zero-stage 2", 1),
    "parallelism.tensor_parallel_degree": becomes(
        "--tensor-model-parallel-size", values=1, reason="add `--sequence-parallel`, which torchtitan always uses"
    ),
    "parallelism.disable_loss_parallel": ignored("no effect on results"),
    "parallelism.enable_async_tensor_parallel": becomes("--async-tensor-parallel"),
    "parallelism.pipeline_parallel_degree": becomes("--pipeline-model-parallel-size", values=1),
    "parallelism.pipeline_parallel_schedule": becomes("--schedule", values=1, renamed_values=_SCHEDULES),
    "parallelism.pipeline_parallel_schedule_csv": refused(
        "not supported: use --schedule custom with a plan of dynmo-plan partition", 1
    ),
    "parallelism.pipeline_parallel_microbatch_size": becomes("--micro-batch-size", values=1),
    "parallelism.pipeline_parallel_layers_per_stage": becomes("--num-layers-per-virtual-pipeline-stage", values=1),
    "parallelism.pipeline_parallel_first_stage_less_layers": ignored("the partition counts the cost of each layer", 1),
    "parallelism.pipeline_parallel_last_stage_less_layers": ignored("the partition counts the cost of each layer", 1),
    "parallelism.module_fqns_per_model_part": refused(
        "write the partition with dynmo-plan partition and use --balance offline --plan FILE", None
    ),
    "parallelism.context_parallel_degree": becomes("--context-parallel-size", values=1),
    "parallelism.context_parallel_load_balancer": ignored("each rank has a chunk from either end of a sample", 1),
    "parallelism.context_parallel_rotate_method": ignored("keys and values are always gathered", 1),
    "parallelism.expert_parallel_degree": becomes("--expert-model-parallel-size", values=1),
    "parallelism.expert_tensor_parallel_degree": refused(
        "use --tensor-model-parallel-size and --expert-model-parallel-size", 1, neutral="1"
    ),
    "parallelism.expert_parallel_comm_backend": ignored("there is one implementation", 1),
    # Checkpoints
    "checkpoint.enable": ignored("checkpoints are in the run directory: --save-interval"),
    "checkpoint.enable_checkpoint": ignored("checkpoints are in the run directory: --save-interval"),
    "checkpoint.folder": becomes("--save", values=1),
    "checkpoint.interval": becomes("--save-interval", values=1),
    "checkpoint.initial_load_path": becomes("--load", values=1),
    "checkpoint.initial_load_model_only": becomes("--finetune"),
    "checkpoint.initial_load_in_hf": ignored("--load detects the format of a checkpoint"),
    "checkpoint.last_save_model_only": refused(_EXPORT),
    "checkpoint.last_save_in_hf": refused(_EXPORT),
    "checkpoint.model_weights_only": refused(_EXPORT),
    "checkpoint.export_dtype": refused("use --dtype of dynmo-ckpt convert after the run", 1, neutral="float32"),
    "checkpoint.async_mode": refused("use --async-save", 1, neutral="disabled"),
    "checkpoint.keep_latest_k": becomes("--keep-checkpoints", values=1),
    "checkpoint.load_step": refused("use --load with the directory of the step", 1, neutral="-1"),
    "checkpoint.exclude_from_loading": refused("use --no-load-optim or --finetune", None),
    "checkpoint.enable_first_step_checkpoint": refused("not supported: use --save-interval"),
    "checkpoint.create_seed_checkpoint": ignored("initial weights do not depend on the number of processes"),
    "checkpoint.load_only": refused("not supported: leave it out"),
    # Memory and compilation
    "activation_checkpoint.mode": becomes(
        "--recompute-granularity", values=1, reason="`none`, `selective` and `full`; `memory_budget` does not exist"
    ),
    "activation_checkpoint.selective_ac_option": ignored(_RECOMPUTE, 1),
    "activation_checkpoint.early_stop": ignored("no effect on results"),
    "activation_checkpoint.memory_budget": refused("not supported: use --recompute-granularity selective", 1),
    "activation_checkpoint.preserve_rng_state": ignored("recomputed dropout is always the same"),
    "compile.enable": becomes("--torch-compile"),
    "compile.backend": becomes("--torch-compile-backend", values=1),
    "compile.components": ignored("--torch-compile compiles each layer separately", None),
    # Validation
    "validation.enable": ignored("--eval-iters 0 turns it off"),
    "validation.dataset": refused(_VALIDATION, 1),
    "validation.dataset_path": becomes("--hf-valid-dataset", values=1),
    "validation.freq": becomes("--eval-interval", values=1),
    "validation.steps": becomes("--eval-iters", values=1),
    "validation.local_batch_size": ignored("validation has the batch size of training", 1),
    "validation.seq_len": ignored("validation has the sequence length of training", 1),
    # Communication and faults
    "comm.init_timeout_seconds": ignored(_COMM, 1),
    "comm.train_timeout_seconds": ignored(_COMM, 1),
    "comm.trace_buf_size": ignored(_COMM, 1),
    "fault_tolerance.enable": refused(_FAULTS),
    "fault_tolerance.group_size": refused(_FAULTS, 1),
    "fault_tolerance.replica_id": refused(_FAULTS, 1),
    "fault_tolerance.min_replica_size": refused(_FAULTS, 1),
    # Releases of 2026: Python configurations, whose fields are flags of the command line
    "training.num_tokens_per_microbatch_per_dp_rank": refused("use --micro-batch-size: divide by --seq-length", 1),
    "training.num_tokens_per_train_step": refused("use --global-batch-size: divide by --seq-length", 1, neutral="-1"),
    # Objects of Python configurations
    "hf_assets_path": refused(_TOKENIZER, 1),
    "model_spec": refused("use --num-layers, --hidden-size and --num-attention-heads, or --recipe llama-2-7b", 1),
    "activation_checkpoint.class": becomes(
        "--recompute-granularity", values=1, renamed_values={"FullAC": "full", "SelectiveAC": "selective"}
    ),
    **dict.fromkeys(
        (
            *("checkpoint.class", "dataloader.class", "lr_scheduler.class", "metrics.class", "optimizer.class"),
            *("profiler.class", "validator.class", "validator.dataloader.class"),
        ),
        ignored("there is one implementation", 1),
    ),
    **dict.fromkeys(
        ("loss.class", "loss.loss_fn.class"),
        ignored("the loss is cross entropy, in chunks; --mtp-num-layers adds that of further tokens", 1),
    ),
    **dict.fromkeys(
        ("loss.global_vocab_size", "loss.loss_fn.global_vocab_size"), ignored("follows from --vocab-size", 1)
    ),
    **dict.fromkeys(("dataloader.dataset", "dataloader.dataset.dataset"), refused(_DATASET, 1)),
    **dict.fromkeys(("validator.dataloader.dataset", "validator.dataloader.dataset.dataset"), refused(_VALIDATION, 1)),
    "optimizer.param_groups": refused("use --optimizer and --lr, and --decoupled-lr for embeddings and head", None),
    "compile": refused("use --compile with its mode", 1),
    "training.max_context_length": becomes("--seq-length", values=1),
    "training.disable_cuda_graphs": ignored("they are off without --cuda-graph"),
    "parallelism.enable_fsdp_symm_mem": ignored("no effect on results"),
    "parallelism.enable_sequence_parallel": becomes("--sequence-parallel"),
    "parallelism.spmd_backend": ignored("there is one implementation", 1),
    "parallelism.num_pp_microbatches": refused(
        "follows from --global-batch-size and --micro-batch-size", 1, neutral="1"
    ),
    "parallelism.context_parallel_ptrr_mask_key": ignored("each rank has a chunk from either end of a sample", 1),
    "compile.enable_async_tensor_parallel": becomes("--async-tensor-parallel"),
    "comm.save_traces_folder": ignored(_COMM, 1),
    "comm.save_traces_file_prefix": ignored(_COMM, 1),
    "comm.mode": refused("not supported: use --dry-run, which needs no devices", 1, neutral="default"),
    "debug.spmd_typechecking": ignored("no effect on results"),
    "debug.detect_anomaly": refused("not supported: use dynmo-train replay-step, which executes a step again"),
    "debug.batch_invariant": refused("not supported: leave it out"),
    "debug.print_config": ignored("run.json has the configuration"),
    "debug.save_config_file": ignored("run.json has the configuration", 1),
    "debug.enable_structured_logging": ignored("metrics.jsonl has the records of a run"),
    "profiler.enable_profiling": ignored(_TRACE),
    "profiler.save_traces_folder": ignored(_TRACE, 1),
    "profiler.profile_freq": ignored(_TRACE, 1),
    "profiler.profiler_repeat": ignored(_TRACE, 1),
    "profiler.profiler_skip_first": ignored(_TRACE, 1),
    "profiler.profiler_skip_first_wait": ignored(_TRACE, 1),
    "profiler.profiler_active": ignored(_TRACE, 1),
    "profiler.profiler_warmup": ignored(_TRACE, 1),
    "profiler.enable_memory_snapshot": ignored("--dry-run computes the peak memory of each worker"),
    "profiler.memory_snapshot_freq": ignored("--dry-run computes the peak memory of each worker", 1),
    "profiler.memory_snapshot_max_entries": ignored("--dry-run computes the peak memory of each worker", 1),
    "profiler.save_memory_snapshot_folder": ignored("--dry-run computes the peak memory of each worker", 1),
    "activation_checkpoint.determinism_check": ignored("recomputed dropout is always the same", 1),
    "activation_checkpoint.debug": ignored("no effect on results"),
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": ignored(_RECOMPUTE, None),
    "activation_checkpoint.visualize_memory_budget_pareto": ignored("no effect on results"),
    "validator.enable": ignored("--eval-iters 0 turns it off"),
    "validator.freq": becomes("--eval-interval", values=1),
    "validator.steps": becomes("--eval-iters", values=1),
}


def torchtitan_advice(key: str) -> str | None:
    """What to write instead of a key of torchtitan in a TOML file, such as ``training.seq_len``.

    Args:
        key: table and key; a table alone stands for its keys.

    Returns:
        The advice; None if torchtitan has no such key or table.
    """
    known = TORCHTITAN.get(key)
    if known is None:
        is_table = any(name.startswith(f"{key}.") for name in TORCHTITAN)
        return "a table of torchtitan; cli/FLAGS.md has the option of each key" if is_table else None
    if known.kind == "becomes":
        return f"a key of torchtitan: use {known.arguments[0].removeprefix('--').replace('-', '_')}"
    if known.kind == "ignored":
        return f"a key of torchtitan: leave it out ({known.reason})"
    return f"a key of torchtitan: {known.reason}"
