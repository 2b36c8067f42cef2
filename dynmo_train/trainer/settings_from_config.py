"""Pure functions from the resolved configuration to engine settings, partitions, and problems of plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .._common.document import (
    DocumentError,
    Problem,
    is_count,
)
from ..config import Config
from ..config.extensions import technique_specs
from ..config.validate import validate
from ..dynamics.lora import saves_adapters_only
from ..dynamics.tuning import read_sparse_table
from ..formats.plan import V_SCHEDULES, Plan, read_plan
from ..formats.plan_check import validate_plan
from ..formats.profile import analytic_keys
from ..models.compiled import CompileSettings
from ..models.families.decoder import layer_types_of
from ..models.families.sharded_prediction import is_looked_up
from ..models.float8 import Float8Settings
from ..models.flops import step_flops
from ..models.layer_list import ItemSpec, ModelFamily
from ..models.layers.sparse_formats import (
    BUILT_IN,
    CSR,
    NEVER,
    SEMI_STRUCTURED,
    TRANSPOSABLE,
    SparseTable,
    block_rule,
    prefix_of,
)
from ..models.registry import boundary_of
from ..optim.compression.settings import CompressionSettings
from ..optim.lr_schedule import LearningRate, WeightDecay
from ..optim.optimizers.registry import optimizer_settings
from ..optim.precision import LossScaling, Precision
from ..parallel.dims import ParallelDims
from ..parallel.process_groups import all_gather_objects
from ..pipeline.expert_migration import experts_by_item
from ..pipeline.partition import Partition, uniform_partition
from ..pipeline.schedule import CUSTOM, PipelineConfig
from .engine import Engine
from .engine_settings import EngineSettings

SPARSE_ATTENTION_TOKENS, SPARSE_ATTENTION_BUCKETS = 512, 4


def parallel_dims(config: Config) -> ParallelDims:
    """The parallel sizes of a run."""
    parallel = config.parallel
    return ParallelDims(
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        data=parallel.data_ranks,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        hsdp=parallel.hsdp,
    )


def precision_settings(config: Config) -> Precision:
    """The dtypes of a run's arithmetic, and its loss scaling."""
    options = config.precision
    if options.bf16:
        return Precision(compute=torch.bfloat16, float8=float8_settings(config))
    if not options.fp16:
        return Precision()
    constant = options.loss_scale
    scaling = LossScaling(
        initial=options.initial_loss_scale if constant is None else constant,
        minimum=options.min_loss_scale,
        window=options.loss_scale_window if constant is None else 0,
        hysteresis=options.hysteresis,
    )
    return Precision(compute=torch.float16, scaling=scaling)


def sparse_table(config: Config, stored: Mapping[str, float] | None) -> SparseTable:
    """The sparsity thresholds of sparse products: from the options, else from the checkpoint, else built in.

    Args:
        config: configuration of the run.
        stored: thresholds in the checkpoint; None without one.

    Raises:
        UsageError: ``--sparse-table`` cannot be read.
    """
    pruning = config.pruning
    structured = pruning.pruning_mode == "structured"
    if pruning.sparse_table is not None:
        return SparseTable(thresholds=read_sparse_table(Path(pruning.sparse_table)), structured=structured)
    if stored is not None and config.sources["sparse_threshold"] == "default":
        return SparseTable(thresholds=stored, structured=structured)
    return SparseTable(thresholds={**BUILT_IN, CSR: pruning.sparse_threshold}, structured=structured)


def dense_products_warning(config: Config, table: SparseTable, device_type: str) -> str | None:
    """A sentence for a run whose pruned weights are multiplied as dense ones; None where a sparse format is faster.

    Args:
        config: configuration of the run.
        table: thresholds of the sparse formats.
        device_type: ``cpu`` or ``cuda``.
    """
    pruning, prefix = config.pruning, prefix_of(device_type)
    rules = {
        "unstructured": CSR,
        "2:4": SEMI_STRUCTURED,
        "2:4-transposable": TRANSPOSABLE,
        "block": block_rule(pruning.pruning_block_size),
    }
    # Narrower dense products need no threshold.
    if not pruning.sparsify or pruning.pruning_mode not in rules:
        return None

    def threshold(mode: str) -> float:
        rule = rules[mode]
        # torch has no 2:4 product on CPU.
        return NEVER if device_type == "cpu" and rule.startswith(SEMI_STRUCTURED) else table.lowest(f"{prefix}{rule}")

    own = threshold(pruning.pruning_mode)
    if pruning.final_sparsity >= own:
        return None
    when = f"are faster from {own:g}" if own <= 1 else "do not exist or are never faster"
    others = [
        f"--pruning-mode {mode} from {value:g}"
        for mode in ("block", "2:4-transposable")
        if mode != pruning.pruning_mode and (value := threshold(mode)) <= 1
    ]
    return (
        f"pruning to sparsity {pruning.final_sparsity:g} saves no time: weights pruned by --pruning-mode"
        f" {pruning.pruning_mode} are multiplied as dense ones on {device_type}, where sparse products {when};"
        f" faster than dense: {', '.join([*others, '--pruning-mode structured from any sparsity'])}"
        " (dynmo-train tune-sparse measures the thresholds)"
    )


