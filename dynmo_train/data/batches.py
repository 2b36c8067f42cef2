"""Training, validation and test batches of a run, as functions of the consumed samples and the step.

    --data-path, --split --open_split--> Dataset or BlendedDataset --batch(range)--> rows --to_tensors--> Batch

In training a rank reads its replica's samples only, and of those its context-parallel rank's tokens, ahead of time
(``loader.py``); in an evaluation it reads the whole batch, and the engine takes its shard. There is no state: a resumed
run, or one on another number of ranks, continues with the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .._common.console import print_message
from .._common.errors import UsageError
from ..config import Config
from ..config.batch_schedule import BatchPositions
from ..config.sections.data import Blend
from ..formats.indexed import FORMS, MAGIC, IndexedDataset, open_indexed
from . import mock
from .batch import Batch
from .blend import BlendedDataset, samples_per_dataset
from .hf_stream import HfDataset, open_hf_dataset
from .provenance import check_vocabulary
from .registry import sample_format
from .sample_format import SPLITS, Dataset, Int64Array, SampleError, Split, SplitBuilder, SplitRequest, read_columns

ALL_DOCUMENTS = (1.0, 0.0, 0.0)
OpenSource = Callable[[str], IndexedDataset]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data sets of a run.

    Attributes:
        config: the run's options.
        train: training samples.
        valid: validation samples; None without ``--eval-iters``.
        test: test samples; None where no test is configured or possible.
        no_test: why the test split, which has a share of ``--split``, makes no batch.
    """

    config: Config
    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    no_test: str | None = None

    def train_shard(self, consumed: int, step: int, replica: int, context_rank: int = 0) -> Batch:
        """One replica's shard of the batch of training step ``step``, after ``consumed`` samples.

        With context parallelism it has the tokens of the context-parallel rank ``context_rank`` only. With several
        replicas, or in a worker process, samples that cannot be used do not raise, since the others would
        wait for this replica: the batch has a ``problem`` then, and samples of the first id.

        Raises:
            SampleError: the samples cannot be used, with one replica.
        """
        replicas, curriculum = self.config.parallel.data_parallel_size, self.config.curriculum
        share = self.config.batch_sizes.at(consumed) // replicas
        begin, tokens = consumed + replica * share, curriculum.at(step) if curriculum is not None else None
        size = self.config.parallel.context_parallel_size
        try:
            if size > 1 and tokens is None and sample_format(self.config).is_local(self.config):
                shard = self._context_shard(range(begin, begin + share), step, context_rank)
            else:
                shard = self._batch(self.train, begin, share, step, tokens, replicas=1)
        except SampleError as error:
            if replicas * size == 1 and get_worker_info() is None:
                raise
            rows_NC = np.zeros((share, sample_format(self.config).num_columns(self.config)), dtype=np.int64)
            shard = replace(self._batch_of_rows(rows_NC, begin, step, tokens, replicas=1), problem=str(error))
        shard = shard.of_context(context_rank, size, shard.microbatches or 1)
        position = self.train.position() if isinstance(self.train, HfDataset) else None
        return replace(shard, replica=replica, position=position)

    def _context_shard(self, samples: range, step: int, rank: int) -> Batch:
        """The tokens of one context-parallel rank; no others are read, apart from the label of each chunk's last."""
        size, seq_length = self.config.parallel.context_parallel_size, self.config.model.seq_length
        chunk, to_tensors = seq_length // (2 * size), sample_format(self.config).to_tensors
        chunks = (rank, 2 * size - 1 - rank)
        columns = np.concatenate([np.arange(first * chunk, (first + 1) * chunk + 1) for first in chunks])
        rows_NC = read_columns(self.train, samples, columns)
        parts = [to_tensors(self.config, each) for each in np.split(rows_NC, 2, axis=1)]
        micro_batch = self.config.training.micro_batch_size
        return Batch(
            inputs={name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]},
            first_microbatch=samples.start // micro_batch,
            step=step,
            microbatches=len(samples) // micro_batch,
            context=rank,
        )

    def eval_positions(self) -> dict[str, Any]:
        """Where the next evaluation reads, for a checkpoint: split -> position; empty for indexed data sets."""
        return {"valid": self.valid.position()} if isinstance(self.valid, HfDataset) else {}

    def token_ranges(self, consumed: int) -> list[list[dict[str, Any]]]:
        """Where each sample of the batch after ``consumed`` samples comes from; see ``Dataset.token_ranges``."""
        return self.train.token_ranges(range(consumed, consumed + self.config.batch_sizes.at(consumed)))

    def eval_batch(self, split: Split, consumed: int, step: int) -> Batch:
        """A validation or test batch after ``consumed`` samples of the split: global batch size, all tokens.

        After the last complete batch the first one follows again.

        Args:
            split: which split.
            consumed: samples of the split that were consumed before.
            step: step of the run; it seeds random numbers.

        Raises:
            UsageError: the run has no data for the split.
        """
        data = {"train": self.train, "valid": self.valid, "test": self.test}[split]
        if data is None:
            raise UsageError(f"no data for the {split} split; give --{split}-data-path, or --eval-iters 0")
        size = self.config.training.global_batch_size
        begin = consumed % (len(data) // size * size)
        begin -= begin % size  # an earlier start of the run may have had another batch size
        return self._batch(data, begin, size, step, None)

    def _batch(
        self, data: Dataset, begin: int, size: int, step: int, tokens: int | None, replicas: int | None = None
    ) -> Batch:
        return self._batch_of_rows(data.batch(range(begin, begin + size)), begin, step, tokens, replicas)

    def _batch_of_rows(
        self, rows_NC: Int64Array, begin: int, step: int, tokens: int | None, replicas: int | None = None
    ) -> Batch:
        """A batch of ``replicas``, by default all of the run, from rows int64 ``[N, C]``."""
        # A curriculum reads the beginning of each sample; one more token is the label of the last one.
        if tokens is not None:
            rows_NC = rows_NC[:, : tokens + 1]
        micro_batch = self.config.training.micro_batch_size
        return Batch(
            inputs=sample_format(self.config).to_tensors(self.config, rows_NC),
            first_microbatch=begin // micro_batch,
            step=step,
            microbatches=len(rows_NC) // (micro_batch * (replicas or self.config.parallel.data_parallel_size)),
            tokens=tokens,
        )


def open_source(config: Config, prefix: str) -> IndexedDataset:
    """Open one data set.

    Raises:
        UsageError: it is not a data set, not of the format of ``--data-impl``, or was made with another vocabulary.
    """
    if config.data.mock_data:
        return mock.mock_dataset(config.model.vocab_size, config.training.seed)
    check_vocabulary(config, prefix)
    source, data_impl = open_indexed(prefix), config.data.data_impl
    if data_impl != "infer":
        with open(f"{source.prefix}.idx", "rb") as handle:
            magic = handle.read(len(MAGIC))
        if not magic.startswith(FORMS[data_impl]):
            other = "cached or lazy" if data_impl == "mmap" else "mmap"
            raise UsageError(
                f"--data-impl {data_impl}: {source.prefix}.idx is of the {other} format; leave --data-impl out, the"
                " format is detected"
            )
    return source


def cache_directory(config: Config) -> Path:
    """Directory of cached sample indices: ``--data-cache-path``, by default ``cache`` next to the first data set."""
    if config.data.data_cache_path is not None:
        return Path(config.data.data_cache_path)
    first = next(blend[0][1] for blend in (config.data.blend, *config.data.part_blends) if blend)
    return Path(first).parent / "cache"


def split_blend(config: Config, split: Split) -> tuple[Blend, tuple[float, float, float], Split]:
    """The data sets of a split, the shares that they are split by, and which of their splits is used."""
    own = config.data.part_blends[SPLITS.index(split)]
    if config.data.mock_data:
        return ((1.0, mock.PREFIX),), config.data.split_shares, split
    if own or not config.data.blend:
        return own, ALL_DOCUMENTS, "train"
    return config.data.blend, config.data.split_shares, split


def open_split(config: Config, split: Split, num_samples: int, open_one: OpenSource, build: SplitBuilder) -> Dataset:
    """The first ``num_samples`` samples of a split.

    Args:
        config: the run's options.
        split: which split.
        num_samples: number of samples over the whole run.
        open_one: opens a data set by its prefix.
        build: makes the samples of one data set.

    Raises:
        UsageError: there are no data for the split, or fewer samples than a batch.
    """
    blend, shares, inner = split_blend(config, split)
    if not blend:
        raise UsageError(f"no data for the {split} split; give --{split}-data-path, or --eval-iters 0")
    weights = [weight for weight, _ in blend]
    counts = samples_per_dataset(weights, num_samples) if len(blend) > 1 else [num_samples]
    parts = [
        build(
            SplitRequest(
                source=open_one(prefix),
                split=inner,
                shares=shares,
                num_samples=count,
                # A batch of a blend takes samples of any data set, so each needs only one.
                batch_size=config.training.global_batch_size if len(blend) == 1 else 1,
                cache=None if config.data.mock_data else cache_directory(config),
            )
        )
        for (_, prefix), count in zip(blend, counts, strict=True)
    ]
    return parts[0] if len(parts) == 1 else BlendedDataset(parts=parts, weights=weights, length=num_samples)


def eval_samples(config: Config) -> tuple[int, int]:
    """Samples that a run evaluates on: validation, where each evaluation continues after the last one, and test."""
    training = config.training
    samples = training.eval_iters * training.global_batch_size
    evaluations = training.train_iters // training.eval_interval + 1
    return samples * evaluations, samples


def _open_test(
    config: Config, num_samples: int, open_one: OpenSource, build: SplitBuilder
) -> tuple[Dataset | None, str | None]:
    """The test split, or why it makes no batch; (None, None) where no test is configured."""
    named, shares = config.data.test_data_path is not None, config.data.split_shares
    has_shares = config.data.blend or config.data.mock_data
    if not named and not (has_shares and shares[SPLITS.index("test")]):
        return None, None
    try:
        return open_split(config, "test", num_samples, open_one, build), None
    # The default --split gives the test a thousandth, which has no batch in a small data set: only a test set that the
    # user names must be usable.
    except UsageError as error:
        if named:
            raise
        return None, str(error)


def _open_stream_data(config: Config, consumed: int, positions: Mapping[str, Any]) -> RunData:
    train = open_hf_dataset(config, "train", positions.get("train"))
    if train is None:
        raise UsageError("no training data; give --hf-dataset")
    if consumed and train.first_sample == 0:
        print_message(
            f"the checkpoint has no position of this stream: the first {consumed:,} samples are read again and left out"
        )
    valid = open_hf_dataset(config, "valid", positions.get("valid")) if config.training.eval_iters else None
    return RunData(config=config, train=train, valid=valid, test=None)


def open_run_data(
    config: Config,
    step: int = 0,
    consumed: int = 0,
    positions: Mapping[str, Any] | None = None,
    batches: BatchPositions | None = None,
) -> RunData:
    """Open the data sets of a run.

    Args:
        config: the run's options.
        step: step to resume after.
        consumed: samples consumed up to that step.
        positions: ``x_data_position`` of the checkpoint; None without one.
        batches: where batches begin; None: those of the options.

    Raises:
        UsageError: a data set cannot be used, or has too few samples.
    """
    if config.data.hf_dataset is not None:
        return _open_stream_data(config, consumed, positions or {})
    # Splits share a data set, which is memory-mapped once.
    opened: dict[str, IndexedDataset] = {}

    def open_one(prefix: str) -> IndexedDataset:
        if prefix not in opened:
            opened[prefix] = open_source(config, prefix)
        return opened[prefix]

    build = sample_format(config).builder(config)
    valid_samples, test_samples = eval_samples(config)
    test, no_test = _open_test(config, test_samples, open_one, build) if test_samples else (None, None)
    remaining_steps = max(0, config.training.train_iters - step)
    train_samples = (batches or config.batch_positions()).consumed_after(remaining_steps, consumed)
    return RunData(
        config=config,
        train=open_split(config, "train", train_samples, open_one, build),
        valid=open_split(config, "valid", valid_samples, open_one, build) if valid_samples else None,
        test=test,
        no_test=no_test,
    )
