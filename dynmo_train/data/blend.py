"""Mixes several data sets by weights, as a pure function of the sample number.

Sample ``k`` of a data set with weight ``w`` has the time ``(k + 1/2) / w``; the blend is all samples in order of time.
After any number of samples, each data set has contributed its share to within one sample per data set. No index is
built: the samples from ``i`` on are computed from ``i`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .sample_format import Dataset, Int64Array, read_columns


def _margin(weights: Sequence[float]) -> int:
    """Upper bound of the difference between a data set's count and its share: half a sample each, and rounding."""
    return len(weights) + 2


def blend(weights: Sequence[float], begin: int, end: int) -> tuple[Int64Array, Int64Array]:
    """The data set, and the sample of that data set, for samples ``[begin, end)`` of the blend.

    Args:
        weights: positive, in any scale. Weights 3 and 1 give the data sets 0, 0, 1, 0, 0, 0, 1, 0, ...
        begin: first sample of the blend.
        end: sample after the last.

    Returns:
        Data set indices and sample indices, int64 ``[end - begin]`` each.
    """
    total, margin = math.fsum(weights), _margin(weights)
    sets, samples, times = [], [], []
    skipped = 0
    for number, weight in enumerate(weights):
        first = max(0, math.floor(weight / total * begin) - margin)
        last = math.ceil(weight / total * end) + margin
        skipped += first
        candidates = np.arange(first, last, dtype=np.int64)
        sets.append(np.full(len(candidates), number, dtype=np.int64))
        samples.append(candidates)
        times.append((candidates + 0.5) / weight)
    set_of, sample_of = np.concatenate(sets), np.concatenate(samples)
    # The skipped samples are all among the first ``begin`` of the blend, because each ``first`` is a lower bound of its
    # data set's count. Of equal times the data set that is first in the list comes first.
    order = np.lexsort((set_of, np.concatenate(times)))[begin - skipped : end - skipped]
    return set_of[order], sample_of[order]


def samples_per_dataset(weights: Sequence[float], count: int) -> list[int]:
    """Upper bound of the samples of each data set among the first ``count`` of the blend.

    Args:
        weights: positive, in any scale.
        count: number of samples of the blend.
    """
    total = math.fsum(weights)
    return [math.ceil(weight / total * count) + _margin(weights) for weight in weights]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlendedDataset:
    """Data sets mixed by ``weights``; has ``length`` samples."""

    parts: Sequence[Dataset]
    weights: Sequence[float]
    length: int

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Rows of several samples, int64 ``[n, columns]``; ``indices`` ``[n]`` are consecutive and ascending."""
        return self._read(indices, None)

    def batch_columns(self, indices: npt.ArrayLike, columns: Int64Array) -> Int64Array:
        """Columns ``columns`` ``[c]`` of several samples, int64 ``[n, c]``; ``indices`` ``[n]`` as in ``batch``."""
        return self._read(indices, columns)

    def _read(self, indices: npt.ArrayLike, columns: Int64Array | None) -> Int64Array:
        set_of, sample_of = self._locate(indices)
        rows: list[Int64Array] = []
        positions: list[Int64Array] = []
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(set_of == number)
            if len(mine):
                own = sample_of[mine]
                rows.append(part.batch(own) if columns is None else read_columns(part, own, columns))
                positions.append(mine)
        joined = np.concatenate(rows)
        rows_NC = np.empty_like(joined)
        rows_NC[np.concatenate(positions)] = joined
        return rows_NC

    def token_ranges(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """See ``Dataset``; ``indices`` ``[n]`` are consecutive and ascending."""
        set_of, sample_of = self._locate(indices)
        return [self.parts[number].token_ranges([sample])[0] for number, sample in zip(set_of, sample_of, strict=True)]

    def _locate(self, indices: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        requested = np.asarray(indices, dtype=np.int64)
        first = int(requested[0])
        set_of, sample_of = blend(self.weights, first, int(requested[-1]) + 1)
        return set_of[requested - first], sample_of[requested - first]