def dense_experts_warning(config: Config) -> str | None:
    """A sentence for a run that prunes experts and has slots for their copies; None for any other."""
    parallel = config.parallel
    if parallel.moe_expert_slots is None or parallel.expert_model_parallel_size == 1 or not config.pruning.sparsify:
        return None
    return "pruned experts run dense with --moe-expert-slots: chunks are dense products; other layers are not affected"


def sparse_attention_warning(config: Config, device_type: str) -> str | None:
    """A sentence for a run whose sparse attention is slower than dense attention; None where it is faster.

    Args:
        config: configuration of the run.
        device_type: ``cpu`` or ``cuda``.
    """
    tokens, buckets = config.model.seq_length, config.attention.sparse_attention_buckets
    if not config.attention.sparse_attention or device_type != "cpu":
        return None
    # Measured: with 4 to 32 buckets 0.77 to 0.58 of the time of dense attention at 512 tokens, more than 1 at 256; with
    # 2 buckets 1.03 at 512, 0.93 at 2,048 and 1.08 at 8,192.
    if tokens < SPARSE_ATTENTION_TOKENS:
        return (
            f"--sparse-attention saves no time at --seq-length {tokens}: below {SPARSE_ATTENTION_TOKENS} tokens dense"
            " attention is faster on cpu; leave it out, or train on longer samples"
        )
    if buckets < SPARSE_ATTENTION_BUCKETS:
        return (
            f"--sparse-attention saves no time with --sparse-attention-buckets {buckets} on cpu; faster than dense"
            f" attention: {SPARSE_ATTENTION_BUCKETS} or more"
        )
    return None


def compression_settings(config: Config) -> CompressionSettings:
    """The gradient compression of a run."""
    options = config.compression
    workers = options.selective_grad_comp_way if options.selective_grad_comp else None
    return CompressionSettings(
        boundary_rank=options.inter_grad_comp_rank if options.inter_grad_comp else None,
        epilogue_only=options.inter_grad_comp_epilogue_only,
        feedback=options.use_error_feedback,
        feedback_within_step=not options.error_feedback_across_steps,
        replica_rank=options.grad_comp_rank if options.grad_comp else None,
        replica_warmup_steps=options.grad_comp_warm_up_iters,
        replica_workers=int(workers) if workers is not None and is_count(workers) else None,
        choose_workers=workers == "auto",
        fuse_ties=options.emb_comm_opt,
        check_error=options.check_orth_error_acti,
        check_speed=options.check_comp_speed,
        check_ratio=options.check_comp_ratio,
    )


def learning_rate(config: Config) -> LearningRate:
    """The learning-rate schedule over the samples of a run."""
    options = config.optimizer
    return LearningRate(
        peak=options.lr,
        floor=options.min_lr,
        style=options.lr_decay_style,
        warmup_steps=config.warmup_samples,
        decay_steps=config.decay_samples,
        initial=options.lr_warmup_init,
        wsd_style=options.lr_wsd_decay_style,
        wsd_steps=config.wsd_decay_samples or 1,
    )


def decoupled_learning_rate(config: Config) -> LearningRate | None:
    """The schedule of word embeddings and output layer; None where it is that of the other parameters."""
    options = config.optimizer
    if options.decoupled_lr is None:
        return None
    floor = options.min_lr if options.decoupled_min_lr is None else options.decoupled_min_lr
    # As Megatron's: the same schedule and initial rate, other bounds.
    return replace(learning_rate(config), peak=options.decoupled_lr, floor=floor)


def weight_decay(config: Config) -> WeightDecay:
    """The weight-decay schedule over the samples of a run."""
    options = config.optimizer
    start, end = options.start_weight_decay, options.end_weight_decay
    return WeightDecay(
        start=options.weight_decay if start is None else start,
        end=options.weight_decay if end is None else end,
        style=options.weight_decay_incr_style,
        steps=config.weight_decay_samples,
    )


