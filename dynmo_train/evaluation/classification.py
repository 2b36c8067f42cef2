"""Accuracy of a fine-tuned BERT on the validation sets of its task, with the same result in every parallel layout."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.errors import UsageError
from ..config.sections.evaluation import ClassifyConfig, InferenceConfig
from ..config.task_command import check_model_flags
from ..data.batch import Batch
from ..data.finetune_dataset import TASKS, PairData, build_pairs
from ..models.families.bert_tasks import HITS, task_of_manifest
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World
from .forward_engine import load_forward_engine
from .model_checkpoint import ModelCheckpoint, model_tokenizer, open_model
from .scoring import SampleScorer, microbatches_per_replica


@dataclass(frozen=True, kw_only=True)
class TaskAccuracy:
    """Correct predictions per data set: (name, correct, samples)."""

    counts: tuple[tuple[str, int, int], ...]

    @property
    def total(self) -> tuple[int, int]:
        """Correct predictions and samples, over all data sets."""
        return sum(correct for _, correct, _ in self.counts), sum(samples for _, _, samples in self.counts)

    def document(self) -> dict[str, Any]:
        """The object that ``--format json`` prints."""
        correct, samples = self.total
        sets = [{"name": n, "correct": c, "items": s, "accuracy": c / s} for n, c, s in self.counts]
        return {"data": sets, "correct": correct, "items": samples, "accuracy": correct / samples}

    def lines(self, epoch: int) -> list[str]:
        """The log lines after ``epoch`` epochs, in Megatron's format."""
        rows = [(f" > |epoch: {epoch}| metrics for {name}", correct, samples) for name, correct, samples in self.counts]
        rows.append((f" >> |epoch: {epoch}| overall", *self.total))
        return [f"{head}: correct / total = {c} / {n} = {100 * c / n:.4f} %" for head, c, n in rows]


def split_paths(flag: str, text: str) -> list[str]:
    """Paths of an option, separated by spaces and quoted as in a shell.

    Raises:
        UsageError: there are none, or a quote is not closed.
    """
    try:
        paths = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}; quote paths as in a shell") from error
    if not paths:
        raise UsageError(f"{flag}: must be one or more paths, is empty")
    return paths


def measure_accuracy(engine: SampleScorer, sets: Sequence[PairData], *, micro_batch: int, step: int) -> TaskAccuracy:
    """The accuracy on each data set; all ranks call this and get the same result.

    Args:
        engine: the forward engine, or the training engine during fine-tuning.
        sets: the data sets.
        micro_batch: samples per microbatch.
        step: training step, which seeds the random numbers.
    """
    dims, counts = engine.world.dims, []
    for data in sets:
        microbatches = microbatches_per_replica(dims, len(data), micro_batch)
        size = microbatches * micro_batch * dims.data
        correct = 0
        for begin in range(0, len(data), size):
            samples = range(begin, min(begin + size, len(data)))
            # Filled up to ``size`` with unlabelled samples: the shape of a microbatch is static over the stages.
            batch = Batch(
                inputs=data.tensors(samples, size),
                first_microbatch=begin // micro_batch,
                step=step,
                microbatches=microbatches,
            )
            # Samples of padding have no label, so they are never a hit.
            correct += int(engine.score(batch, (HITS,))[HITS].sum())
        counts.append((data.name, correct, len(data)))
    return TaskAccuracy(counts=tuple(counts))


def evaluate_task(
    name: str, inference: InferenceConfig, task: ClassifyConfig, world: World, model_flags: Mapping[str, Any]
) -> TaskAccuracy:
    """The accuracy of a fine-tuned model; all ranks call this and get the same result.

    Args:
        name: ``mnli`` or ``race``.
        inference: the model and the ranks that run it.
        task: the validation sets.
        world: the process groups.
        model_flags: the model's shape as the command line states it.

    Raises:
        UsageError: the data, the tokenizer or the checkpoint cannot be used.
    """
    source = open_model(Path(inference.load), inference, world)
    run_on_all_ranks(world, lambda: _check_task(name, source, inference, model_flags))

    def prepare() -> tuple[list[PairData], int]:
        length = source.window_length(task.seq_length)
        tokenizer = model_tokenizer(source, inference)
        paths = split_paths("--valid-data", task.valid_data)
        return [build_pairs(name, path, tokenizer, length) for path in paths], length

    sets, length = run_on_all_ranks(world, prepare)
    rows = inference.micro_batch_size * TASKS[name].rows
    engine = load_forward_engine(source, inference, world, tokens=length, rows=rows)
    return measure_accuracy(engine, sets, micro_batch=inference.micro_batch_size, step=0)


def _check_task(name: str, source: ModelCheckpoint, inference: InferenceConfig, model_flags: Mapping[str, Any]) -> None:
    if task_of_manifest(source.model) != TASKS[name].head:
        raise UsageError(
            f"{source.directory} contains no model fine-tuned for {name}; make one with dynmo-train finetune {name}"
            f" --pretrained-checkpoint {inference.load}"
        )
    check_model_flags(model_flags, source.model, source.directory)
