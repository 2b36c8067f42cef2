"""The training run: joins the workers, starts or goes on, and drives the engine step by step to its end.

What happens between steps (techniques, plans, checkpoints, logs) are objects called at named points.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from .._common.console import say
from .._common.errors import EXIT_OK, EXIT_RELAUNCH, EXIT_USAGE, DynmoError
from ..config import Config
from ..data.gpt_dataset import Part, TokenError
from ..data.tokenizer import TokenizerFiles
from ..launch.exit_status import EXIT_NOT_FINITE
from ..parallel.consensus import is_reporting_rank
from ..parallel.dims import ParallelDims
from ..parallel.process_groups import destroy_world
from .checkpoint.async_checkpoint import Checkpointer, Saved
from .checkpoint.engine_checkpoint import CheckpointMetadata
from .engine import StepResult
from .fingerprint import config_facts, join_same
from .finite_check import FiniteCheck, batch_detail, end_message
from .garbage_collection import freeze_imports
from .monitoring.training_log import TrainingLog, complete_line, stop_line
from .rebalance.compression_choice import CompressionChoice
from .rebalance.plan_controller import AppliedPlan, PlanController, PlanControllerSettings
from .rebalance.planner_process import PlannerProcess
from .rebalance.resize_requests import ResizeRequests
from .settings_from_config import flops_counter, parameter_counts, plan_problems, resize_problems
from .setup import InitialState, continued_checkpoint, setup_run
from .signals import BoundarySignals, DistributedSignalHandler


def run_pretrain(config: Config) -> int:
    """Train as ``config`` says, in this process and those that the launcher started beside it; the exit code."""
    freeze_imports()
    torch.set_num_threads(config.training.num_threads)
    # Said once by torch for every process; what it may change is covered by the tests of linear layers.
    warnings.filterwarnings("ignore", message="Sparse (CSR|BSR) tensor support is in beta state")
    parallel = config.parallel
    dims = ParallelDims(
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        data=parallel.data_parallel_size,
        expert=parallel.expert_model_parallel_size,
    )
    world = join_same(config.training.device, dims, lambda: config_facts(config))
    try:
        run = _Run(setup_run(config, world))
        try:
            return run.evaluate() if config.training.skip_train else run.train()
        finally:
            run.close()
    except TokenError:
        if is_reporting_rank(first=world.is_rank0):
            raise
        return EXIT_USAGE
    finally:
        destroy_world()


class _Run:
    """A run in progress."""

    def __init__(self, start: InitialState) -> None:
        self.config = config = start.config
        self.engine, self.samples = start.engine, start.samples
        self.directory, self.recorder = start.directory, start.recorder
        self.step, self.consumed, self.consumed_valid = start.step, start.consumed, start.consumed_valid
        self._source = start.checkpoint.manifest.get("source") if start.checkpoint is not None else None
        engine, directory, recorder = start.engine, start.directory, start.recorder
        balance = config.balance
        # On one position there is nothing to move: a run that lost its other workers goes on so, with the same options.
        online = balance.balance == "online" and engine.world.dims.pipeline > 1
        planner = None
        if online and balance.planner == "internal" and engine.world.is_rank0:
            planner = PlannerProcess(directory.path, _planner_arguments(config), timeout_s=balance.planner_timeout_s)
        self._planner = planner
        self._controller = None
        if online:
            self._controller = PlanController(
                engine,
                PlanControllerSettings(
                    interval=balance.rebalance_interval,
                    lockstep=balance.balance_lockstep,
                    timeout_s=balance.planner_timeout_s,
                ),
                plans=directory.plans,
                append=recorder.profile_line,
                problems_of=lambda plan, active_plan_id, stages: plan_problems(
                    plan,
                    config,
                    engine.family,
                    run_id=directory.run_id,
                    active_plan_id=active_plan_id,
                    active_stages=stages,
                    workers=engine.world.worker_ids,
                ),
                active_plan_id=start.first_plan,
                log_event=recorder.event,
                settle=lambda: self._checkpoints.wait(),
                planner=planner,
            )
        self._first_plan = start.first_plan
        self._grow = ResizeRequests(
            directory.requests, lambda workers: resize_problems(config, engine.world.dims, workers), recorder.event
        )
        self._log = TrainingLog(config, engine.world, flops_counter(config, engine.family))
        self._checkpoints = Checkpointer(
            engine, directory.checkpoints, aside=config.run.async_save, on_saved=self._saved, on_failure=self._not_saved
        )
        self._check = FiniteCheck.of(config.training)
        self._last_saved = continued_checkpoint(start.checkpoint, directory, start.step)
        self._selection = _selection(config, start)
        self._tokenizer = TokenizerFiles.of(vars(config.data))

    def _start_planner(self) -> None:
        if self.config.balance.balance == "online" and self._controller is None:
            message = "--balance online: one pipeline position, nothing to move"
            self.recorder.event("planner", message, step=self.step)
        if self._planner is not None and (problem := self._planner.start()) is not None:
            self.recorder.event("planner", problem, step=self.step)

    def train(self) -> int:
        """All steps that are left, with an evaluation and a checkpoint at the end; the exit code."""
        training = self.config.training
        if self.step >= training.train_iters:
            return self._complete()
        self._log.start(self.engine.partition, self.step + 1, parameter_counts(self.engine))
        self._warn_without_test()
        self._start_planner()
        minutes = training.exit_duration_in_mins
        signals, last = BoundarySignals(), False
        with DistributedSignalHandler(minutes * 60 if minutes is not None else None) as signal_handler:
            while self.step < training.train_iters and not signals.leave:
                self._train_step()
                if self._check.is_over:
                    return self._end_not_finite()
                last = self.step == training.train_iters
                if training.eval_iters and (last or self.step % training.eval_interval == 0):
                    self._evaluate()
                taken = self._controller.boundary(self.step) if self._controller is not None and not last else None
                if taken is not None and taken.left:
                    return EXIT_OK
                if taken is not None:
                    self._moved(taken)
                self._select(taken)
                self._checkpoints.at_boundary()
                signals = signal_handler.at_boundary(self.engine.world, relaunch=not last and self._is_to_grow())
                if self._is_due(training.exit_interval):
                    signals = replace(signals, leave=True)
                if last or signals.leave or signals.save or self._is_due(self.config.run.save_interval):
                    self._save()
                if signals.leave and not last:
                    self._log.line(f" exiting program at iteration {self.step}")
            if last:
                self._test()
        return self._end(signals)

    def _complete(self) -> int:
        """All steps were done before this start."""
        if self.engine.world.is_rank0:
            samples, iters = self.config.training.train_samples, self.config.training.train_iters
            flag, number = ("--train-iters", iters) if samples is None else ("--train-samples", samples)
            rule = f"{flag} is {number:,}; give a larger {flag}"
            say(complete_line(self.directory.path, self.step, rule))
        return EXIT_OK

    def _end(self, signals: BoundarySignals) -> int:
        """Wait for the last checkpoint, print where the run is and how to resume it; the exit code."""
        self._checkpoints.wait()
        if self._checkpoints.failure is not None:
            last, run = self._last_saved, self.directory.path
            again = f"resume with --load {run}" if last else "start again with another --run-dir"
            problem = f"{self._checkpoints.failure}; the last checkpoint is {last or 'none'}"
            raise DynmoError(f"{problem}: make room, and {again}")
        is_left = self.step < self.config.training.train_iters
        if self.engine.world.is_rank0:
            say(f"run directory: {self.directory.path}")
            if signals.code and is_left:
                say(stop_line(self.directory.path, self.step, self.config.run.load, self._last_saved))
        # A run that ends by itself; one that a signal ended has that signal's code.
        if self._check.is_refused and not (is_left and (signals.code or signals.relaunch)):
            return self._end_not_finite()
        return EXIT_RELAUNCH if signals.relaunch and is_left else signals.code

    def _end_not_finite(self) -> int:
        """End a run whose model is not finite; the exit code."""
        self._checkpoints.wait()
        if self.engine.world.is_rank0:
            say(f"dynmo-train: error: {end_message(self.step, self._check, self._last_saved)}")
        return EXIT_NOT_FINITE

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def evaluate(self) -> int:
        """No step: the held-out data alone; the exit code."""
        self._log.start(self.engine.partition, self.step + 1, parameter_counts(self.engine))
        self._warn_without_test()
        self._evaluate()
        self._test()
        return EXIT_OK

    def _is_to_grow(self) -> bool:
        world = self.engine.world
        return world.is_rank0 and self._grow.asks(self.step, world.dims.pipeline)

    def _train_step(self) -> None:
        self.step += 1
        batch = self._batch = self.samples.training(self.consumed, self.step)
        size = self.samples.sizes.at(self.consumed)
        sampled = self.engine.is_warm and self.step % self.config.balance.profile_interval == 0
        result = self.engine.train_step(batch, sampled=sampled, advance=size)
        before, self.consumed = self.consumed, self.consumed + size
        self._record(result, size, batch.tokens or self.config.model.seq_length)
        if (problem := self._check.after_step(self.step, result)) is not None and self.engine.world.is_rank0:
            detail = batch_detail(before, size, self.samples.places(before))
            self.recorder.event("not_finite", problem, step=self.step, **detail)
            self._log.line(f" {problem}")
        for event in self.engine.after_step(self.step):
            self.recorder.technique(event)
            self._log.line(f" {event.message} after iteration {event.step}")

    def _record(self, result: StepResult, size: int, length: int) -> None:
        plan_id = self._controller.active_plan_id if self._controller is not None else self._first_plan
        if result.costs is not None:
            self.recorder.costs(self.step, plan_id, result.step_ns, result.costs, result.counts)
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
            tokens=size * length,
            global_batch_size=size,
            plan_id=plan_id,
            **({"compression": result.compression} if result.compression else {}),
        )
        self._log.step(self.step, self.consumed, size, length, result)

    def _select(self, taken: AppliedPlan | None) -> None:
        """Where ``dynmo-plan`` chooses who compresses between replicas."""
        if self._selection is None:
            return
        planned = taken.way if taken is not None else None
        chosen = self._selection.boundary(self.step, moved=taken is not None, planned=planned)
        if chosen is not None:
            self._log.line(f" {chosen} workers compress between replicas after iteration {self.step}")

    def _moved(self, taken: AppliedPlan) -> None:
        self._log.moved(taken, self.step)
        if taken.released:
            self._log.line(f" {self.recorder.released(self.step, taken.released)} after iteration {self.step}")
            self._log.devices = self.engine.world.size

    def _evaluate(self) -> None:
        if self.samples.valid is not None:
            self._evaluate_on("valid", "validation", self.consumed_valid, f"iteration {self.step}")
            self.consumed_valid += self.config.training.eval_iters * self.samples.sizes.final

    def _test(self) -> None:
        """The test data, once the training has ended."""
        if self.samples.test is not None:
            self._evaluate_on("test", "test", 0, "the end of training for test data")

    def _warn_without_test(self) -> None:
        if self.samples.no_test is not None and self.engine.world.is_rank0:
            say(f"warning: no evaluation on test data: {self.samples.no_test}")

    def _evaluate_on(self, part: Part, name: str, consumed: int, place: str) -> None:
        size, count = self.samples.sizes.final, self.config.training.eval_iters
        batches = (self.samples.held_out(part, consumed + number * size, self.step) for number in range(count))
        told = self.engine.evaluate_losses(batches)
        loss = told.pop("loss")
        self.recorder.metrics(
            step=self.step, **{f"{name}_loss": loss}, **{f"{name}_{each}": value for each, value in told.items()}
        )
        self._log.evaluated(self.step, {"lm_loss": loss} | told, place, name)

    def _save(self) -> None:
        config = self.config
        if (problem := self._check.refusal(self.engine, self.step, self._batch)) is not None:
            self.recorder.event("not_saved", problem, step=self.step)
            self._log.line(f" {problem}")
            return
        run = CheckpointMetadata(
            run_id=self.directory.run_id,
            step=self.step,
            consumed_train_samples=self.consumed,
            consumed_valid_samples=self.consumed_valid,
            source=self._source,
            data={
                "seed": config.training.seed,
                "split": config.data.split,
                "sequence_length": config.model.seq_length,
                "prefix": config.data.name,
            },
            tokenizer=self._tokenizer.files if self._tokenizer is not None else {},
            keep=config.run.keep_checkpoints,
            moments=not config.run.no_save_optim,
        )
        self._checkpoints.save(run)

    def _not_saved(self, step: int, problem: str) -> None:
        message = f"{problem}; training continues, the next save tries again"
        self.recorder.event("not_saved", message, step=step)
        self._log.line(f" {message}")

    def _saved(self, saved: Saved) -> None:
        message = f"saved {saved.path.name} in {saved.seconds:.2f} s, training stood still for {saved.stalled_s:.2f} s"
        self._last_saved = saved.path.name
        self.recorder.event("checkpoint", message, step=saved.step, stalled_s=saved.stalled_s)
        self._log.line(f" saved checkpoint {saved.path} in {saved.seconds:.2f} s")

    def close(self) -> None:
        """End what runs beside the training."""
        self._log.close()
        if self._selection is not None:
            self._selection.close()
        if self._planner is not None:
            self._planner.stop()


def _selection(config: Config, start: InitialState) -> CompressionChoice | None:
    """Asks ``dynmo-plan`` who compresses between replicas; costs are first measured in the second step or later."""
    engine, every = start.engine, config.balance.profile_interval
    if not engine.chooses_replica_workers:
        return None
    device = engine.world.device
    measured = start.step + 2
    return CompressionChoice(
        engine,
        start.directory.path,
        first_costs=measured + -measured % every,
        due=engine.replica_workers is None,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        log_event=start.recorder.event,
    )


def _planner_arguments(config: Config) -> list[str]:
    balance = config.balance
    arguments = [
        *("--balancer", balance.balancer),
        *("--policy", balance.balance_policy),
        *("--min-gain", str(balance.balance_min_gain)),
        *("--granularity", balance.granularity),
    ]
    if balance.pack_to is not None:
        arguments += ["--pack-to", str(balance.pack_to)]
    if balance.min_throughput_fraction is not None:
        arguments += ["--min-throughput-fraction", str(balance.min_throughput_fraction)]
    if balance.balance_lockstep:
        return [*arguments, "--lockstep", "--min-records", "1"]
    return [*arguments, "--every", str(balance.rebalance_interval)]
