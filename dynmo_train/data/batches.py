"""Training and validation batches of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.errors import UsageError
from ..config import Config
from ..config.batch_schedule import BatchSizes, Curriculum
from ..config.data import Blend
from ..formats.indexed import FORMS, MAGIC, IndexedDataset, open_indexed
from .batch import Batch
from .blend import BlendedDataset, Dataset, samples_needed
from .gpt_dataset import PARTS, Part
from .provenance import check_vocabulary
from .registry import BuildPart, PartWanted, Tensors, part_builder, tensors_of

WHOLE = (1.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Training and held-out batches as pure functions of the consumed samples and the step.

    ``tensors`` makes the tensors that the model reads of a batch's rows, ``micro_batch`` is the samples of a
    microbatch, ``replicas`` the number of those who share a batch. ``no_test`` is why the test part of the split,
    which has a share, is not evaluated.
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    tensors: Tensors
    sizes: BatchSizes
    curriculum: Curriculum | None
    micro_batch: int
    replicas: int
    no_test: str | None = None

    def training(self, consumed: int, step: int) -> Batch:
        """The batch of a training step, after ``consumed`` samples."""
        tokens = self.curriculum.at(step) if self.curriculum is not None else None
        return self._batch(self.train, consumed, self.sizes.at(consumed), step, tokens)

    def places(self, consumed: int) -> list[list[dict[str, Any]]]:
        """Where the tokens of the batch after ``consumed`` samples lie, sample by sample; see ``Dataset.places``."""
        return self.train.places(range(consumed, consumed + self.sizes.at(consumed)))

    def held_out(self, part: Part, consumed: int, step: int) -> Batch:
        """A batch of the validation or the test, after ``consumed`` samples of it: full size, whole samples.

        Behind the last whole batch comes the first one again.
        """
        data = {"train": self.train, "valid": self.valid, "test": self.test}[part]
        if data is None:
            raise UsageError(f"there are no data for the {part} part; write --eval-iters 0")
        size = self.sizes.final
        begin = consumed % (len(data) // size * size)
        begin -= begin % size  # the batch size may have been another one in an earlier start
        return self._batch(data, begin, size, step, None)

    def _batch(self, part: Dataset, begin: int, size: int, step: int, tokens: int | None) -> Batch:
        rows = part.batch(range(begin, begin + size))
        return Batch(
            inputs=self.tensors(rows if tokens is None else rows[:, : tokens + 1]),
            first_microbatch=begin // self.micro_batch,
            step=step,
            microbatches=size // (self.micro_batch * self.replicas),
            tokens=tokens,
        )


def open_source(config: Config, prefix: str) -> IndexedDataset:
    """Open one data set.

    Raises:
        UsageError: it is not one, not of the form of ``--data-impl``, or was made with another vocabulary.
    """
    check_vocabulary(config, prefix)
    source, wanted = open_indexed(prefix), config.data.data_impl
    if wanted != "infer":
        with open(f"{source.prefix}.idx", "rb") as handle:
            head = handle.read(len(MAGIC))
        if not head.startswith(FORMS[wanted]):
            other = "cached or lazy" if wanted == "mmap" else "mmap"
            raise UsageError(
                f"{source.prefix}.idx is of the {other} form; leave --data-impl {wanted} out, the file says it"
            )
    return source


def cache_folder(config: Config) -> Path:
    """Where the sample indices of large data sets lie: ``--data-cache-path``, else beside the first data set."""
    if config.data.data_cache_path is not None:
        return Path(config.data.data_cache_path)
    first = next(blend[0][1] for blend in (config.data.blend, *config.data.part_blends) if blend)
    return Path(first).parent / "cache"


def blend_of_part(config: Config, part: Part) -> tuple[Blend, tuple[float, float, float], Part]:
    """The data sets of a part, the split that they are under, and the part of that split."""
    own = config.data.part_blends[PARTS.index(part)]
    if own or not config.data.blend:
        return own, WHOLE, "train"
    return config.data.blend, config.data.split_shares, part


def open_part(
    config: Config, part: Part, num_samples: int, open_one: Callable[[str], IndexedDataset], build: BuildPart
) -> Dataset:
    """The first ``num_samples`` samples of a part of the run's data, each data set's made by ``build``.

    Raises:
        UsageError: there are no data for it, or fewer samples than a batch.
    """
    blend, shares, inner = blend_of_part(config, part)
    if not blend:
        raise UsageError(f"there are no data for the {part} part: give --{part}-data-path, or write --eval-iters 0")
    weights = [weight for weight, _ in blend]
    counts = samples_needed(weights, num_samples) if len(blend) > 1 else [num_samples]
    batch = config.training.global_batch_size
    parts = [
        build(
            PartWanted(
                source=open_one(prefix),
                part=inner,
                shares=shares,
                num_samples=count,
                # Of several data sets, each must hold a sample; a batch may come from all of them.
                batch_size=batch if len(blend) == 1 else 1,
                cache=cache_folder(config),
            )
        )
        for (_, prefix), count in zip(blend, counts, strict=True)
    ]
    return parts[0] if len(parts) == 1 else BlendedDataset(parts=parts, weights=weights, length=num_samples)


def held_out_targets(config: Config) -> tuple[int, int]:
    """Samples that a run takes of the validation, whose evaluations go on where the last one ended, and of the test."""
    training = config.training
    once = training.eval_iters * training.global_batch_size
    evaluations = training.train_iters // training.eval_interval + 1
    return once * evaluations, once


def _open_test(
    config: Config, num_samples: int, open_one: Callable[[str], IndexedDataset], build: BuildPart
) -> tuple[Dataset | None, str | None]:
    """The test part, or why its documents make no batch; neither where nothing asks for a test."""
    named, shares = config.data.test_data_path is not None, config.data.split_shares
    if not named and not (config.data.blend and shares[PARTS.index("test")]):
        return None, None
    try:
        return open_part(config, "test", num_samples, open_one, build), None
    except UsageError as error:
        if named:
            raise
        return None, str(error)


def open_samples(config: Config, step: int = 0, consumed: int = 0) -> Samples:
    """Open the data of a run, after ``step`` steps and ``consumed`` samples.

    Raises:
        UsageError: it is not a data set, or holds too few samples.
    """
    training = config.training
    opened: dict[str, IndexedDataset] = {}

    def open_one(prefix: str) -> IndexedDataset:
        if prefix not in opened:
            opened[prefix] = open_source(config, prefix)
        return opened[prefix]

    build = part_builder(config)
    valid, test_samples = held_out_targets(config)
    test, no_test = _open_test(config, test_samples, open_one, build) if test_samples else (None, None)
    wanted = config.batch_sizes.consumed_after(max(0, training.train_iters - step), consumed)
    return Samples(
        train=open_part(config, "train", wanted, open_one, build),
        valid=open_part(config, "valid", valid, open_one, build) if valid else None,
        test=test,
        no_test=no_test,
        tensors=tensors_of(config),
        sizes=config.batch_sizes,
        curriculum=config.curriculum,
        micro_batch=training.micro_batch_size,
        replicas=config.parallel.data_parallel_size,
    )