def engine_settings(config: Config, stored: Mapping[str, float] | None = None) -> EngineSettings:
    """The engine settings of a run.

    Args:
        config: configuration of the run.
        stored: sparse thresholds of the checkpoint that the run resumes from; None without one.

    Raises:
        UsageError: ``--sparse-table`` cannot be read.
        DocumentError: the plan of ``--plan`` is invalid, or has another number of microbatches than the run.
    """
    boundary, parallel = boundary_of(config), config.parallel
    parts = parallel.context_parallel_size * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)
    cut = boundary.cut_along_tokens(parts)
    # Before the tensor-parallel ranks add their rows up, each has those of all tokens.
    rows = boundary.cut_along_tokens(parallel.context_parallel_size).shapes
    cut = replace(cut, shapes={name: (rows if is_looked_up(name) else cut.shapes)[name] for name in cut.shapes})
    training = config.training
    precision = precision_settings(config)
    cache = config.freezing.freeze_cache_activations
    return EngineSettings(
        pipeline=PipelineConfig(
            schedule=config.parallel.schedule,
            microbatches=config.microbatches,
            boundary=replace(cut, dtype=precision.compute),
            seed=training.seed,
            recompute=training.recompute_granularity != "none",
            selective=training.recompute_granularity == "selective",
            frozen_cache_bytes=None if cache is None else cache << 20,
            operations=_operations(config),
            token_parts=parts,
            compiled=_compiling(config),
            cuda_graphs=training.cuda_graph,
        ),
        optimizer=optimizer_settings(config.optimizer),
        rate=learning_rate(config),
        decoupled_rate=decoupled_learning_rate(config),
        weight_decay=weight_decay(config),
        clip=config.optimizer.clip_grad,
        techniques={
            name: build
            for name, spec in technique_specs().items()
            if spec.build is not None and (build := spec.build(config)) is not None
        },
        sparse=sparse_table(config, stored),
        zero_stage=parallel.zero_stage,
        adapters_only=saves_adapters_only(config),
        per_token_loss=config.data.calculate_per_token_loss,
        zero_sync_microbatches=parallel.zero_gradient_sync == "microbatch",
        sequence_parallel=parallel.sequence_parallel,
        async_tensor_parallel=parallel.async_tensor_parallel,
        overlap_reduction=parallel.DDP_impl == "torch",
        reduce_dtype=torch.bfloat16 if parallel.grad_reduce_in_bf16 else torch.float32,
        precision=precision,
        compression=compression_settings(config),
        expert_slots=parallel.moe_expert_slots,
        expert_chunk_rows=parallel.moe_expert_chunk_rows,
    )


def float8_settings(config: Config) -> Float8Settings | None:
    """The settings of ``--fp8``; None without it."""
    options = config.precision
    if not options.uses_float8:
        return None
    keeps = options.first_last_layers_bf16
    return Float8Settings(
        recipe=options.fp8_recipe,
        form=options.float8_form,
        first_in_bf16=options.num_layers_at_start_in_bf16 if keeps else 0,
        last_in_bf16=options.num_layers_at_end_in_bf16 if keeps else 0,
    )


def _compiling(config: Config) -> CompileSettings | None:
    """The settings of ``--torch-compile``; None without it."""
    training = config.training
    if not training.torch_compile:
        return None
    return CompileSettings(
        backend=training.torch_compile_backend,
        any_length=training.curriculum_shortest is not None,
        selective=training.recompute_granularity == "selective",
        sharded=config.parallel.tensor_model_parallel_size > 1,
    )


def _operations(config: Config) -> tuple[str, ...] | None:
    """The operations of ``--plan`` for the schedule ``custom``; None for other schedules.

    Raises:
        DocumentError: the plan has another number of microbatches than the run.
    """
    if config.parallel.schedule != CUSTOM or config.balance.plan is None:
        return None
    operations = read_plan(Path(config.balance.plan)).operations or ()
    microbatches = {word.rpartition("F")[2] for line in operations for word in line.split() if "F" in word}
    if operations and len(microbatches) != config.microbatches:
        problem = f"have {len(microbatches)} microbatches; the run has {config.microbatches}: plan with that number"
        raise DocumentError(config.balance.plan, [Problem("operations", "length", problem)])
    return operations


