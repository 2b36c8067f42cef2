"""The training loop: joins the ranks, sets up the run, and drives the engine step by step to its end.

One iteration of ``Trainer.train``, on every rank::

    BatchLoader -> Engine.launch_step -> StepResult, on GPUs that of the step before
                              |                 |-> profile.jsonl, metrics.jsonl     RunLogger
                              |                 |-> iteration line, scalars          TrainingLog
                              |                 `-> skipped update: report or end    FiniteCheck
                              v
                        Engine.after_step       dynamic techniques: pruning, freezing
                              |
    -------- step boundary ---+------------------------------------------------------
                              v
        every --eval-interval  evaluation on validation data
        PlanController         wait for a plan, move layers, release ranks; ExpertRebalance: move experts
        CompressionChoice      number of pipeline ranks that compress between replicas
        Checkpointer           progress of an asynchronous save
        signals                SIGTERM, SIGUSR1, time limit, resize request: all ranks agree
        --save-interval        start a checkpoint
        --peer-checkpoint-interval  start a copy of the state to another rank; ranks that wait join then
                              |
                              v
                        next step, or exit with the code of the signal

Everything that acts at a boundary is called at the same boundary on every rank, since most of it is collective. The
order matters: a checkpoint is saved after layers have moved, so that it is of the partition that the run resumes with.

On GPUs the host launches a step before it has the result of the last one, so that the device never waits for the host.
The result is collected first where something acts on it: profiled steps, evaluations, plans, checkpoints, the end.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._common.console import print_message
from .._common.errors import EXIT_OK, EXIT_RELAUNCH, DynmoError
from ..data.batch import Batch
from ..data.loader import BatchLoader
from ..data.tokenizer import TokenizerFiles
from ..formats.checkpoint import step_of
from ..launch.exit_status import EXIT_NOT_FINITE
from ..launch.incident_log import launcher_death
from ..launch.run_lock import release
from ..launch.watch.heartbeat import Phase
from ..launch.worker import JOIN_FILE_VARIABLE, is_orphan
from .checkpoint.async_checkpoint import Checkpointer, SavedCheckpoint
from .checkpoint.metadata import CheckpointMetadata, data_properties
from .evaluations import Evaluations
from .failures import raise_together
from .finite_check import FiniteCheck, batch_detail, end_message, not_finite_incident
from .loss_spikes import Rollback, spike_incident
from .loss_spikes import end_message as spikes_end_message
from .monitoring.scalar_writers import scalar_writers_on_rank0
from .monitoring.training_log import (
    TrainingLog,
    complete_line,
    graphs_line,
    longer_run_rule,
    run_argument_lines,
    stop_line,
)
from .rebalance.compression_choice import compression_choice
from .rebalance.expert_rebalance import ExpertRebalance
from .rebalance.measured_steps import MeasuredSteps
from .rebalance.plan_controller import AppliedPlan, PlanController, PlanControllerSettings
from .rebalance.planner_process import PlannerProcess, planner_arguments
from .rebalance.resize_requests import JoinRequests, ResizeRequests
from .recovery.boundary import RecoveryBoundary
from .recovery.survivor import Survivor
from .settings_from_config import flops_counter, parameter_counts, plan_problems, resize_problems
from .setup import InitialState
from .signals import BoundarySignals, DistributedSignalHandler
from .step_result import StepResult, UnloggedStep


class Trainer:
    """A run in progress: the engine, and everything that acts at step boundaries.

    Attributes:
        defers_results: whether the result of a step may be read after the next one was launched. On CPU this would gain
            nothing, and times of steps would be those between two results.
        rollback: the return to a checkpoint that ended :meth:`train`; None without one.

    Args:
        start: state before the first step.
        seconds_before: time since the start of the processes, which ``--exit-duration-in-mins`` counts.
        survivor: makes the copies of ``--peer-checkpoint-interval``; None without.
    """

    def __init__(self, start: InitialState, seconds_before: float = 0.0, survivor: Survivor | None = None) -> None:
        self.config = config = start.config
        self.engine, self.data = start.engine, start.data
        self.directory, self.logger = start.directory, start.logger
        self.step = start.step
        self.consumed_samples = start.consumed_samples
        self._initial_plan_id = start.active_plan_id
        self._survivor = survivor
        manifest = start.manifest or {}
        self._base, self._options = start.base, start.options
        self._source, self._start_position = manifest.get("source"), manifest.get("x_data_position", {})
        self.planner: PlannerProcess | None = None
        self.controller = self._plan_controller()
        self._resize_requests = ResizeRequests(
            self.directory.requests,
            lambda workers: resize_problems(config, self.engine.world.dims, workers),
            self.logger.log_event,
        )
        join_file = os.environ.get(JOIN_FILE_VARIABLE)
        self._join_requests = JoinRequests(
            Path(join_file) if join_file else None,
            lambda workers: resize_problems(config, self.engine.world.dims, workers),
            self.logger.log_event,
        )
        self._flops = flops_counter(config, self.engine.family)
        writers = scalar_writers_on_rank0(self.engine.world, config, self.directory, start.step)
        self._log = TrainingLog(config, self.engine.world, self._flops, writers)
        self._evaluations = Evaluations(config, start, self._log)
        self._checkpointer = Checkpointer(
            self.engine,
            self.directory.checkpoints,
            async_save=config.run.async_save,
            on_saved=self._log_saved,
            on_failure=self._log_not_saved,
        )
        self._finite_check = FiniteCheck.of(config.training)
        self._batches, self._spikes = start.batches, start.spikes
        self.rollback: Rollback | None = None
        self._recovery = RecoveryBoundary(
            survivor, self.engine, self.logger, self._log.line, self._metadata, self._collect, self._checkpointer.wait
        )
        self._seconds_before = seconds_before
        self._last_saved = start.last_saved
        self._compression_choice = compression_choice(
            start.engine,
            start.directory.path,
            step=start.step,
            profile_interval=config.balance.profile_interval,
            log_event=start.logger.log_event,
        )
        self._expert_rebalance = ExpertRebalance.of(config.balance, self.engine, self.directory, self.logger)
        self._tokenizer = TokenizerFiles.of(vars(config.data))
        self._loader = self._batch_loader()
        self._batch: Batch | None = None
        self.defers_results = self.engine.world.device.type == "cuda"
        self._waiting: deque[UnloggedStep] = deque()
        self._compiled_graphs = 0
        self._measured = MeasuredSteps(self.logger)
        self._profiled: tuple[UnloggedStep, StepResult] | None = None

    def _plan_controller(self) -> PlanController | None:
        """The controller of an online run; None where there is nothing to move, as with one pipeline rank.

        A run that released all ranks but one is resumed with the same options, so that this is not an error.
        """
        config, engine, balance = self.config, self.engine, self.config.balance
        dims = engine.world.dims
        # With one pipeline rank plans may still move experts.
        if balance.balance != "online" or (dims.pipeline == 1 and not (balance.balance_experts and dims.expert > 1)):
            return None
        if balance.planner == "internal" and engine.world.is_rank0:
            arguments = planner_arguments(config.balance)
            self.planner = PlannerProcess(self.directory.path, arguments, timeout_s=balance.planner_timeout_s)
        return PlanController(
            engine,
            PlanControllerSettings(
                interval=balance.rebalance_interval,
                lockstep=balance.balance_lockstep,
                timeout_s=balance.planner_timeout_s,
            ),
            plans=self.directory.plans,
            append=self.logger.log_profile_record,
            problems_of=lambda plan, active_plan_id, stages: plan_problems(
                plan,
                config,
                engine.family,
                run_id=self.directory.run_id,
                active_plan_id=active_plan_id,
                active_stages=stages,
                workers=engine.world.worker_ids,
            ),
            active_plan_id=self._initial_plan_id,
            log_event=self.logger.log_event,
            log_incident=self.logger.log_incident,
            log_change=self.logger.log_technique_event,
            finish_saves=lambda: self._checkpointer.wait(),  # a lambda: the checkpointer is created later
            planner=self.planner,
        )

    def _start_planner(self) -> None:
        if self.config.balance.balance == "online" and self.controller is None:
            message = "--balance online has no effect: one pipeline rank, nothing to move"
            self.logger.log_event("planner", message, step=self.step)
        if self.planner is not None and (problem := self.planner.start()) is not None:
            self.logger.log_event("planner", problem, step=self.step)

    def _log_start(self) -> None:
        counts, arguments = parameter_counts(self.engine), run_argument_lines(self.config, self.directory)
        self._log.log_start(self.engine.partition, self.step + 1, counts, arguments)

    def train(self) -> int:
        """Run the remaining steps, with an evaluation and a checkpoint at the end; the exit code.

        Raises:
            SampleError: on every rank, if samples cannot be read or have a token id outside of the vocabulary.
            DynmoError: on every rank, if the last checkpoint could not be written.
        """
        training = self.config.training
        if self.step >= training.train_iters:
            return self._report_complete()
        self._log_start()
        self._recovery.begin(self.step)
        if training.cuda_graph:
            self._log.line(graphs_line(self.engine.local_names, self.engine.pipeline().graph_obstacles))
        self._evaluations.warn_without_test_data()
        self._start_planner()
        self._place_experts()
        minutes = training.exit_duration_in_mins
        signals, is_last = BoundarySignals(), False
        limit_s = None if minutes is None else max(0.0, minutes * 60 - self._seconds_before)
        with DistributedSignalHandler(limit_s) as signal_handler:
            while self.step < training.train_iters and not signals.exit:
                self.train_step()
                # Before anything else at this boundary: the model must be neither evaluated nor saved.
                if (code := self._end_early(signal_handler)) is not None:
                    return code
                is_last = self.step == training.train_iters
                if training.eval_iters and (is_last or self.step % training.eval_interval == 0):
                    self._evaluations.validate(self.step)
                # Not after the last step: a move costs a pause and has no steps left that it makes faster.
                plan = self.controller.at_boundary(self.step) if self.controller is not None and not is_last else None
                # A released rank is not in the world any more: it must not call the collectives below.
                if plan is not None and plan.is_released:
                    return EXIT_OK
                if plan is not None:
                    self._log_plan(plan)
                self._move_experts(is_last=is_last)
                self._choose_compression(plan)
                # Before a new save below, which would otherwise wait for a save that is already complete.
                self.engine.heartbeat.enter(Phase.SAVE)
                self._checkpointer.at_boundary()
                self.engine.heartbeat.enter(Phase.BOUNDARY)
                relaunch = not is_last and self._is_resize_requested()
                # A signal that arrived during the evaluation or the move above counts at this boundary, unless ranks
                # run ahead of their devices: then at the next one.
                signals = signal_handler.at_boundary(
                    self.engine.world, relaunch=relaunch, grow=self._recovery.is_joined, defer=bool(self._waiting)
                )
                if self._is_due(training.exit_interval):
                    signals = replace(signals, exit=True)
                # Every term is equal on all ranks: counts of steps, or reduced by ``at_boundary``.
                if is_last or signals.exit or signals.save or self._is_due(self.config.run.save_interval):
                    self._collect()
                    self._save()
                self._recovery.at_boundary(self.step, grow=signals.grow, is_over=is_last or signals.exit)
                if signals.exit and not is_last:
                    self._log.line(f" exiting program at iteration {self.step}")
            if is_last:
                self._evaluations.test(self.step)
        return self._end(signals)

    def _report_complete(self) -> int:
        """Report that the checkpoint which this start loaded has all steps."""
        if self.engine.world.is_rank0:
            print_message(complete_line(self.directory.path, self.step, longer_run_rule(self.config.training)))
        return EXIT_OK

    def _end(self, signals: BoundarySignals) -> int:
        """Wait for the last checkpoint, print the run directory and how to resume; the exit code."""
        self.engine.heartbeat.enter(Phase.SAVE)
        self._checkpointer.wait()
        if self._survivor is not None:
            self._survivor.copies.wait()
        self.engine.heartbeat.enter(Phase.END)
        # During training a failed save is retried by the next one. Here none follows, and exit code 0 would be wrong.
        if self._checkpointer.failure is not None:
            last, run = self._last_saved, self.directory.path
            retry = f"resume with --load {run}" if last else "start again with another --run-dir"
            problem = f"{self._checkpointer.failure}; the last checkpoint is {last or 'none'}"
            remedy = (
                "free disk space"
                if "No space left" in problem or "quota" in problem
                else f"make it possible to write to {run}"
            )
            raise DynmoError(f"{problem}: {remedy}, then {retry}")
        has_steps_left = self.step < self.config.training.train_iters
        if self.engine.world.is_rank0:
            print_message(f"run directory: {self.directory.path}")
            if signals.exit_code and has_steps_left:
                print_message(stop_line(self.directory.path, self.step, self.config.run.load, self._last_saved))
        # The exit code of a signal has priority over that of a model that is not finite.
        if self._finite_check.is_refused and not (has_steps_left and (signals.exit_code or signals.relaunch)):
            return self._end_not_finite()
        return EXIT_RELAUNCH if signals.relaunch and has_steps_left else signals.exit_code

    def _end_early(self, signal_handler: DistributedSignalHandler) -> int | None:
        """The exit code where the model must neither be saved nor trained on; None where the run continues."""
        code = self._roll_back()
        if code is None:
            return self._end_not_finite() if self._finite_check.is_over else None
        # What was received meanwhile must not be lost: the handler ends here. A resume finds the same spike.
        signals = signal_handler.at_boundary(self.engine.world)
        if self.rollback is not None and signals.exit:
            self.rollback = None
            return self._end(signals)
        return code

    def _roll_back(self) -> int | None:
        """Decide whether the run returns to its last checkpoint; its exit code then, with :attr:`rollback`."""
        is_due = self._spikes.found is not None or (self._spikes.is_rolling_back and self._finite_check.is_over)
        if not is_due:
            return None
        self._collect()
        self._checkpointer.wait()
        if self._last_saved is None:
            self._spikes.found = None
            self._log.line(f" no rollback after iteration {self.step}: no checkpoint was saved")
            return None
        skipped = self._finite_check.skipped
        rollback = self._spikes.rollback(step_of(Path(self._last_saved)), skipped, self._batches.skipped)
        if rollback.attempts > self._spikes.max_rollbacks:
            if self.engine.world.is_rank0:
                print_message(f"dynmo-train: error: {spikes_end_message(rollback, self._spikes.max_rollbacks)}")
            return EXIT_NOT_FINITE
        self.logger.log_incident(rollback.incident(skipped))
        self._log.line(f" {rollback.message}")
        self.rollback = rollback
        return EXIT_RELAUNCH

    def _end_not_finite(self) -> int:
        """End a run whose model is not finite; the exit code."""
        self._checkpointer.wait()
        if self.engine.world.is_rank0:
            print_message(f"dynmo-train: error: {end_message(self.step, self._finite_check, self._last_saved)}")
        return EXIT_NOT_FINITE

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.step % interval == 0

    def evaluate(self) -> int:
        """Evaluate on validation and test data without training; the exit code."""
        self._log_start()
        self._evaluations.warn_without_test_data()
        self._evaluations.validate(self.step)
        self._evaluations.test(self.step)
        return EXIT_OK

    def _is_resize_requested(self) -> bool:
        world = self.engine.world
        # Rank 0 alone reads the file, which other ranks could find in another state; the signals carry its answer.
        if not world.is_rank0:
            return False
        return self._resize_requests.is_pending(self.step, world.dims.pipeline) or self._join_requests.is_pending(
            self.step, world.size
        )

    def _batch_loader(self) -> BatchLoader:
        data, replica, context = self.data, self.engine.world.replica, self.engine.world.context_rank
        on_cuda, num_workers = self.engine.world.device.type == "cuda", self.config.data.num_workers
        # On CPU the workers would take cores from the training.
        workers = (2 if on_cuda else 0) if num_workers is None else num_workers
        # A stream is read in order: each of several workers would read and tokenize all of it.
        return BatchLoader(
            lambda consumed, step: data.train_shard(consumed, step, replica, context),
            lambda begin: self._batches.following(begin) - begin,
            self.config.training.train_iters,
            num_workers=min(workers, 1) if self.config.data.hf_dataset is not None else workers,
            pin_memory=on_cuda,
        )

    def train_step(self) -> None:
        """Train one step; log it, or on GPUs the one before."""
        self.step += 1
        self.engine.heartbeat.enter(Phase.DATA)
        waiting_from_ns = time.perf_counter_ns()
        batch = self._batch = self._loader.batch(self.consumed_samples, self.step)
        data_ns = time.perf_counter_ns() - waiting_from_ns
        size = self.config.batch_sizes.at(self.consumed_samples)
        # The first step after a rebuild allocates buffers; its times would mislead the planner.
        is_sampled = self.engine.is_warm and self.step % self.config.balance.profile_interval == 0
        self._waiting.append(
            UnloggedStep(
                step=self.step,
                size=size,
                tokens=batch.tokens or self.config.model.seq_length,
                consumed=self.consumed_samples,
                plan_id=self.controller.active_plan_id if self.controller is not None else self._initial_plan_id,
                problem=batch.problem,
                data_ns=data_ns,
            )
        )
        result = self.engine.launch_step(batch, sampled=is_sampled, advance=size)
        # Also the samples of a skipped update, which does not advance the learning-rate schedule.
        self.consumed_samples = self._batches.following(self.consumed_samples)
        if result is not None:
            self._finish(result)
        if self._needs_result():
            self._collect()
        self.engine.heartbeat.end_step()
        events = self.engine.after_step(self.step)
        self.engine.heartbeat.enter(Phase.BOUNDARY)
        if events:
            self._collect()
        for event in events:
            self.logger.log_technique_event(event)
            self._log.line(f" {event.message} after iteration {event.step}")

    def _needs_result(self) -> bool:
        """Whether something acts on the result of the last step at this boundary; equal on all ranks."""
        training, balance = self.config.training, self.config.balance
        acts = (
            self.step == training.train_iters
            # Before the run ends because of them, no further step is launched.
            or self._finite_check.skipped > 0
            or (training.eval_iters and self.step % training.eval_interval == 0)
            or (self.controller is not None and self.step % balance.rebalance_interval == 0)
            or (self._expert_rebalance is not None and self._expert_rebalance.is_due(self.step))
            or self._is_due(training.exit_interval)
            or self._is_due(self.config.run.save_interval)
            or self._is_due(self.config.run.peer_checkpoint_interval)
        )
        return bool(acts) or not self.defers_results or not self.engine.can_defer

    def _collect(self) -> None:
        """Wait for the step that was launched last, if its result was not read yet, and for its costs."""
        result = self.engine.collect()
        if result is not None:
            self._finish(result)
        self._log_costs()

    def _finish(self, result: StepResult) -> None:
        """Log the step that was launched first of those without a result, and check it."""
        launched = self._waiting.popleft()
        # One replica alone may have read an invalid token; its loss is not finite then, which all ranks know.
        if not math.isfinite(result.loss):
            raise_together(self.engine.world, launched.problem)
        # Of the step before: they were gathered while this one ran.
        self._log_costs()
        self._profiled = (launched, result)
        self._log_step(launched, result)
        if (problem := self._finite_check.after_step(launched.step, result)) and self.engine.world.is_rank0:
            detail = batch_detail(launched.consumed, launched.size, self.data.token_ranges(launched.consumed))
            self.logger.log_event("not_finite", problem, step=launched.step, **detail)
            self.logger.log_incident(not_finite_incident(problem, launched.step, result))
            self._log.line(f" {problem}")
        spike = self._spikes.after_step(launched, result)
        if spike is not None:
            self.logger.log_incident(spike_incident(spike, launched.step))
            self._log.line(f" {spike}")

    def _log_costs(self) -> None:
        """Write the profile record of the last result, if it has one that was not written yet."""
        if self._profiled is not None:
            (launched, result), self._profiled = self._profiled, None
            if result.costs is not None:
                # On GPUs the host runs ahead of the device: it waits for a batch while the device computes.
                data_ns = 0 if self.defers_results else launched.data_ns
                self._measured.log(launched.step, launched.plan_id, data_ns, result)

    def _log_step(self, launched: UnloggedStep, result: StepResult) -> None:
        step, size = launched.step, launched.size
        consumed = launched.consumed + size
        self.logger.log_metrics(
            step=step,
            consumed_train_samples=consumed,
            **result.losses,
            **result.counts,
            grad_norm=result.grad_norm,
            learning_rate=result.rate,
            **({} if result.decoupled_rate is None else {"decoupled_learning_rate": result.decoupled_rate}),
            loss_scale=result.loss_scale,
            updated=result.updated,
            step_ns=result.step_ns,
            tokens=size * launched.tokens,
            model_flops=self._flops(size, launched.tokens),
            global_batch_size=size,
            plan_id=launched.plan_id,
            **(self._survivor.copies.take_metrics() if self._survivor is not None else {}),
            **({"compression": result.compression} if result.compression else {}),
            **({"compiled_graphs": result.compiled_graphs} if self.config.training.torch_compile else {}),
        )
        self._log_compilation(step, result)
        self._log.log_step(step, consumed, size, launched.tokens, result)

    def _log_compilation(self, step: int, result: StepResult) -> None:
        """Log the graphs that were compiled since the last result: many steps with some waste time on shapes."""
        total = result.compiled_graphs
        if self.config.training.torch_compile and total > self._compiled_graphs:
            new, self._compiled_graphs = total - self._compiled_graphs, total
            message = f"torch.compile: compiled {new:,} graph{'s'[: new != 1]}; {total:,} so far"
            self.logger.log_event("compiled", message, step=step, graphs=new, total=total)
            self._log.line(f" {message} at iteration {step}")

    def _choose_compression(self, plan: AppliedPlan | None) -> None:
        """Let ``dynmo-plan`` choose the number of pipeline ranks that compress between replicas."""
        if self._compression_choice is None:
            return
        planned = plan.num_compressing_stages if plan is not None else None
        chosen = self._compression_choice.at_boundary(self.step, has_moved=plan is not None, planned=planned)
        if chosen is not None:
            self._log.line(f" {chosen} workers compress between replicas after iteration {self.step}")

    def _place_experts(self) -> None:
        if self._expert_rebalance is not None and (line := self._expert_rebalance.start(self.step)) is not None:
            self._log.line(f" {line} before iteration {self.step + 1}")

    def _move_experts(self, *, is_last: bool) -> None:
        moves = None if is_last else self._expert_rebalance
        if moves is not None and (line := moves.at_boundary(self.step)) is not None:
            self._log.line(f" {line} after iteration {self.step}")

    def _log_plan(self, plan: AppliedPlan) -> None:
        self._measured.expect(plan.plan_id, plan.predicted_ns)
        self._log.log_move(plan, self.step)
        if plan.released:
            self._log.line(f" {self.logger.log_release(self.step, plan.released)} after iteration {self.step}")
            self._log.devices = self.engine.world.size

    def _save(self) -> None:
        self.engine.heartbeat.enter(Phase.SAVE)
        batch = self._batch
        # Found in the result that was collected just now: the next boundary, or a resume, returns to the last one.
        if self._spikes.found is not None:
            self._log.line(f" no checkpoint after iteration {self.step}: loss spike in step {self._spikes.found}")
            return
        if batch is not None and (problem := self._finite_check.refusal(self.engine, self.step, batch)) is not None:
            self.logger.log_event("not_saved", problem, step=self.step)
            self._log.line(f" {problem}")
            return
        self._checkpointer.save(self._metadata())

    def _metadata(self) -> CheckpointMetadata:
        """The contents of a checkpoint that the engine does not know."""
        run = self.config.run
        return CheckpointMetadata(
            run_id=self.directory.run_id,
            step=self.step,
            consumed_train_samples=self.consumed_samples,
            consumed_valid_samples=self._evaluations.consumed,
            data_position=self._data_position(),
            source=self._source,
            data=data_properties(self.config),
            tokenizer=self._tokenizer.stored_files if self._tokenizer is not None else {},
            keep=run.keep_checkpoints,
            moments=not run.no_save_optim,
            loss_spikes=self._spikes.state(self._batches.skipped),
            base=self._base,
            options=self._options,
        )

    def _data_position(self) -> dict[str, Any]:
        """Where a resumed run continues to read streams of documents: split -> position; empty for indexed data."""
        if self._batch is None:
            return dict(self._start_position)
        position = self._batch.position
        return ({} if position is None else {"train": position}) | self.data.eval_positions()

    def _log_not_saved(self, step: int, problem: str) -> None:
        message = f"{problem}; training continues, and the next save retries"
        self.logger.log_event("not_saved", message, step=step)
        self._log.line(f" {message}")

    def _log_saved(self, saved: SavedCheckpoint) -> None:
        message = (
            f"saved {saved.path.name} in {saved.duration_s:.2f} s, training was paused for {saved.stalled_s:.2f} s"
        )
        self._last_saved = saved.path.name
        self.logger.log_event("checkpoint", message, step=saved.step, stalled_s=saved.stalled_s)
        self._log.line(f" saved checkpoint {saved.path} in {saved.duration_s:.2f} s")

    def close(self, exit_code: int | None) -> None:
        """Close the logs and end the processes that run in the background.

        Args:
            exit_code: exit code of the training; None after an error.
        """
        if exit_code is None:
            self._checkpointer.abandon()
        elif self.rollback is None and self.step < self.config.training.train_iters:
            if is_orphan(os.environ):
                self.logger.log_incident(launcher_death(socket.gethostname(), self.step))
            self.logger.log_stopped(self.step, exit_code)
        self._log.close(exit_code)
        if self.rollback is None:  # which begins another segment at once
            release(self.logger.run.lock)
        self._loader.close()
        if self._compression_choice is not None:
            self._compression_choice.close()
        if self.planner is not None:
            self.planner.stop()
