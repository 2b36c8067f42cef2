"""The setup of a run: data, checkpoint, engine, run directory, the profile's header and the initial plan.

What ``setup_run`` opens, in order, on every rank::

    Config, World
      | checkpoint_to_load ------- --load: the newest sound checkpoint, or None; a MemoryCheckpoint instead after a loss
      v
    completed steps, consumed samples
      | open_run_data ------------- rank 0 first: it writes the index caches that the others read
      v
    Samples
      | engine_settings, initial_partition
      v
    Engine <- state_reader ------- weights and moments from the checkpoint, or random weights
      | open_run_directory_on_rank0   run.json, folders
      v
    RunLogger.write_header ------- links between ranks are measured; layers and ranks are described
      | write the initial plan --- the number of the active plan, broadcast to all ranks
      v
    InitialState -> trainer/loop.py

Any of these can fail on a single rank: a missing file, a full device, another version. Each therefore runs under
``parallel.consensus``: an error on one rank ends all ranks with one message, before the next collective can hang.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._common.console import print_message
from .._common.errors import UsageError
from ..config import Config
from ..config.batch_schedule import BatchPositions, Range
from ..data.batches import RunData, open_run_data
from ..data.tokenizer import TokenizerFiles
from ..dynamics.lora import saves_adapters_only
from ..formats.checkpoint import BASE, Checkpoint, CheckpointError, base_reference, remove_stale_staging
from ..formats.checkpoint.writer import read_latest
from ..formats.plan import initial_plan, plan_ids, write_plan
from ..formats.profile import Layout, ModelInfo, WorkerInfo
from ..models.compiled import check_compiler
from ..models.float8 import check_float8
from ..models.layer_list import ModelFamily
from ..models.lora import FIELD as ADAPTERS
from ..models.registry import family_of, named_as
from ..optim.apex import find_apex
from ..optim.optimizers.protocol import OptimizerContext
from ..optim.optimizers.registry import optimizer_settings
from ..optim.scheduler_state import samples_done, scheduler_differences, with_stored_schedules
from ..parallel.async_tensor_parallel import symmetric_memory_obstacle
from ..parallel.consensus import rank0_first, run_on_all_ranks
from ..parallel.process_groups import World, broadcast_object
from ..pipeline.emulated_profiler import EmulatedProfiler
from ..pipeline.emulation_trace import parse_slow_worker, read_trace
from ..pipeline.graphed_items import check_graph_device
from ..pipeline.profiler import LayerProfiler
from .checkpoint.engine_checkpoint import check_same_model, check_same_optimizer, state_reader
from .checkpoint.load_checkpoint import check_bert, checkpoint_to_load, tower_reader
from .checkpoint.model_keys import extension_text, keys_of_extension
from .checkpoint.run_options import check_same_options, keep_schedules, recorded_options
from .checkpoint.unread_tensors import check_all_weights_are_read
from .engine import Engine
from .engine_settings import EngineSettings
from .fingerprint import checkpoint_properties, require_same
from .loss_spikes import LossSpikes, Rollback
from .monitoring.profile_writer import (
    RunLogger,
    describe_copies,
    describe_items,
    describe_shards,
    describe_workers,
    measure_links,
)
from .monitoring.scalar_writers import check_clients
from .recovery.memory_checkpoint import MemoryCheckpoint
from .run_directory import RunDirectory, open_run_directory_on_rank0, rotations
from .settings_from_config import (
    analytic_keys_of,
    dense_experts_warning,
    dense_products_warning,
    engine_settings,
    initial_partition,
    schedule_in_profile,
    sparse_attention_warning,
    weight_decay,
)


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """The state of a run before its first step.

    Attributes:
        config: configuration of the run; with ``--train-samples`` its ``train_iters`` follows from the samples left.
        engine: engine with the weights that the run starts from.
        data: training, validation and test data.
        directory: run directory.
        logger: writer of profile, metrics and events.
        manifest: manifest of the checkpoint that the run resumes from or took its weights from; None without one.
        last_saved: name of the last checkpoint of this run; None without one.
        step: number of completed steps.
        consumed_samples: number of consumed training samples.
        consumed_valid_samples: number of consumed validation samples.
        active_plan_id: number of the active plan.
        batches: where batches begin.
        spikes: losses of the last steps.
        base: checkpoint that has the weights under the adapters, where they are not saved again; else empty.
        options: what the run is made of, for its checkpoints; rank 0 has it.
    """

    config: Config
    engine: Engine
    data: RunData
    directory: RunDirectory
    logger: RunLogger
    manifest: Mapping[str, Any] | None
    last_saved: str | None
    step: int
    consumed_samples: int
    consumed_valid_samples: int
    active_plan_id: int
    batches: BatchPositions
    spikes: LossSpikes
    base: Mapping[str, str]
    options: Mapping[str, str]


def setup_run(
    config: Config, world: World, rollback: Rollback | None = None, memory: MemoryCheckpoint | None = None
) -> InitialState:
    """Open data and checkpoint, build the engine, create the run directory, write the header and the initial plan.

    Every rank calls this.

    Args:
        config: configuration of the run.
        world: process groups.
        rollback: the rollback that this start executes; None without one.
        memory: state that the run continues from after a loss of ranks; None loads the checkpoint of ``--load``.

    Raises:
        UsageError: on a reporting rank, where an option, the data or the checkpoint cannot be used on any rank.
        SystemExit: on the other ranks, with the same exit code.
    """
    # Before anything that takes time; rank 0 alone needs the clients.
    run_on_all_ranks(world, lambda: check_clients(config) if world.is_rank0 else None)
    loaded = load_engine(config, world, () if rollback is None else rollback.ranges, memory)
    config, engine, checkpoint, step = loaded.config, loaded.engine, loaded.checkpoint, loaded.step
    manifest = loaded.manifest
    base = run_on_all_ranks(world, lambda: _base_of_adapters(config, checkpoint, manifest))
    settings = engine.settings
    workers = describe_workers(world, engine.profiler.calibration_ns(world.device))
    engine_properties: dict[str, Any] = {
        "sparse_thresholds": dict(settings.sparse.thresholds),
        "device": world.device.type,
        # For the peak FLOP/s of the device, from which the monitor computes the utilization.
        **({"device_name": torch.cuda.get_device_name(world.device)} if world.device.type == "cuda" else {}),
        "norms": sorted(each.__name__ for each in settings.fused_norms.values()) or "torch",
        "optimizer": settings.optimizer.describe(OptimizerContext(fused_adam=settings.fused_adam)),
    }
    if settings.compression.is_lossy:
        and_choices = " and choices of workers" if settings.compression.choose_workers else ""
        engine_properties["reproducible"] = (
            f"bit for bit only for the same sequence of plans{and_choices}: the gradient compression is lossy"
        )
    hosts = list(dict.fromkeys(host for worker in workers for host in worker.hosts))
    directory = open_run_directory_on_rank0(world, config, hosts=hosts, engine=engine_properties)
    logger = RunLogger(directory, world, *rotations(config))
    _write_header(config, engine, logger, workers)
    for problem in checkpoint.skipped_checkpoints if checkpoint is not None else ():
        logger.log_event("checkpoint_damaged", f"skipped a damaged checkpoint: {problem}", step=step)
    active_plan_id = _write_initial_plan(config, engine, directory, step)
    consumed_valid = manifest.get("x_consumed_valid_samples", 0) if manifest is not None and step else 0
    if memory is None:
        last_saved = continued_checkpoint(checkpoint, directory, step)
    else:
        last_saved = read_latest(directory.checkpoints) or None
    return InitialState(
        config=config,
        engine=engine,
        data=loaded.data,
        directory=directory,
        logger=logger,
        manifest=manifest,
        last_saved=last_saved,
        step=step,
        consumed_samples=loaded.consumed_samples,
        consumed_valid_samples=consumed_valid,
        active_plan_id=active_plan_id,
        batches=loaded.batches,
        spikes=LossSpikes.of(config.training, _spike_state(manifest, step), rollback),
        base=base,
        options=recorded_options(config) if world.is_rank0 else {},
    )


def _base_of_adapters(
    config: Config, checkpoint: Checkpoint | None, manifest: Mapping[str, Any] | None
) -> Mapping[str, str]:
    """The checkpoint that has the weights under the adapters of ``--lora-save-adapters``; empty without the option.

    Raises:
        UsageError: the run has no such checkpoint.
    """
    if not saves_adapters_only(config):
        return {}
    if manifest is not None and BASE in manifest:
        return dict(manifest[BASE])
    # A checkpoint of this run with all weights is pruned by its later ones.
    if checkpoint is None or ADAPTERS in checkpoint.manifest["model"]:
        raise UsageError(
            "--lora-save-adapters: the run has no checkpoint without adapters to refer to; give --load BASE --finetune,"
            " or remove the option"
        )
    return base_reference(checkpoint.directory)


@dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine with the weights that a run starts from, and its data; nothing is written yet.

    Attributes:
        config: configuration of the run; with ``--train-samples`` its ``train_iters`` follows from the samples left.
        engine: engine of this rank.
        data: training, validation and test data.
        checkpoint: checkpoint that was loaded; None without one.
        manifest: its manifest, or that of the copies that the run continues from; None without either.
        step: number of completed steps.
        consumed_samples: number of consumed training samples, where the next batch begins.
        batches: where batches begin.
    """

    config: Config
    engine: Engine
    data: RunData
    checkpoint: Checkpoint | None
    manifest: Mapping[str, Any] | None
    step: int
    consumed_samples: int
    batches: BatchPositions


