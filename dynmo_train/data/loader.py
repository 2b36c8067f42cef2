"""Training batches of one replica, built ahead of time.

    step, consumed --BatchLoader.batch--> RunData.train_shard in a worker process --pinned--> Batch of this replica

A batch is a function of the step and of the consumed samples, so that the workers have no state: another order of
requests, a resume, or another number of workers gives the same batches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from ..launch.process_view import end_with_parent
from .batch import Batch

_ENDED = (EOFError, ConnectionError)

Position = tuple[int, int]
"""Consumed samples and step."""

PREFETCHED = 2
"""Batches that each worker builds ahead; memory: number of workers x this x the size of a replica's batch."""


def _start_worker(trainer: int, _worker: int) -> None:
    """Let a worker end with the training process ``trainer``, and without a stack if it sends a batch meanwhile.

    The thread of ``multiprocessing.resource_sharer`` prints every error by this hook, which the worker has inherited.
    """
    end_with_parent(trainer)
    inherited = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, _ENDED):
            inherited(kind, error, trace)

    sys.excepthook = hook


class _Shards(Dataset[Batch]):
    """The batches by their positions, as torch's ``DataLoader`` asks for them."""

    def __init__(self, shard: Callable[[int, int], Batch]) -> None:
        self._shard = shard

    def __getitem__(self, position: Any) -> Batch:
        return self._shard(*position)


class _Positions:
    """The positions from a first one on."""

    def __init__(self, first: Position, advance: Callable[[int], int], last_step: int) -> None:
        self._first, self._advance, self._last_step = first, advance, last_step

    def __iter__(self) -> Iterator[Position]:
        consumed, step = self._first
        while step <= self._last_step:
            yield consumed, step
            consumed, step = consumed + self._advance(consumed), step + 1

    def __len__(self) -> int:
        return self._last_step - self._first[1] + 1


class BatchLoader:
    """Reads batches in order; a request out of order starts again from there.

    Args:
        shard: returns this replica's batch by consumed samples and step.
        advance: number of samples of the batch after ``consumed`` samples.
        last_step: last step of the run.
        num_workers: number of processes that build batches; 0 builds them in this process when they are requested.
        pin_memory: whether batches lie in page-locked memory, from which a GPU copies asynchronously.
    """

    def __init__(
        self,
        shard: Callable[[int, int], Batch],
        advance: Callable[[int], int],
        last_step: int,
        *,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self._shard, self._advance, self._last_step = shard, advance, last_step
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._next: Position | None = None
        self._batches: Iterator[Batch] | None = None

    def batch(self, consumed: int, step: int) -> Batch:
        """The batch of ``step``, after ``consumed`` samples.

        Raises:
            SampleError: a single replica's samples cannot be used, without workers; else all ranks raise it together
                after the step, see ``Batch.problem``.
        """
        if not self._num_workers:
            batch = self._shard(consumed, step)
            return batch.pin_memory() if self._pin_memory else batch
        if self._batches is None or self._next != (consumed, step):
            self._batches = iter(self._loader((consumed, step)))
        batch = next(self._batches)
        self._next = consumed + self._advance(consumed), step + 1
        return batch

    def _loader(self, first: Position) -> DataLoader[Batch]:
        return DataLoader(
            _Shards(self._shard),
            batch_size=None,
            sampler=_Positions(first, self._advance, self._last_step),
            num_workers=self._num_workers,
            prefetch_factor=PREFETCHED,
            pin_memory=self._pin_memory,
            # The data sets are memory-mapped: a forked worker shares their pages, and nothing is pickled.
            multiprocessing_context="fork",
            worker_init_fn=partial(_start_worker, os.getpid()),
        )

    def close(self) -> None:
        """End the workers."""
        self._batches = self._next = None
