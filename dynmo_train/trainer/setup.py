"""The start of a run: data, checkpoint, engine, run directory, the profile's header and the first plan.

What a process may find impossible here ends all processes at once, with one message.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._common.console import say
from .._common.errors import UsageError
from ..config import Config
from ..data.batches import Samples, open_samples
from ..formats.checkpoint import Checkpoint, CheckpointError, remove_stale_staging
from ..formats.plan import initial_plan, plan_ids, write_plan
from ..formats.profile import Layout, ModelInfo
from ..models.compiled import check_compiler
from ..models.layer_list import ModelFamily
from ..models.registry import family_of
from ..optim.apex import find_apex
from ..optim.scheduler_state import samples_done, scheduler_differences
from ..parallel.consensus import rank0_first, run_on_all_ranks
from ..parallel.process_groups import World, broadcast_object
from ..pipeline.emulated_profiler import EmulatedProfiler
from ..pipeline.emulation_trace import read_trace
from ..pipeline.profiler import LayerProfiler
from .checkpoint.engine_checkpoint import check_same_model, state_reader
from .checkpoint.load_checkpoint import check_bert, checkpoint_to_load, tower_reader
from .engine import Engine, EngineSettings
from .fingerprint import checkpoint_facts, require_same
from .monitoring.profile_writer import Recorder, describe_items, describe_workers, measure_links
from .run_directory import RunDirectory, open_run_directory
from .settings_from_config import first_partition, schedule_in_profile, settings_of


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """What a run starts with.

    Attributes:
        config: of the run; with ``--train-samples`` its ``train_iters`` count from what is consumed.
        checkpoint: what it resumes from, or what it took its weights from.
        step, consumed: steps done and samples consumed.
        consumed_valid: samples of the validation consumed.
        first_plan: the number of the active plan.
    """

    config: Config
    engine: Engine
    samples: Samples
    directory: RunDirectory
    recorder: Recorder
    checkpoint: Checkpoint | None
    step: int
    consumed: int
    consumed_valid: int
    first_plan: int


def setup_run(config: Config, world: World) -> InitialState:
    """Open data and checkpoint, build the engine, make the run directory, write the header and the first plan."""
    if config.training.torch_compile:
        run_on_all_ranks(
            world, lambda: check_compiler(world.device.type, config.training.torch_compile_backend, os.environ)
        )
    apex = find_apex()
    on_cuda = world.device.type == "cuda"
    fused_adam = apex.fused_adam if on_cuda else None
    fused_norms = apex.fused_norms if on_cuda else {}
    if world.is_rank0:
        say(apex.line(used=fused_adam is not None))
        if config.parallel.zero_stage == 1:
            say("--zero-stage 1 behaves as 2: gradients are shared between steps as well")
    family = family_of(config)
    takes_moments = not (config.run.finetune or config.run.no_load_optim)
    checkpoint = run_on_all_ranks(world, lambda: checkpoint_to_load(config, world, with_optimizer=takes_moments))
    require_same(world, checkpoint_facts(checkpoint))
    step, consumed = run_on_all_ranks(world, lambda: _progress(config, checkpoint))
    config = _with_steps_left(config, step, consumed, world)
    samples = rank0_first(world, lambda: open_samples(config, step, consumed))
    stored = checkpoint.manifest["dynamic"]["sparse_thresholds"] if checkpoint is not None else None
    settings = run_on_all_ranks(
        world, lambda: replace(settings_of(config, stored or None), fused_adam=fused_adam, fused_norms=fused_norms)
    )
    bert = run_on_all_ranks(world, lambda: _bert(config, world)) if checkpoint is None else None
    require_same(world, checkpoint_facts(bert, "--bert-load"))
    engine = run_on_all_ranks(world, lambda: _engine(config, world, family, settings, checkpoint, bert))

    workers, dims = describe_workers(world), world.dims
    facts: dict[str, Any] = {
        "sparse_thresholds": dict(settings.sparse.thresholds),
        "device": world.device.type,
        "norms": sorted(each.__name__ for each in fused_norms.values()) or "torch",
        "optimizer": "torch AdamW" if fused_adam is None else "apex FusedAdam",
    }
    if settings.compression.is_lossy:
        also = " and of choices of workers" if settings.compression.choose_workers else ""
        facts["reproducible"] = (
            f"bit for bit for a fixed sequence of plans{also} only: gradients are compressed with loss"
        )
    hosts = list(dict.fromkeys(host for worker in workers for host in worker.hosts))
    begun = run_on_all_ranks(
        world,
        lambda: (
            open_run_directory(config, world_size=world.size, hosts=hosts, engine=facts) if world.is_rank0 else None
        ),
    )
    told = broadcast_object(world, [str(begun.path), begun.run_id, begun.segment] if begun else None)
    directory = RunDirectory(path=Path(told[0]), run_id=told[1], segment=told[2])
    recorder = Recorder(directory, world)
    recorder.header(
        directory.run_id,
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
        measure_links(world),
        workers,
        describe_items(family, settings.pipeline.boundary, engine.item_store.blueprint),
    )
    for fault in checkpoint.skipped_checkpoints if checkpoint is not None else ():
        recorder.event("checkpoint_damaged", f"passed over a damaged checkpoint: {fault}", step=step)
    first_plan = _write_first_plan(config, engine, directory, step)
    return InitialState(
        config=config,
        engine=engine,
        samples=samples,
        directory=directory,
        recorder=recorder,
        checkpoint=checkpoint,
        step=step,
        consumed=consumed,
        consumed_valid=checkpoint.manifest.get("x_consumed_valid_samples", 0) if checkpoint is not None and step else 0,
        first_plan=first_plan,
    )


def _progress(config: Config, checkpoint: Checkpoint | None) -> tuple[int, int]:
    """Steps done and samples consumed; raises ``CheckpointError`` where the samples are not known."""
    if checkpoint is None or _begins(config, checkpoint):
        return 0, 0
    step, consumed = checkpoint.manifest["step"], checkpoint.manifest["consumed_train_samples"]
    if step and not consumed:
        raise CheckpointError(
            f"the checkpoint consumed 0 samples in {step} steps: the samples to continue with are not known; give"
            " --finetune to take its weights and start from the first step"
        )
    return step, consumed


def _with_steps_left(config: Config, step: int, consumed: int, world: World) -> Config:
    """The configuration of a resumed run, whose batch size may have been another one up to here.

    The samples continue after those that are consumed. Steps are counted from ``--train-iters`` as before; with
    ``--train-samples`` the last step follows from the samples that are left.
    """
    sizes, training = config.batch_sizes, config.training
    if consumed == sizes.consumed_after(step):
        return config
    if world.is_rank0:
        say(
            f"the batch size has changed: {consumed:,} samples are consumed after {step:,} steps; training continues"
            f" with {sizes.at(consumed)} samples a step"
        )
    if training.train_samples is None:
        return config
    train_iters = step + sizes.steps_for(training.train_samples, consumed)
    return replace(config, training=replace(training, train_iters=max(1, train_iters)))


def _begins(config: Config, checkpoint: Checkpoint) -> bool:
    """Whether a run takes the weights alone and begins at the first step.

    It does with ``--finetune``, and from another program's weights, whose checkpoint may name a step of its own.
    """
    manifest = checkpoint.manifest
    return config.run.finetune or (manifest["optimizer"] is None and not manifest["consumed_train_samples"])


def _bert(config: Config, world: World) -> Checkpoint | None:
    """What ``--bert-load`` names; raises ``CheckpointError`` where there is none, or ``--load`` gives the weights."""
    place = config.ict.bert_load
    if place is None:
        return None
    found = checkpoint_to_load(config, world, flag="--bert-load", place=place, weights_only=True)
    if found is None:
        raise CheckpointError(
            f"--bert-load {place} holds no checkpoint of a BERT; leave it out to initialize both towers at random"
        )
    return found


def _engine(
    config: Config,
    world: World,
    family: ModelFamily,
    settings: EngineSettings,
    checkpoint: Checkpoint | None,
    bert: Checkpoint | None,
) -> Engine:
    """The engine with the weights that the run starts from."""
    if checkpoint is not None:
        check_same_model(checkpoint, family, goes_on=not config.run.finetune)
    topology = checkpoint.manifest["topology"] if checkpoint is not None else None
    engine = Engine(
        family, settings, first_partition(config, family, topology), world, _emulated_profiler(config, world, family)
    )
    if checkpoint is None and bert is not None:
        check_bert(bert, family)
        engine.restore(tower_reader(bert, family, engine.item_store, world.device), 0)
        return engine
    if checkpoint is None:
        engine.build()
        return engine
    if _begins(config, checkpoint):
        engine.restore(state_reader(checkpoint, engine.item_store, world, moments=False), 0)
        return engine
    reader = state_reader(checkpoint, engine.item_store, world, moments=not config.run.no_load_optim)
    if world.is_rank0:
        for line in scheduler_differences(settings.rate, checkpoint.manifest):
            say(f"warning: {line}")
    engine.restore(reader, checkpoint.manifest["step"], **progress_of(checkpoint))
    return engine


def progress_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says of schedules and techniques, as :meth:`Engine.restore` takes it.

    Before ``advanced_samples`` the schedule of the learning rate counted, as ``advanced``, steps or samples: samples
    where it is more than the steps done. The batch of those steps is the checkpoint's; that of this start may differ.
    An import has neither, but the count of the scheduler that it came with.
    """
    progress = dict(checkpoint.manifest.get("x_progress", {}))
    old = progress.pop("advanced", None)
    if old is None:
        counted = samples_done(checkpoint.manifest)
    else:
        step, consumed = checkpoint.manifest["step"], checkpoint.manifest["consumed_train_samples"]
        counted = old if not step or old > step else old * consumed // step
    return {"advanced_samples": counted, **progress}