def schedule_in_profile(schedule: str, partition: Partition) -> str:
    """The schedule to record in a profile: for ``custom``, the built-in one with the same placement of stages."""
    if schedule != CUSTOM:
        return schedule
    # The cost model knows the built-in schedules only.
    v_shaped = Partition.v_shaped(partition.stages, partition.num_ranks)
    return "zb-v" if partition.virtual_stages == 2 and partition == v_shaped else "zero-bubble"


def allowed_cuts(items: Sequence[ItemSpec], granularity: str) -> set[str]:
    """Names of the items at which a stage may start: at layers, or with ``sublayer`` wherever the model allows it."""
    before = [None, *(item.layer for item in items)]
    return {
        item.name
        for item, previous in zip(items, before, strict=False)
        if item.cut_before and (granularity == "sublayer" or item.layer != previous)
    }


def plan_problems(
    plan: Plan,
    config: Config,
    family: ModelFamily,
    *,
    run_id: str,
    active_plan_id: int,
    active_stages: Sequence[Sequence[str]],
    workers: Sequence[int],
) -> list[Problem]:
    """Check whether a plan can be applied now.

    Args:
        plan: plan to check.
        config: configuration of the run.
        family: model of the run.
        run_id: id of the run.
        active_plan_id: number of the active plan.
        active_stages: item names of each stage of the active plan.
        workers: ids of the pipeline ranks that were not released, in order. All but the first are releasable.

    Returns:
        The problems; empty for a valid plan.
    """
    return _expert_problems(plan, config, family) + validate_plan(
        plan,
        run_id=run_id,
        item_names=[item.name for item in family.items],
        cut_allowed=allowed_cuts(family.items, config.balance.granularity),
        workers=workers,
        releasable=workers[1:],
        active_plan_id=active_plan_id,
        active_stages=active_stages,
        schedule=config.parallel.schedule,
        virtual_stages_per_worker=config.parallel.virtual_stages_per_worker,
    )


def _expert_problems(plan: Plan, config: Config, family: ModelFamily) -> list[Problem]:
    """Placements of experts that the groups of ranks of this run cannot have."""
    counts, size = experts_by_item(family.items), config.parallel.expert_model_parallel_size
    slots, problems = config.parallel.moe_expert_slots, []
    for item, ranks in plan.expert_ranks.items():
        experts, message = counts.get(item, 0), None
        on_rank = [sum(rank in placed for placed in ranks) for rank in range(size)]
        if len(ranks) != experts or size == 1:
            message = (
                f"must give a rank to each of its {experts} experts, in a run with several ranks; has {len(ranks)}"
            )
        elif any(len({*placed}) < len(placed) or not {*placed} <= {*range(size)} for placed in ranks):
            message = f"must give each expert different ones of {size} ranks"
        elif slots is None and any(len(placed) > 1 for placed in ranks):
            message = "has replicas of experts; requires --moe-expert-slots"
        elif slots is None and any(count * size != experts for count in on_rank):
            message = f"must give each of {size} ranks the same number of its {experts} experts"
        elif slots is not None and max(on_rank) > slots:
            message = f"a rank has {max(on_rank)} experts and copies; --moe-expert-slots is {slots}"
        if message is not None:
            problems.append(Problem("x_experts", "reference", f"{item}: {message}"))
    return problems


def resize_problems(config: Config, dims: ParallelDims, workers: int) -> list[Problem]:
    """Problems of continuing with ``workers`` pipeline ranks of the current size; empty where it is possible."""
    # The same rules as for the options of a start: the restarted run must not fail on the requested number.
    size = replace(dims, pipeline=workers).size
    # A layout is that of the start; the planner has placed the layers since.
    parallel = replace(config.parallel.without_layout(), pipeline_model_parallel_size=workers)
    return validate(replace(config, parallel=parallel), size)


