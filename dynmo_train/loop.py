"""The training run: joins the workers, starts or goes on, and drives the engine step by step to its end.

What happens between steps (techniques, plans, checkpoints, logs) are objects called at named points.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .building import first_partition, plan_problems, settings_of
from .checkpoint import Checkpoint, CheckpointError, remove_stale_staging
from .config import Config
from .console import say
from .data.batches import Samples, open_samples
from .data.tokenizer import TokenizerFiles
from .engine import Engine, StepResult
from .families import family_of
from .formats.plan import initial_plan, plan_ids, write_plan
from .formats.profile import Layout, ModelInfo
from .loading import checkpoint_to_load
from .optim.apex import find_apex
from .parallel.dims import ParallelDims
from .parallel.world import World, broadcast_document, join_world, leave_world
from .pipeline.schedule import Batch
from .rebalance.controller import Controller, ControllerSettings
from .rebalance.planner import PlannerProcess
from .recording import Recorder, describe_items, describe_workers, measure_link
from .rundir import RunDirectory, begin_run
from .saving import SavedRun, check_same_model, save, state_reader
from .traininglog import TrainingLog, evaluation_line


def run_pretrain(config: Config) -> int:
    """Train as ``config`` says, in this process and those that the launcher started beside it; the exit code."""
    torch.set_num_threads(config.training.num_threads)
    # Said once by torch for every process; what it may change is covered by the tests of linear layers.
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
    parallel = config.parallel
    dims = ParallelDims(
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        data=parallel.data_parallel_size,
    )
    world = join_world(config.training.device, dims=dims)
    try:
        run = _begin(config, world)
        try:
            run.train()
        finally:
            run.close()
    finally:
        leave_world()
    return 0


def _begin(config: Config, world: World) -> _Run:
    """Open data and checkpoint, build the engine, make the run directory, write the header and the first plan."""
    samples = open_samples(config)
    apex = find_apex()
    fused_adam = apex.fused_adam if world.device.type == "cuda" else None
    if world.is_first:
        say(apex.line(used=fused_adam is not None))
        if config.parallel.zero_stage == 1:
            say("--zero-stage 1 behaves as 2: gradients are shared between steps as well")
    family, settings = family_of(config), replace(settings_of(config), fused_adam=fused_adam)
    checkpoint = checkpoint_to_load(config, world)
    if checkpoint is not None:
        check_same_model(checkpoint, family)
    topology = checkpoint.manifest["topology"] if checkpoint is not None else None
    engine = Engine(family, settings, first_partition(config, family, topology), world)
    if checkpoint is None:
        engine.build()
    else:
        progress = checkpoint.manifest.get("x_progress", {})
        reader = state_reader(checkpoint, engine.held, world.device)
        engine.restore(reader, checkpoint.manifest["step"], **progress)

    workers, dims = describe_workers(world), world.dims
    facts: dict[str, Any] = {
        "sparse_thresholds": {"csr": settings.sparse_threshold},
        "device": world.device.type,
        "optimizer": "torch AdamW" if fused_adam is None else "apex FusedAdam",
    }
    hosts = list(dict.fromkeys(host for worker in workers for host in worker.hosts))
    begun = begin_run(config, world_size=world.size, hosts=hosts, engine=facts) if world.is_first else None
    told = broadcast_document(world, [str(begun.path), begun.run_id, begun.segment] if begun else None)
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
            schedule=config.parallel.schedule,
            virtual_stages_per_worker=config.parallel.virtual_stages_per_worker,
            granularity=config.balance.granularity,
            microbatches=config.microbatches,
            micro_batch_size=config.training.micro_batch_size,
            tensor_parallel_size=dims.tensor,
            data_parallel_size=dims.data,
        ),
        measure_link(world),
        workers,
        describe_items(family, settings.pipeline.boundary, engine.held.blueprint),
    )
    first_plan = _write_first_plan(config, engine, directory, checkpoint)
    return _Run(config, engine, samples, directory, recorder, checkpoint, first_plan)


def _write_first_plan(config: Config, engine: Engine, directory: RunDirectory, checkpoint: Checkpoint | None) -> int:
    """Write the partition in force as the next plan (number 0 in a new run) and give its number to every worker."""
    number: int | None = None
    if engine.world.is_first:
        remove_stale_staging(directory.checkpoints)
        number = max(plan_ids(directory.plans), default=-1) + 1
        document = initial_plan(
            run_id=directory.run_id,
            stages=engine.partition.stages,
            workers=range(engine.partition.workers),
            schedule=config.parallel.schedule,
            virtual_stages_per_worker=config.parallel.virtual_stages_per_worker,
            plan_id=number,
            read_to_step=checkpoint.manifest["step"] if checkpoint is not None else 0,
        )
        write_plan(directory.plans, document)
    return int(broadcast_document(engine.world, number))


class _Run:
    """A run in progress."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        samples: Samples,
        directory: RunDirectory,
        recorder: Recorder,
        checkpoint: Checkpoint | None,
        first_plan: int,
    ) -> None:
        self.config, self.engine, self.samples = config, engine, samples
        self.directory, self.recorder = directory, recorder
        self.step = checkpoint.manifest["step"] if checkpoint is not None else 0
        self.consumed = checkpoint.manifest["consumed_train_samples"] if checkpoint is not None else 0
        if self.consumed != self.step * config.training.global_batch_size:
            raise CheckpointError(
                f"the checkpoint consumed {self.consumed} samples in {self.step} steps; --global-batch-size"
                f" {config.training.global_batch_size} would go on with other batches: give the size that it had"
            )
        balance = config.balance
        online = balance.balance == "online"
        planner = None
        if online and balance.planner == "internal" and engine.world.is_first:
            planner = PlannerProcess(directory.path, _planner_arguments(config))
        self._planner = planner
        self._controller = None
        if online:
            self._controller = Controller(
                engine,
                ControllerSettings(
                    interval=balance.rebalance_interval,
                    lockstep=balance.balance_lockstep,
                    timeout_s=balance.planner_timeout_s,
                ),
                plans=directory.plans,
                profile=directory.profile,
                problems_of=lambda plan, in_force, stages: plan_problems(
                    plan, config, engine.family, run_id=directory.run_id, in_force=in_force, stages=stages
                ),
                in_force=first_plan,
                tell=recorder.event,
                planner=planner,
            )
        self._first_plan = first_plan
        self._log = TrainingLog(config, engine.world)
        self._tokenizer = TokenizerFiles.of(vars(config.data))

    def train(self) -> None:
        """All steps that are left, with an evaluation and a checkpoint at the end."""
        training, world = self.config.training, self.engine.world
        self._log.start(self.engine.partition, self.step + 1)
        if self._planner is not None and (problem := self._planner.start()) is not None:
            self.recorder.event("planner", problem, step=self.step)
        while self.step < training.train_iters:
            self.step += 1
            batch = self.samples.batch(self.samples.train, self.consumed, self.step)
            sampled = self.engine.is_warm and self.step % self.config.balance.profile_interval == 0
            result = self.engine.train_step(batch, sampled=sampled)
            self.consumed += training.global_batch_size
            self._record(result)
            for event in self.engine.after_step(self.step):
                self.recorder.technique(event)
                self._log.line(f" {event.message} after iteration {event.step}")
            last = self.step == training.train_iters
            if training.eval_iters and (last or self.step % training.eval_interval == 0):
                self._evaluate()
            taken = self._controller.boundary(self.step) if self._controller is not None and not last else None
            if taken is not None:
                self._log.moved(taken, self.step)
            leaving = training.exit_interval is not None and self.step % training.exit_interval == 0
            every = self.config.run.save_interval
            if last or leaving or (every is not None and self.step % every == 0):
                self._save()
            if leaving and not last:
                self._log.line(f" exiting program at iteration {self.step}")
                break
        if world.is_first:
            say(f"run directory: {self.directory.path}")

    def _record(self, result: StepResult) -> None:
        plan_id = self._controller.in_force if self._controller is not None else self._first_plan
        if result.costs is not None:
            self.recorder.costs(self.step, plan_id, result.step_ns, result.costs)
        self.recorder.metrics(
            step=self.step,
            consumed_train_samples=self.consumed,
            **result.losses,
            **result.counts,
            grad_norm=result.grad_norm,
            learning_rate=result.rate,
            loss_scale=result.loss_scale,
            updated=result.updated,
            step_ns=result.step_ns,
            tokens=self.config.training.global_batch_size * self.config.model.seq_length,
            plan_id=plan_id,
        )
        self._log.step(self.step, self.consumed, result)

    def _evaluate(self) -> None:
        part = self.samples.valid
        if part is None:
            return
        size = self.config.training.global_batch_size

        def batches() -> Iterator[Batch]:
            for index in range(self.config.training.eval_iters):
                yield self.samples.batch(part, index * size, self.step)

        loss = self.engine.evaluate(batches())
        self.recorder.metrics(step=self.step, validation_loss=loss)
        self._log.line(evaluation_line(self.step, loss, math.exp(min(20.0, loss))))

    def _save(self) -> None:
        config = self.config
        run = SavedRun(
            run_id=self.directory.run_id,
            step=self.step,
            consumed_train_samples=self.consumed,
            data={
                "seed": config.training.seed,
                "split": config.data.split,
                "sequence_length": config.model.seq_length,
                "prefix": config.data.name,
            },
            tokenizer=self._tokenizer.files if self._tokenizer is not None else {},
            keep=config.run.keep_checkpoints,
        )
        started = time.perf_counter()
        path = save(self.engine, self.directory.checkpoints, run)
        seconds = time.perf_counter() - started
        self.recorder.event("checkpoint", f"saved {path.name} in {seconds:.2f} s", step=self.step)
        self._log.line(f" saved checkpoint {path} in {seconds:.2f} s")

    def close(self) -> None:
        """End what runs beside the training."""
        if self._planner is not None:
            self._planner.stop()


def _planner_arguments(config: Config) -> list[str]:
    balance = config.balance
    arguments = [
        *("--balancer", balance.balancer),
        *("--policy", balance.balance_policy),
        *("--min-gain", str(balance.balance_min_gain)),
        *("--granularity", balance.granularity),
    ]
    if balance.balance_lockstep:
        return [*arguments, "--lockstep", "--min-records", "1"]
    return [*arguments, "--every", str(balance.rebalance_interval)]