def load_engine(
    config: Config, world: World, skipped: Sequence[Range] = (), memory: MemoryCheckpoint | None = None
) -> LoadedEngine:
    """Open checkpoint and data, and build the engine. Every rank calls this.

    Args:
        config: configuration of the run.
        world: process groups.
        skipped: ranges of samples to skip in addition to those of the options and the checkpoint.
        memory: state that the run continues from after a loss of ranks; None loads the checkpoint of ``--load``.

    Raises:
        UsageError: on a reporting rank, where an option, the data or the checkpoint cannot be used on any rank.
        SystemExit: on the other ranks, with the same exit code.
    """
    if config.training.torch_compile:
        run_on_all_ranks(
            world, lambda: check_compiler(world.device.type, config.training.torch_compile_backend, os.environ)
        )
    if config.precision.uses_float8:
        run_on_all_ranks(world, lambda: check_float8(world.device))
    if config.training.cuda_graph:
        run_on_all_ranks(world, lambda: check_graph_device(world.device.type))
    fused_adam, fused_norms = _fused_kernels(config, world)
    family = family_of(config)
    # First, since the position in the data and the initial partition follow from it.
    checkpoint = _checkpoint(config, world) if memory is None else None
    source = checkpoint or memory
    manifest = source.manifest if source is not None else None
    config, step, consumed = run_on_all_ranks(world, lambda: _progress(config, source, world))
    stored_ranges = _spike_state(manifest, step).get("skipped_samples", ())
    batches = config.batch_positions([*((begin, end) for begin, end in stored_ranges), *skipped])
    config = _with_steps_left(config, batches, step, consumed, world)
    consumed = batches.begin(consumed)
    # Rank 0 copies these files into every checkpoint: without them the first save would fail, and each one after it.
    run_on_all_ranks(world, lambda: _check_tokenizer(config) if world.is_rank0 else True)
    positions = manifest.get("x_data_position") if manifest is not None and step else None
    data = rank0_first(world, lambda: open_run_data(config, step, consumed, positions, batches))
    # The thresholds select the form of each sparse product, and so the bits: a resumed run keeps its own.
    stored = manifest["dynamic"]["sparse_thresholds"] if manifest is not None else None
    settings = run_on_all_ranks(
        world, lambda: replace(engine_settings(config, stored or None), fused_adam=fused_adam, fused_norms=fused_norms)
    )
    if config.optimizer.use_checkpoint_opt_param_scheduler and manifest is not None and step:
        if world.is_rank0:
            for name, stored_value, given in scheduler_differences(settings.rate, manifest):
                print_message(f"uses {name} {stored_value} of the checkpoint, not {given}")
        settings = run_on_all_ranks(world, lambda: _with_stored_schedules(config, settings, manifest))
    if settings.async_tensor_parallel and (obstacle := symmetric_memory_obstacle(world)) is not None:
        settings = replace(settings, async_tensor_parallel=False)
        if world.is_rank0:
            print_message(f"warning: --async-tensor-parallel has no effect: no symmetric memory: {obstacle}")
    if world.is_rank0:
        device = world.device.type
        for warning in (
            dense_products_warning(config, settings.sparse, device),
            dense_experts_warning(config),
            sparse_attention_warning(config, device),
        ):
            if warning is not None:
                print_message(f"warning: {warning}")
    bert = run_on_all_ranks(world, lambda: bert_checkpoint(config, world)) if manifest is None else None
    require_same(world, checkpoint_properties(bert, "--bert-load"))
    engine = run_on_all_ranks(world, lambda: _engine(config, world, family, settings, checkpoint, bert, memory))
    return LoadedEngine(
        config=config,
        engine=engine,
        data=data,
        checkpoint=checkpoint,
        manifest=manifest,
        step=step,
        consumed_samples=consumed,
        batches=batches,
    )