def initial_partition(config: Config, family: ModelFamily, checkpoint_topology: Mapping[str, Any] | None) -> Partition:
    """The partition that a run starts with.

    It is that of ``--plan``, else that of the checkpoint if it fits the run, else that of Megatron's options of stages
    or its uniform partition. Without balancing, options of stages have precedence over the checkpoint.

    Args:
        config: configuration of the run.
        family: model of the run.
        checkpoint_topology: ``topology`` of the checkpoint's manifest; None without one.

    Raises:
        DocumentError: the plan is not valid for this model and number of workers.
    """
    workers = config.parallel.pipeline_model_parallel_size
    if config.balance.plan is not None:
        plan = read_plan(Path(config.balance.plan))
        # An initial plan may come from another run: it is based on no active plan.
        problems = plan_problems(
            plan,
            config,
            family,
            run_id=plan.run_id,
            active_plan_id=0,
            active_stages=plan.stages,
            workers=range(workers),
        )
        problems += [Problem("released_workers", "release", "must be empty in the plan of a start")] * bool(
            plan.released_workers
        )
        problems = [problem for problem in problems if problem.kind != "stale"]
        if problems:
            raise DocumentError(config.balance.plan, problems)
        return Partition(stages=plan.stages, stage_ranks=plan.stage_workers)
    has_own_stages = config.parallel.has_layout and config.balance.balance == "off"
    if (
        checkpoint_topology is not None
        and not has_own_stages
        and (saved := _checkpoint_partition(config, family, checkpoint_topology)) is not None
    ):
        return saved
    virtual_stages, v_shaped = config.parallel.virtual_stages_per_worker, config.parallel.schedule in V_SCHEDULES
    blocks = config.parallel.blocks_of_stages(config.model.num_layers) if config.parallel.has_layout else None
    return uniform_partition(family.items, workers, virtual_stages, v_shaped=v_shaped, blocks=blocks)


def _checkpoint_partition(config: Config, family: ModelFamily, topology: Mapping[str, Any]) -> Partition | None:
    """The partition of a checkpoint; None where it does not fit the stages, layers or granularity of the run."""
    stages = tuple(tuple(stage) for stage in topology["partition"])
    workers = config.parallel.pipeline_model_parallel_size
    # Only inner stages may be empty: the first one reads the batch, the last one computes the loss.
    if len(stages) != workers * config.parallel.virtual_stages_per_worker or not (stages[0] and stages[-1]):
        return None
    if [name for stage in stages for name in stage] != [item.name for item in family.items]:
        return None
    begins = {stage[0] for stage in stages if stage}
    if not begins <= allowed_cuts(family.items, config.balance.granularity):
        return None
    place = Partition.v_shaped if config.parallel.schedule in V_SCHEDULES else Partition.looped
    return place(stages, workers)


def analytic_keys_of(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``x_`` keys of a profile header, see :func:`analytic_keys`."""
    model = config.model
    width = model.kv_channels
    if model.multi_latent_attention:
        # Ranks that share the tokens gather keys and values of one padded width.
        width = max(model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim)
    # Where the layers differ, the items state their windows.
    is_uniform = layer_types_of(model.layer_type_pattern, model.num_layers) is None
    return analytic_keys(
        heads=model.num_attention_heads,
        key_value_width=2 * model.num_query_groups * width,
        window=model.attention_window if is_uniform else None,
        context_parallel_size=config.parallel.context_parallel_size,
    )


def flops_counter(config: Config, family: ModelFamily) -> Callable[[int, int], int]:
    """A function from the number of samples and the tokens per sample to the model FLOPs of a step."""
    model = config.model
    # An upper bound: how many tokens a capacity drops beyond its share depends on their scores.
    share = min(1.0, model.moe_expert_capacity_factor or 1.0)
    if model.moe_min_capacity and model.num_experts:
        even = config.training.micro_batch_size * model.seq_length * model.moe_router_topk / model.num_experts
        share = min(1.0, max(share, model.moe_min_capacity / even))
    width = model.num_attention_heads * model.kv_channels
    if model.multi_latent_attention:
        of_head = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
        width = model.num_attention_heads * of_head // 2
    capacity = config.depth.mod_capacity

    # Two or three batch sizes and sample lengths occur in a run, and each step asks.
    @cache
    def count(samples: int, tokens: int) -> int:
        """Model FLOPs of a step with ``samples`` samples of ``tokens`` tokens."""
        return step_flops(
            family,
            width=width,
            samples=samples,
            tokens=tokens,
            experts=model.num_experts or 1,
            active=share * model.moe_router_topk if model.num_experts else 1,
            routed=1 if capacity is None else max(1, math.ceil(capacity * tokens)) / tokens,
        )

    return count


def parameter_counts(engine: Engine) -> dict[tuple[int, int], int]:
    """Number of parameters by (tensor, pipeline) rank; each copy of a tied weight counts. Every rank calls this."""
    world = engine.world
    count = sum(parameter.numel() for _, _, parameter in engine.item_store.parameters())
    counts = all_gather_objects(world, count)
    coordinates = ((rank, world.dims.coordinates(rank)) for rank in range(world.size))
    return {(at.tensor, at.pipeline): counts[rank] for rank, at in coordinates if at.data == 0}
