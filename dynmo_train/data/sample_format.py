"""What a family's samples are: the interface between data sets, blends and the batches of a run.

A family's data set is one file and one line in ``registry.py``. It gives batches as rows of int64, so that any data
sets can be blended; ``to_tensors`` splits the rows into the tensors that the model reads.

    SplitRequest --SampleFormat.builder--> Dataset --batch(indices)--> rows [N, C] --to_tensors--> ids, labels, ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from .._common.errors import UsageError
from ..config import Config
from ..formats.indexed import IndexedDataset

Int64Array = npt.NDArray[np.int64]
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


class SampleError(UsageError):
    """Samples cannot be read or used; all ranks raise it in the same step."""


class Dataset(Protocol):
    """The samples of one split, in the order in which a run consumes them."""

    def __len__(self) -> int:
        """Number of samples."""

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Rows of several samples, int64 ``[n, columns]``; ``indices`` are sample numbers, ``[n]``."""

    def token_ranges(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """For each of several samples, the ranges of the data sets that it is made of.

        A range has ``prefix``, ``sequences`` (``[begin, end)``) and ``tokens`` (``[begin, end)``, counted from the
        first token of the ``.bin`` file).

        Args:
            indices: sample numbers, ``[n]``.
        """


@runtime_checkable
class ColumnDataset(Protocol):
    """A data set that can read a part of each sample."""

    def batch_columns(self, indices: npt.ArrayLike, columns: Int64Array) -> Int64Array:
        """``Dataset.batch`` of the columns ``columns`` ``[c]`` only, int64 ``[n, c]``; ``indices`` ``[n]``."""


def read_columns(data: Dataset, indices: npt.ArrayLike, columns: Int64Array) -> Int64Array:
    """Some columns of samples, int64 ``[n, c]``; whole samples are read where the data set has no other way.

    Args:
        data: the samples.
        indices: sample numbers, ``[n]``.
        columns: column numbers, ``[c]``.
    """
    if isinstance(data, ColumnDataset):
        return data.batch_columns(indices, columns)
    return data.batch(indices)[:, columns]


@dataclass(frozen=True, kw_only=True)
class SplitRequest:
    """The samples of one split of one data set that a run needs.

    Attributes:
        source: the data set.
        split: which of the three splits.
        shares: fractions of the documents for training, validation and test.
        num_samples: number of samples.
        batch_size: minimum number of samples in an epoch.
        cache: directory of sample indices; None does not cache.
    """

    source: IndexedDataset
    split: Split
    shares: tuple[float, float, float]
    num_samples: int
    batch_size: int
    cache: Path | None = None

    @property
    def split_index(self) -> int:
        """0 for train, 1 for valid, 2 for test; seeds the shuffles."""
        return SPLITS.index(self.split)

    @property
    def documents(self) -> tuple[int, int]:
        """The documents of the split, ``[begin, end)``."""
        bounds = split_bounds(self.source.num_documents, self.shares)
        return bounds[self.split_index], bounds[self.split_index + 1]


SplitBuilder = Callable[[SplitRequest], Dataset]


@dataclass(frozen=True, kw_only=True)
class SampleFormat:
    """The samples of a model family.

    Attributes:
        builder: checks a run's options, and returns what builds a split; raises ``UsageError``.
        to_tensors: rows ``[N, C]`` to named tensors ``[N, ...]``.
        num_columns: columns C of a row.
        is_local: whether C consecutive columns give the same tensors ``[N, C - 1]`` alone as within their row.
    """

    builder: Callable[[Config], SplitBuilder]
    to_tensors: Callable[[Config, Int64Array], dict[str, torch.Tensor]]
    num_columns: Callable[[Config], int]
    is_local: Callable[[Config], bool] = lambda _config: False


def split_bounds(num_documents: int, shares: tuple[float, float, float]) -> tuple[int, int, int, int]:
    """Boundaries of the splits over the documents: split ``s`` is ``[bounds[s], bounds[s + 1])``.

    Megatron's rounding: each split is rounded separately, and the excess of the sum is subtracted from every boundary.

    Args:
        num_documents: documents of the data set.
        shares: fractions of the three splits, which add up to 1.
    """
    # The same documents as in Megatron, so that the splits of a converted run do not mix.
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share * num_documents))
    excess = bounds[-1] - num_documents
    first, second, third = (max(0, bound - excess) for bound in bounds[1:])
    return 0, first, second, third


def columns_to_tensors(rows_NC: Int64Array, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Split rows of ``len(names)`` equally wide columns.

    Args:
        rows_NC: int64 ``[N, C]``; C is T times the number of names.
        names: names of the tensors, in the order of the columns.

    Returns:
        Name -> tensor ``[N, T]``: attention masks bool, all others int64.
    """
    columns = torch.from_numpy(rows_NC.reshape(len(rows_NC), len(names), -1))
    # Contiguous copies: a slice of the rows would keep all columns in memory.
    tensors = {name: columns[:, position].contiguous() for position, name in enumerate(names)}
    return {name: each.bool() if name.endswith("attention_mask") else each for name, each in tensors.items()}