def _with_stored_schedules(config: Config, settings: EngineSettings, manifest: Mapping[str, Any]) -> EngineSettings:
    """The settings with the schedules of the checkpoint; decoupled rates keep the bounds of their options."""
    rate, decay = with_stored_schedules(settings.rate, weight_decay(config), manifest)
    decoupled = settings.decoupled_rate
    if decoupled is not None:
        decoupled = replace(rate, peak=decoupled.peak, floor=decoupled.floor)
    return replace(settings, rate=rate, decoupled_rate=decoupled, weight_decay=decay)


def _spike_state(manifest: Mapping[str, Any] | None, step: int) -> dict[str, Any]:
    """``x_loss_spikes`` of the manifest that a run continues; empty at the first step."""
    return dict(manifest.get("x_loss_spikes", {})) if manifest is not None and step else {}


def _fused_kernels(config: Config, world: World) -> tuple[type[Any] | None, Mapping[type[nn.Module], type[nn.Module]]]:
    """The fused AdamW and the fused norms of apex that the run uses; None and none without."""
    apex = find_apex()
    # apex's kernels exist for CUDA only.
    on_cuda = world.device.type == "cuda"
    optimizer = optimizer_settings(config.optimizer).describe(OptimizerContext())
    # apex replaces torch's AdamW only.
    uses_adam = optimizer == "torch AdamW"
    if world.is_rank0:
        print_message(apex.line(used=on_cuda and apex.state == "present", optimizer=None if uses_adam else optimizer))
    norms: Mapping[type[nn.Module], type[nn.Module]] = apex.fused_norms if on_cuda else {}
    return apex.fused_adam if on_cuda and uses_adam else None, norms


