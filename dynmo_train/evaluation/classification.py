"""Accuracy of a fine-tuned model on data sets of its task, on any layout of the processes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.errors import UsageError
from ..config.evaluation import ClassifyConfig, InferenceConfig
from ..config.task_command import check_model_flags
from ..data.batch import Batch
from ..data.finetune_dataset import TASKS, PairData, build_pairs
from ..models.bert_tasks import HITS, task_of_manifest
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World
from ..trainer.engine import Engine
from .forward_engine import Source, forward_engine, open_source, tokenizer_of
from .scoring import MICROBATCHES_PER_STAGE
from .zeroshot import window_length


@dataclass(frozen=True, kw_only=True)
class TaskAccuracy:
    """Right answers by data set: (name, right, all)."""

    counts: tuple[tuple[str, int, int], ...]

    @property
    def total(self) -> tuple[int, int]:
        """Right and all, over the data sets."""
        return sum(right for _, right, _ in self.counts), sum(every for _, _, every in self.counts)

    def document(self) -> dict[str, Any]:
        """For ``--format json``."""
        right, every = self.total
        sets = [{"name": n, "correct": r, "items": e, "accuracy": r / e} for n, r, e in self.counts]
        return {"data": sets, "correct": right, "items": every, "accuracy": right / every}

    def lines(self, epoch: int) -> list[str]:
        """In Megatron's words."""
        told = [
            f" > |epoch: {epoch}| metrics for {name}: correct / total = {right} / {every} = {100 * right / every:.4f} %"
            for name, right, every in self.counts
        ]
        right, every = self.total
        ratio = 100 * right / every
        return [*told, f" >> |epoch: {epoch}| overall: correct / total = {right} / {every} = {ratio:.4f} %"]


def data_paths(flag: str, text: str) -> list[str]:
    """The words of an option with one or more paths, quoted as in a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}") from error
    if not words:
        raise UsageError(f"{flag} names no data")
    return words


def accuracy(engine: Engine, sets: Sequence[PairData], *, micro_batch: int, step: int) -> TaskAccuracy:
    """The accuracy on each of some data sets; every process calls this."""
    dims, counts = engine.world.dims, []
    for data in sets:
        most = MICROBATCHES_PER_STAGE * dims.pipeline if dims.pipeline > 1 else 1
        microbatches = min(most, -(-len(data) // (micro_batch * dims.data)))
        size = microbatches * micro_batch * dims.data
        right = 0
        for begin in range(0, len(data), size):
            chosen = range(begin, min(begin + size, len(data)))
            batch = Batch(
                inputs=data.tensors(chosen, size),
                first_microbatch=begin // micro_batch,
                step=step,
                microbatches=microbatches,
            )
            right += int(engine.score(batch, (HITS,))[HITS].sum())
        counts.append((data.name, right, len(data)))
    return TaskAccuracy(counts=tuple(counts))


def task_source(task: str, place: InferenceConfig, world: World) -> Source:
    """The checkpoint of ``--load``; raises ``UsageError`` where it was not fine-tuned for ``task``."""
    source = open_source(Path(place.load), place, world)
    if task_of_manifest(source.model) != TASKS[task].head:
        raise UsageError(
            f"{source.checkpoint.directory} holds no model that was fine-tuned for {task}; make one with dynmo-train"
            f" finetune {task} --pretrained-checkpoint {place.load}"
        )
    return source


def evaluate_task(
    name: str, place: InferenceConfig, task: ClassifyConfig, world: World, told: Mapping[str, Any]
) -> TaskAccuracy:
    """The accuracy of a fine-tuned model; every process calls this and gets the same.

    Raises:
        UsageError: the data, the tokenizer or the checkpoint cannot be used.
    """
    source = task_source(name, place, world)
    run_on_all_ranks(world, lambda: check_model_flags(told, source.model, source.checkpoint.directory))

    def prepare() -> tuple[list[PairData], int]:
        length = window_length(source, task.seq_length)
        tokenizer = tokenizer_of(source, place)
        paths = data_paths("--valid-data", task.valid_data)
        return [build_pairs(name, path, tokenizer, length) for path in paths], length

    sets, length = run_on_all_ranks(world, prepare)
    rows = place.micro_batch_size * TASKS[name].rows
    engine = forward_engine(source, place, world, tokens=length, rows=rows, wrap=lambda family: family)
    return accuracy(engine, sets, micro_batch=place.micro_batch_size, step=0)