def continued_checkpoint(checkpoint: Checkpoint | None, directory: RunDirectory, step: int) -> str | None:
    """Name of the run's own checkpoint that it was resumed from; None where it starts from another's, or from none."""
    if checkpoint is None or not step:
        return None
    is_own = checkpoint.directory.resolve().is_relative_to(directory.path.resolve())
    return checkpoint.directory.name if is_own else None


def _emulated_profiler(config: Config, world: World, family: ModelFamily) -> LayerProfiler | None:
    """The probe of an emulated run; None where layers take the time of their arithmetic."""
    given = config.emulation
    if given.emulate is None:
        return None
    if world.device.type == "cuda":
        raise UsageError("--emulate sleeps on CPU; on CUDA give --device cpu")
    return EmulatedProfiler(read_trace(Path(given.emulate), [item.name for item in family.items], given.emulate_scale))


def _write_next(plans: Path, document: dict[str, Any]) -> int:
    """Write a plan under the next free number: an external planner may take the one that was free a moment ago."""
    while True:
        number = max(plan_ids(plans), default=-1) + 1
        with contextlib.suppress(FileExistsError):
            write_plan(plans, {**document, "plan_id": number})
            return number


def _write_first_plan(config: Config, engine: Engine, directory: RunDirectory, step: int) -> int:
    """Write the partition in force as the next plan (number 0 in a new run) and give its number to every worker."""
    number: int | None = None
    if engine.world.is_rank0:
        remove_stale_staging(directory.checkpoints)
        document = initial_plan(
            run_id=directory.run_id,
            stages=engine.partition.stages,
            workers=range(engine.partition.workers),
            schedule=config.parallel.schedule,
            virtual_stages_per_worker=config.parallel.virtual_stages_per_worker,
            placed=engine.partition.placed,
            granularity=config.balance.granularity,
            operations=engine.settings.pipeline.operations,
            read_to_step=step,
        )
        number = _write_next(directory.plans, document)
    return int(broadcast_object(engine.world, number))