def _checkpoint(config: Config, world: World) -> Checkpoint | None:
    """The checkpoint of ``--load``, the same one on every rank; None without one."""
    loads_moments = not (config.run.finetune or config.run.no_load_optim)
    checkpoint = run_on_all_ranks(world, lambda: checkpoint_to_load(config, world, with_optimizer=loads_moments))
    # Each rank opens the path itself: without a shared file system it can be another checkpoint on another host.
    require_same(world, checkpoint_properties(checkpoint))
    return checkpoint


def _progress(config: Config, source: Checkpoint | MemoryCheckpoint | None, world: World) -> tuple[Config, int, int]:
    """The configuration with the schedules that a resumed run keeps, completed steps and consumed samples.

    Raises:
        CheckpointError: the consumed samples are unknown; on rank 0, the run that resumes is made of other options.
    """
    if source is None or (isinstance(source, Checkpoint) and _takes_weights_only(config, source)):
        return config, 0, 0
    config = keep_schedules(config, source.manifest, prints=world.is_rank0)
    step, consumed = source.manifest["step"], source.manifest["consumed_train_samples"]
    if step and not consumed:
        raise CheckpointError(
            f"the checkpoint records 0 consumed samples after {step} steps: the position in the data is unknown; give"
            " --finetune to load its weights and start at the first step"
        )
    if isinstance(source, Checkpoint) and step and world.is_rank0 and not config.training.skip_train:
        check_same_options(source, config)
    return config, step, consumed


def _check_tokenizer(config: Config) -> bool:
    named = TokenizerFiles.of(vars(config.data))
    for path in named.files.values() if named is not None else ():
        if not path.is_file():
            raise UsageError(f"no tokenizer file at {path}, which checkpoints contain; give its path, or leave it out")
    return True


