"""From a resolved configuration to what the engine is made of: model, settings, first partition. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .config import Config
from .dynamics.pruning import CubicSchedule
from .engine import EngineSettings
from .families import boundary_of
from .formats._document import DocumentError, Problem
from .formats.plan import Plan, read_plan
from .formats.plan_check import validate_plan
from .models.items import ItemSpec, ModelFamily
from .optim.adamw import AdamWSettings
from .optim.precision import LossScaling, Precision
from .optim.schedule import LearningRate
from .pipeline.partition import Partition, uniform_partition
from .pipeline.schedule import PipelineShape


def precision_of(config: Config) -> Precision:
    """The types of a run's arithmetic."""
    given = config.precision
    if given.bf16:
        return Precision(compute=torch.bfloat16)
    if not given.fp16:
        return Precision()
    constant = given.loss_scale
    scaling = LossScaling(
        initial=given.initial_loss_scale if constant is None else constant,
        minimum=given.min_loss_scale,
        window=given.loss_scale_window if constant is None else 0,
        hysteresis=given.hysteresis,
    )
    return Precision(compute=torch.float16, scaling=scaling)


def settings_of(config: Config) -> EngineSettings:
    """What fixes the mathematics of a run."""
    boundary, parallel = boundary_of(config), config.parallel
    parts = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    training, optimizer, pruning = config.training, config.optimizer, config.pruning
    precision = precision_of(config)
    return EngineSettings(
        pipeline=PipelineShape(
            schedule=config.parallel.schedule,
            microbatches=config.microbatches,
            boundary=replace(boundary.cut_along_tokens(parts), dtype=precision.compute),
            seed=training.seed,
            recompute=training.recompute_granularity == "full",
        ),
        adamw=AdamWSettings(
            beta1=optimizer.adam_beta1,
            beta2=optimizer.adam_beta2,
            eps=optimizer.adam_eps,
            weight_decay=optimizer.weight_decay,
        ),
        rate=LearningRate(
            peak=optimizer.lr,
            floor=optimizer.min_lr,
            style=optimizer.lr_decay_style,
            warmup_steps=config.warmup_iters,
            decay_steps=optimizer.lr_decay_iters,
        ),
        clip=optimizer.clip_grad,
        freeze_steps=config.freezing.freeze_steps,
        freeze_tied=config.freezing.freeze_tied,
        pruning=CubicSchedule(
            start=pruning.pruning_start_iter,
            end=pruning.pruning_end_iter,
            every=pruning.pruning_freq,
            initial=pruning.initial_sparsity,
            final=pruning.final_sparsity,
        )
        if pruning.sparsify
        else None,
        sparse_threshold=pruning.sparse_threshold,
        zero_stage=parallel.zero_stage,
        sequence_parallel=parallel.sequence_parallel,
        overlap_reduction=parallel.DDP_impl == "torch",
        precision=precision,
    )


def allowed_cuts(items: Sequence[ItemSpec], granularity: str) -> set[str]:
    """Names of the items before which a stage may begin: where a layer begins, or wherever the model lets it."""
    before = [None, *(item.layer for item in items)]
    return {
        item.name
        for item, previous in zip(items, before, strict=False)
        if item.cut_before and (granularity == "sublayer" or item.layer != previous)
    }


def plan_problems(
    plan: Plan, config: Config, family: ModelFamily, *, run_id: str, in_force: int, stages: Sequence[Sequence[str]]
) -> list[Problem]:
    """Why a plan cannot be taken by this run now, given the number and the stages in force; empty where it can."""
    return validate_plan(
        plan,
        run_id=run_id,
        item_names=[item.name for item in family.items],
        cut_allowed=allowed_cuts(family.items, config.balance.granularity),
        workers=range(config.parallel.pipeline_model_parallel_size),
        plan_in_force=in_force,
        stage_items_in_force=stages,
        schedule=config.parallel.schedule,
        virtual_stages_per_worker=config.parallel.virtual_stages_per_worker,
    )


def first_partition(config: Config, family: ModelFamily, checkpoint_topology: Mapping[str, Any] | None) -> Partition:
    """The partition that a run starts with: ``--plan``, else the checkpoint's where it fits, else Megatron's uniform.

    Raises:
        DocumentError: the plan is not one for this model on this many workers.
    """
    workers = config.parallel.pipeline_model_parallel_size
    virtual = config.parallel.virtual_stages_per_worker
    if config.balance.plan is not None:
        plan = read_plan(Path(config.balance.plan))
        # A first plan may come from another run, and has nothing in force to be based on.
        problems = plan_problems(plan, config, family, run_id=plan.run_id, in_force=0, stages=plan.stages)
        problems = [problem for problem in problems if problem.kind != "stale"]
        if problems:
            raise DocumentError(config.balance.plan, problems)
        return Partition(stages=plan.stages, workers=workers)
    if checkpoint_topology is not None and (saved := _fitting(config, family, checkpoint_topology)) is not None:
        return saved
    return uniform_partition(family.items, workers, virtual)


def _fitting(config: Config, family: ModelFamily, topology: Mapping[str, Any]) -> Partition | None:
    stages = tuple(tuple(stage) for stage in topology["partition"])
    workers = config.parallel.pipeline_model_parallel_size
    if len(stages) != workers * config.parallel.virtual_stages_per_worker or not (stages[0] and stages[-1]):
        return None
    if [name for stage in stages for name in stage] != [item.name for item in family.items]:
        return None
    begins = {stage[0] for stage in stages if stage}
    if not begins <= allowed_cuts(family.items, config.balance.granularity):
        return None
    return Partition(stages=stages, workers=workers)
