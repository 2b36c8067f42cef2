"""Fine-tuning of a BERT on a task: epochs over its training data, and the validation accuracy after each.

    --pretrained-checkpoint --weights; a new head--> Engine --train_step over epochs--> checkpoints, metrics.jsonl
                                                       +--measure_accuracy after each epoch--> log

The steps are those of training; only the batches, the head and the evaluation are the task's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._common.console import print_message
from .._common.document import short_repr
from .._common.errors import EXIT_OK, EXIT_RELAUNCH, DynmoError, UsageError
from .._common.streams import keep_running
from ..config import Config
from ..config.sections.evaluation import FinetuneConfig
from ..data.batch import Batch
from ..data.finetune_dataset import TASKS, PairData, build_pairs, join_pairs
from ..data.tokenizer import TokenizerFiles, open_tokenizer
from ..formats.checkpoint import Checkpoint
from ..launch.exit_status import EXIT_NOT_FINITE
from ..launch.failure_record import recording_failure
from ..models.families.bert import Bert
from ..models.families.bert_tasks import BertTask
from ..models.layer_list import BoundaryShape, parameters_of
from ..models.registry import family_of
from ..optim.item_state import ItemState
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World, destroy_world
from ..parallel.seeding import stable_seed
from ..trainer.checkpoint.async_checkpoint import Checkpointer, SavedCheckpoint
from ..trainer.checkpoint.engine_checkpoint import check_same_model, state_reader
from ..trainer.checkpoint.load_checkpoint import checkpoint_to_load
from ..trainer.checkpoint.metadata import CheckpointMetadata
from ..trainer.checkpoint.model_keys import RECORDS
from ..trainer.checkpoint.unread_tensors import check_all_weights_are_read
from ..trainer.engine import Engine
from ..trainer.failures import lost_another_rank
from ..trainer.fingerprint import checkpoint_properties, config_properties, join_same, option_properties, require_same
from ..trainer.finite_check import FiniteCheck, end_message
from ..trainer.garbage_collection import freeze_imports
from ..trainer.monitoring.profile_writer import RunLogger
from ..trainer.monitoring.scalar_writers import check_clients, scalar_writers_on_rank0
from ..trainer.monitoring.training_log import TrainingLog, complete_line, run_argument_lines, stop_line
from ..trainer.run_directory import RunDirectory, open_run_directory_on_rank0, rotations
from ..trainer.settings_from_config import (
    engine_settings,
    flops_counter,
    initial_partition,
    parallel_dims,
    parameter_counts,
)
from ..trainer.setup import continued_checkpoint, progress_of
from ..trainer.signals import BoundarySignals, DistributedSignalHandler
from .classification import measure_accuracy, split_paths

# Keys of a manifest's ``model`` that may differ where the head differs.
_HEAD_KEYS = frozenset({"task_head", "num_classes", "binary_head", "tied_embeddings"})


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochOrder:
    """The order of the samples: each epoch is another permutation of all samples.

    Attributes:
        samples: number of samples in an epoch.
        seed: seed of the permutations.
    """

    samples: int
    seed: int

    def sample_indices(self, begin: int, end: int) -> list[int]:
        """Samples at positions ``[begin, end)`` of the sequence of all epochs."""
        return [int(self._order(at // self.samples)[at % self.samples]) for at in range(begin, end)]

    @cached_property
    def _orders(self) -> dict[int, np.ndarray[Any, np.dtype[np.int64]]]:
        return {}

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if epoch not in self._orders:
            # Steps read epochs in order, so one permutation is enough.
            self._orders.clear()
            random = np.random.default_rng(stable_seed(self.seed, "epoch", epoch))
            self._orders[epoch] = random.permutation(self.samples)
        return self._orders[epoch]


def count_samples(task: str, options: FinetuneConfig) -> int:
    """The number of training samples; 0 without ``--train-data``.

    Raises:
        UsageError: a data set cannot be read or is not in the format of ``task``.
    """
    if options.train_data is None:
        return 0
    return sum(len(TASKS[task].read(Path(path))) for path in split_paths("--train-data", options.train_data))


def pretrained_state_reader(engine: Engine, checkpoint: Checkpoint, world: World) -> Callable[[str], ItemState]:
    """Return a function that reads one item's weights; weights that only the new head has are initialized.

    Args:
        engine: the engine to be restored.
        checkpoint: a checkpoint of the same model, with any head.
        world: the process groups.

    Raises:
        UsageError: the checkpoint contains another model.
    """
    stored, expected = checkpoint.manifest["model"], engine.family.manifest()
    different = [
        f"{key} is {short_repr(stored.get(key))} there and {value!r} here"
        for key, value in expected.items()
        if key not in _HEAD_KEYS | RECORDS and stored.get(key) != value
    ]
    if different:
        raise UsageError(
            f"--pretrained-checkpoint {checkpoint.directory}: must be of the same model; {'; '.join(different)}"
        )
    read_item = state_reader(checkpoint, engine.item_store, world, moments=False)

    def read(item: str) -> ItemState:
        names = list(parameters_of(item, engine.item_store.blueprint(item)))
        if all(checkpoint.has(name) for name in names):
            return read_item(item)
        initial = parameters_of(item, engine.family.build(item, torch.device("cpu")))
        tensors = {
            name: engine.item_store.sharding.local_from_checkpoint(
                name, checkpoint.load([name])[name] if checkpoint.has(name) else initial[name].detach()
            ).to(world.device)
            for name in names
        }
        return ItemState(tensors=tensors, steps={})

    return read


@dataclass(frozen=True, kw_only=True)
class _InitialModel:
    engine: Engine
    directory: RunDirectory
    step: int
    source: Mapping[str, Any] | None
    last_saved: str | None


class FinetuneRun:
    """A fine-tuning run on this rank.

    Args:
        name: ``mnli`` or ``race``.
        config: the options of ``pretrain bert``.
        options: the task's data and the pretrained checkpoint.
        world: the process groups.

    Raises:
        UsageError: the data, the tokenizer, the options or a checkpoint cannot be used.
    """

    def __init__(self, name: str, config: Config, options: FinetuneConfig, world: World) -> None:
        self.name, self.config, self.world = name, config, world
        self.batch = config.training.global_batch_size
        files = TokenizerFiles.of(vars(config.data))

        def read() -> tuple[PairData | None, list[PairData]]:
            """Training data, None without ``--train-data``, and the validation data sets.

            Raises:
                UsageError: the tokenizer is missing or too large for the model, or a data set cannot be read.
            """
            if files is None:
                raise UsageError("fine-tuning needs the model's tokenizer; give --tokenizer-model or --vocab-file")
            tokenizer, length = open_tokenizer(files), config.model.seq_length
            if tokenizer.vocab_size > config.model.vocab_size:
                raise UsageError(
                    f"--vocab-size {config.model.vocab_size}: must be at least {tokenizer.vocab_size}, the"
                    " number of ids of the tokenizer; give the model's own tokenizer"
                )
            valid = [
                build_pairs(name, path, tokenizer, length) for path in split_paths("--valid-data", options.valid_data)
            ]
            if options.train_data is None:
                return None, valid
            paths = split_paths("--train-data", options.train_data)
            return join_pairs([build_pairs(name, path, tokenizer, length) for path in paths]), valid

        # Before anything that takes time; rank 0 alone needs the clients.
        run_on_all_ranks(world, lambda: check_clients(config) if world.is_rank0 else None)
        self.train_data, self.valid_data = run_on_all_ranks(world, read)
        self.files = files
        self.check = FiniteCheck.of(config.training)
        start = self._begin(options)
        self.engine, self.directory, self.step = start.engine, start.directory, start.step
        self.source, self.last_saved = start.source, start.last_saved
        self.logger = RunLogger(start.directory, world, *rotations(config))
        writers = scalar_writers_on_rank0(world, config, start.directory, start.step)
        self.log = TrainingLog(config, world, flops_counter(config, self.engine.family), writers)
        self.checkpoints = Checkpointer(
            self.engine,
            start.directory.checkpoints,
            async_save=config.run.async_save,
            on_saved=self._saved,
            on_failure=self._not_saved,
        )

    def _begin(self, options: FinetuneConfig) -> _InitialModel:
        config, world, task = self.config, self.world, TASKS[self.name]
        base = family_of(config)
        if not isinstance(base, Bert):
            raise UsageError("finetune: the model must be a BERT without dynamic layers; leave their flags out")
        family = BertTask(base.shape, task.head)
        settings = run_on_all_ranks(world, lambda: engine_settings(config))
        boundary = BoundaryShape.hidden(
            batch=config.training.micro_batch_size * task.rows,
            tokens=config.model.seq_length,
            width=config.model.hidden_size,
            dtype=settings.pipeline.boundary.dtype,
        )
        settings = replace(settings, pipeline=replace(settings.pipeline, boundary=boundary))
        resumed = run_on_all_ranks(world, lambda: checkpoint_to_load(config, world))
        run = replace(config.run, load=options.pretrained_checkpoint, no_load_optim=True)
        pretrained = run_on_all_ranks(world, lambda: checkpoint_to_load(replace(config, run=run), world))
        require_same(
            world, {**checkpoint_properties(resumed), **checkpoint_properties(pretrained, "--pretrained-checkpoint")}
        )
        if options.pretrained_checkpoint is not None and pretrained is None:
            raise UsageError(f"--pretrained-checkpoint {options.pretrained_checkpoint}: contains no checkpoint")
        # Not the partition of the pretrained checkpoint, whose items are those of another head.
        engine = Engine(family, settings, initial_partition(config, family, None), world)
        step = run_on_all_ranks(world, lambda: self._weights(engine, resumed, pretrained))
        properties = {"device": world.device.type, "task": self.name, "finetune": vars(options)}
        directory = open_run_directory_on_rank0(world, config, hosts=[world.host], engine=properties)
        return _InitialModel(
            engine=engine,
            directory=directory,
            step=step,
            last_saved=continued_checkpoint(resumed, directory, step),
            source=next((each.manifest.get("source") for each in (resumed, pretrained) if each is not None), None),
        )

    def _weights(self, engine: Engine, resumed: Checkpoint | None, pretrained: Checkpoint | None) -> int:
        """Load the weights into the engine, and return the step to resume after."""
        if resumed is not None:
            check_same_model(resumed, engine.family)
            check_all_weights_are_read(resumed, engine.item_store, self.world)
            step, consumed = int(resumed.manifest["step"]), int(resumed.manifest["consumed_train_samples"])
            # Samples are addressed by step * batch, so another batch size would repeat or skip some.
            if consumed != step * self.batch:
                raise UsageError(
                    f"--global-batch-size {self.batch}: must stay the same over a run, which consumed {consumed:,}"
                    f" samples in {step:,} steps; give --global-batch-size {consumed // max(1, step)}"
                )
            moments = not self.config.run.no_load_optim
            reader = state_reader(resumed, engine.item_store, self.world, moments=moments)
            engine.restore(reader, step, **progress_of(resumed.manifest))
            return step
        # ``--load`` has priority: a restarted run has the same command line, with the pretrained checkpoint.
        if pretrained is not None:
            engine.restore(pretrained_state_reader(engine, pretrained, self.world), 0)
        else:
            engine.build()
        return 0

    def run(self) -> int:
        """Run the remaining steps, evaluate after each epoch, save at the end; returns the exit code.

        Raises:
            DynmoError: the last checkpoint could not be written.
        """
        config, data = self.config, self.train_data
        last = config.training.train_iters if data is not None else 0
        if last and self.step >= last:
            if self.world.is_rank0:
                print_message(complete_line(self.directory.path, self.step, f"--epochs gives {last:,}; raise --epochs"))
            return EXIT_OK
        signals = BoundarySignals()
        if data is None:
            self.measure(0)
        else:
            self.log.log_start(
                self.engine.partition,
                self.step + 1,
                parameter_counts(self.engine),
                run_argument_lines(self.config, self.directory),
            )
            with DistributedSignalHandler(None) as signal_handler:
                signals = self._train(data, last, signal_handler)
        self.checkpoints.wait()
        if self.checkpoints.failure is not None:
            raise DynmoError(f"{self.checkpoints.failure}; the last checkpoint is {self.last_saved or 'none'}")
        if self.world.is_rank0:
            print_message(f"run directory: {self.directory.path}")
            if signals.exit_code and self.step < last:
                print_message(stop_line(self.directory.path, self.step, config.run.load, self.last_saved))
            if self._is_not_finite(last):
                print_message(f"dynmo-train: error: {end_message(self.step, self.check, self.last_saved)}")
        if self._is_not_finite(last):
            return EXIT_NOT_FINITE
        exit_code = EXIT_RELAUNCH if signals.relaunch and self.step < last else signals.exit_code
        if self.step < last:
            self.logger.log_stopped(self.step, exit_code)
        return exit_code

    def _is_not_finite(self, last: int) -> bool:
        """Whether the run ends with weights or a loss that are not finite."""
        return self.check.is_over or (self.check.is_refused and self.step >= last)

    def _train(self, data: PairData, last: int, signal_handler: DistributedSignalHandler) -> BoundarySignals:
        """Run steps up to ``last``, or until a signal ends the run; returns the signals of the last boundary."""
        order = EpochOrder(samples=len(data), seed=self.config.training.seed)
        interval = self.config.run.save_interval
        signals = BoundarySignals()
        while self.step < last and not signals.exit:
            self._step(data, order)
            # Before evaluation and checkpoint, which would be of a broken model.
            if self.check.is_over:
                break
            epoch, before = (steps * self.batch // len(data) for steps in (self.step, self.step - 1))
            if epoch > before or self.step == last:
                # The last epoch is incomplete where a batch does not divide it.
                self.measure(-(-self.step * self.batch // len(data)) if self.step == last else epoch)
            signals = signal_handler.at_boundary(self.world)
            due = interval is not None and self.step % interval == 0
            if self.step == last or due or signals.save or signals.exit:
                self._save()
        return signals

    def _step(self, data: PairData, order: EpochOrder) -> None:
        """Run one optimizer step, and record it."""
        begin = self.step * self.batch
        self.step += 1
        batch = self._batch = Batch(
            inputs=data.tensors(order.sample_indices(begin, self.step * self.batch)),
            first_microbatch=begin // self.config.training.micro_batch_size,
            step=self.step,
        )
        # Not profiled: a fine-tuning run has no planner, and its partition stays.
        result = self.engine.train_step(batch, sampled=False, advance=self.batch)
        if (problem := self.check.after_step(self.step, result)) is not None:
            # The samples have no place in an indexed data set; their indices into --train-data identify them.
            numbers = [int(number) for number in order.sample_indices(begin, self.step * self.batch)]
            self.logger.log_event(
                "not_finite", problem, step=self.step, samples=[begin, self.step * self.batch], train_data=numbers
            )
            self.log.line(f" {problem}")
        for event in self.engine.after_step(self.step):
            self.logger.log_technique_event(event)
        self.logger.log_metrics(
            step=self.step,
            consumed_train_samples=self.step * self.batch,
            **result.losses,
            grad_norm=result.grad_norm,
            learning_rate=result.rate,
            step_ns=result.step_ns,
        )
        self.log.log_step(self.step, self.step * self.batch, self.batch, self.config.model.seq_length, result)
        self.checkpoints.at_boundary()

    def measure(self, epoch: int) -> None:
        """Log and record the accuracy on the validation sets after ``epoch`` epochs."""
        result = measure_accuracy(
            self.engine, self.valid_data, micro_batch=self.config.training.micro_batch_size, step=self.step
        )
        for line in result.lines(epoch):
            self.log.line(line)
        self.logger.log_metrics(step=self.step, epoch=epoch, validation=result.document())

    def _save(self) -> None:
        if (problem := self.check.refusal(self.engine, self.step, self._batch)) is not None:
            self.logger.log_event("not_saved", problem, step=self.step)
            self.log.line(f" {problem}")
            return
        run = CheckpointMetadata(
            run_id=self.directory.run_id,
            step=self.step,
            consumed_train_samples=self.step * self.batch,
            source=self.source,
            data={
                "seed": self.config.training.seed,
                "split": "1",
                "sequence_length": self.config.model.seq_length,
                "prefix": self.config.data.name,
            },
            class_names=TASKS[self.name].class_names,
            tokenizer=self.files.stored_files if self.files is not None else {},
            keep=self.config.run.keep_checkpoints,
            moments=not self.config.run.no_save_optim,
        )
        self.checkpoints.save(run)

    def _not_saved(self, step: int, problem: str) -> None:
        message = f"{problem}; training continues, and the next save retries"
        self.logger.log_event("not_saved", message, step=step)
        self.log.line(f" {message}")

    def _saved(self, saved: SavedCheckpoint) -> None:
        self.last_saved = saved.path.name
        message = f"saved {saved.path.name} in {saved.duration_s:.2f} s"
        self.logger.log_event("checkpoint", message, step=saved.step)
        self.log.line(f" saved checkpoint {saved.path} in {saved.duration_s:.2f} s")


def run_finetune(name: str, config: Config, options: FinetuneConfig) -> int:
    """Fine-tune on this rank; returns the exit code.

    Args:
        name: ``mnli`` or ``race``.
        config: the options of ``pretrain bert``.
        options: the task's data and the pretrained checkpoint.

    Raises:
        UsageError: the data, the tokenizer, the options or a checkpoint cannot be used.
        DynmoError: the last checkpoint could not be written.
    """
    freeze_imports()
    keep_running("stdout")  # as in ``run_pretrain``
    torch.set_num_threads(config.training.num_threads)
    world = join_same(
        config.training.device,
        parallel_dims(config),
        lambda: {**config_properties(config), **option_properties(options)},
    )
    try:
        run, exit_code = FinetuneRun(name, config, options, world), None
        try:
            with recording_failure(os.environ, lost_another_rank):
                exit_code = run.run()
        finally:
            run.log.close(exit_code)
        return exit_code
    finally:
        destroy_world()