def _with_steps_left(config: Config, batches: BatchPositions, step: int, consumed: int, world: World) -> Config:
    """The configuration of a resumed run whose batch size may have changed.

    The run continues after the last consumed sample. ``--train-iters`` still counts all steps; with
    ``--train-samples`` the number of the last step is computed from the samples that are left.
    """
    sizes, training = config.batch_sizes, config.training
    if batches.begin(consumed) == batches.begin(batches.consumed_after(step)):
        return config
    if world.is_rank0:
        print_message(
            f"the batch size has changed: {consumed:,} samples are consumed after {step:,} steps; training continues"
            f" with {sizes.at(consumed)} samples per step"
        )
    if training.train_samples is None:
        return config
    train_iters = step + sizes.steps_for(training.train_samples, consumed)
    return replace(config, training=replace(training, train_iters=max(1, train_iters)))


def _takes_weights_only(config: Config, checkpoint: Checkpoint) -> bool:
    """Whether a run loads only the weights of ``checkpoint`` and starts at the first step.

    True with ``--finetune``, and for weights of another program, whose checkpoint may record a step that is not ours.
    """
    manifest = checkpoint.manifest
    return config.run.finetune or (manifest["optimizer"] is None and not manifest["consumed_train_samples"])


def bert_checkpoint(config: Config, world: World) -> Checkpoint | None:
    """The checkpoint of ``--bert-load``; None without the option. Every rank calls this.

    Raises:
        CheckpointError: the path has no checkpoint, or only damaged ones.
    """
    path = config.ict.bert_load
    if path is None:
        return None
    checkpoint = checkpoint_to_load(config, world, flag="--bert-load", place=path, weights_only=True)
    if checkpoint is None:
        raise CheckpointError(
            f"--bert-load {path}: no BERT checkpoint; omit the option to initialize both towers at random"
        )
    return checkpoint


def _engine(
    config: Config,
    world: World,
    family: ModelFamily,
    settings: EngineSettings,
    checkpoint: Checkpoint | None,
    bert: Checkpoint | None,
    memory: MemoryCheckpoint | None,
) -> Engine:
    """The engine with the weights that the run starts from: random, of a checkpoint, or of a BERT for both towers."""
    if memory is not None:
        partition = initial_partition(config, family, memory.manifest["topology"])
        engine = Engine(family, settings, partition, world, _emulated_profiler(config, world, family))
        engine.restore(memory.load(engine.partition, world), memory.step, **progress_of(memory.manifest))
        return engine
    if checkpoint is not None:
        stored = named_as(checkpoint.manifest["model"], config.model.family)
        extended = keys_of_extension(config, stored)
        check_same_model(checkpoint, family, resumes=not config.run.finetune, may_change=extended)
        if world.is_rank0 and (changes := extension_text(stored, family.manifest(), extended)):
            print_message(f"extends the context of the checkpoint: {changes}")
    topology = checkpoint.manifest["topology"] if checkpoint is not None else None
    engine = Engine(
        family, settings, initial_partition(config, family, topology), world, _emulated_profiler(config, world, family)
    )
    if checkpoint is None and bert is not None:
        check_bert(bert, family)
        engine.restore(tower_reader(bert, family, engine.item_store, world.device), 0)
        return engine
    if checkpoint is None:
        engine.build()
        return engine
    check_all_weights_are_read(checkpoint, engine.item_store, world)
    if _takes_weights_only(config, checkpoint):
        engine.restore(state_reader(checkpoint, engine.item_store, world, moments=False), 0)
        return engine
    if not config.run.no_load_optim:
        check_same_optimizer(checkpoint, settings.optimizer)
    reader = state_reader(checkpoint, engine.item_store, world, moments=not config.run.no_load_optim)
    if world.is_rank0:
        for name, stored, given in scheduler_differences(settings.rate, checkpoint.manifest):
            print_message(
                f"warning: the checkpoint was trained with {name} {stored}; this run continues with {given}; give"
                " --use-checkpoint-opt-param-scheduler to keep the schedule"
            )
    engine.restore(reader, checkpoint.manifest["step"], **progress_of(checkpoint.manifest))
    return engine


def progress_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of :meth:`Engine.restore` for the schedules and techniques of a checkpoint's manifest.

    Older checkpoints have ``advanced`` in place of ``advanced_samples``. It counts samples where it exceeds the
    completed steps, else steps, which are converted with the batch size of the checkpoint. An imported checkpoint has
    neither, but may have the state of its original scheduler.
    """
    progress = dict(manifest.get("x_progress", {}))
    old = progress.pop("advanced", None)
    if old is None:
        counted = samples_done(manifest)
    else:
        step, consumed = manifest["step"], manifest["consumed_train_samples"]
        counted = old if not step or old > step else old * consumed // step
    return {"advanced_samples": counted, **progress}


def continued_checkpoint(checkpoint: Checkpoint | None, directory: RunDirectory, step: int) -> str | None:
    """Name of the checkpoint of this run that it resumes from; None for another run's checkpoint, or without one.

    Args:
        checkpoint: loaded checkpoint; None without one.
        directory: run directory of this start.
        step: number of completed steps; 0 where only weights were loaded.
    """
    if checkpoint is None or not step:
        return None
    is_own = checkpoint.directory.resolve().is_relative_to(directory.path.resolve())
    return checkpoint.directory.name if is_own else None


def _emulated_profiler(config: Config, world: World, family: ModelFamily) -> LayerProfiler | None:
    """The probe of an emulated run, which delays layers to the times of a profile; None without ``--emulate``."""
    emulation = config.emulation
    if emulation.emulate is None:
        return None
    if world.device.type == "cuda":
        raise UsageError("--emulate is supported on the CPU only; give --device cpu")
    trace = read_trace(Path(emulation.emulate), [item.name for item in family.items], emulation.emulate_scale)
    slow = None if emulation.emulate_slow is None else parse_slow_worker(emulation.emulate_slow)
    if slow is None or slow.worker != world.pipeline_rank:
        return EmulatedProfiler(trace)
    return EmulatedProfiler(trace, slow.factor_at)


def _write_next(plans: Path, document: dict[str, Any]) -> int:
    """Write a plan under the next free number; retries, since an external planner may take a number concurrently."""
    while True:
        number = max(plan_ids(plans), default=-1) + 1
        with contextlib.suppress(FileExistsError):
            write_plan(plans, {**document, "plan_id": number})
            return number


def _write_header(config: Config, engine: Engine, logger: RunLogger, workers: Sequence[WorkerInfo]) -> None:
    """Measure the links, and start a segment of the profile. Every rank calls this."""
    dims = engine.world.dims
    logger.write_header(
        logger.run.run_id,
        ModelInfo(
            family=config.model.family,
            num_layers=config.model.num_layers,
            hidden_size=config.model.hidden_size,
            sequence_length=config.model.seq_length,
        ),
        Layout(
            schedule=schedule_in_profile(config.parallel.schedule, engine.partition),
            virtual_stages_per_worker=config.parallel.virtual_stages_per_worker,
            granularity=config.balance.granularity,
            microbatches=config.microbatches,
            micro_batch_size=config.training.micro_batch_size,
            tensor_parallel_size=dims.tensor,
            data_parallel_size=dims.data,
            expert_parallel_size=dims.expert,
        ),
        # At each start: a restarted run may be on other hosts.
        measure_links(engine.world),
        workers,
        describe_items(
            engine.family, engine.settings.pipeline.boundary, engine.settings.optimizer, engine.item_store.blueprint
        ),
        describe_shards(
            engine.family, engine.settings.pipeline.boundary, engine.settings.optimizer, engine.item_store.blueprint
        ),
        describe_copies(
            engine.family,
            engine.settings.pipeline.boundary,
            engine.settings.expert_slots if dims.expert > 1 else None,
            engine.item_store.blueprint,
        ),
        analytic_keys_of(config),
    )


def _write_initial_plan(config: Config, engine: Engine, directory: RunDirectory, step: int) -> int:
    """Write the active partition as the next plan (number 0 in a new run); its number, on every rank."""
    number: int | None = None
    if engine.world.is_rank0:
        # By rank 0, before the first save of this start can create a staging directory.
        remove_stale_staging(directory.checkpoints)
        document = initial_plan(
            run_id=directory.run_id,
            stages=engine.partition.stages,
            stage_workers=engine.partition.stage_ranks,
            schedule=config.parallel.schedule,
            virtual_stages_per_worker=config.parallel.virtual_stages_per_worker,
            granularity=config.balance.granularity,
            operations=engine.settings.pipeline.operations,
            read_to_step=step,
        )
        number = _write_next(directory.plans, document)
    return int(broadcast_object(engine.world, number))
