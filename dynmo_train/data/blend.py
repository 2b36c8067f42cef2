"""Several data sets as one, mixed by weights: which sample of which set comes when, as a pure function of its number.

Sample ``k`` of a set with weight ``w`` stands at the time ``(k + 1/2) / w``; the blend is all samples in order of time.
So after any number of samples each set has given its share to within one sample for each set, and no index is built:
the samples from ``i`` on are found from ``i`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class Dataset(Protocol):
    """What a blend mixes."""

    def __len__(self) -> int:
        """Samples that there are."""

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Token ids of several samples."""

    def places(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """For each of several samples the pieces of data sets that it is made of.

        A piece has ``prefix``, ``sequences`` (``[begin, end)``) and ``tokens`` (``[begin, end)``, counted from the
        first token of the ``.bin`` file).
        """


def _margin(weights: Sequence[float]) -> int:
    """By how many samples a set's count may be off its share: half a sample for each set, and rounding."""
    return len(weights) + 2


def blend(weights: Sequence[float], begin: int, end: int) -> tuple[Int64Array, Int64Array]:
    """For the samples ``begin`` to ``end`` of the blend: the number of the set, and the sample of that set.

    Args:
        weights: above 0; need not add up to 1. By 3 and 1: sets 0, 0, 1, 0, 0, 0, 1, 0, ...
    """
    total, margin = math.fsum(weights), _margin(weights)
    sets, samples, times = [], [], []
    skipped = 0
    for number, weight in enumerate(weights):
        first = max(0, math.floor(weight / total * begin) - margin)
        beyond = math.ceil(weight / total * end) + margin
        skipped += first
        candidates = np.arange(first, beyond, dtype=np.int64)
        sets.append(np.full(len(candidates), number, dtype=np.int64))
        samples.append(candidates)
        times.append((candidates + 0.5) / weight)
    set_of, sample_of = np.concatenate(sets), np.concatenate(samples)
    order = np.lexsort((set_of, np.concatenate(times)))[begin - skipped : end - skipped]
    return set_of[order], sample_of[order]


def samples_needed(weights: Sequence[float], count: int) -> list[int]:
    """How many samples of each set the first ``count`` of the blend can take at most."""
    total = math.fsum(weights)
    return [math.ceil(weight / total * count) + _margin(weights) for weight in weights]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlendedDataset:
    """Data sets mixed by ``weights``; ``length`` samples are served."""

    parts: Sequence[Dataset]
    weights: Sequence[float]
    length: int

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Token ids of several samples with ascending numbers behind each other: [samples, seq_length + 1]."""
        wanted = np.asarray(indices, dtype=np.int64)
        set_of, sample_of = blend(self.weights, int(wanted[0]), int(wanted[-1]) + 1)
        set_of, sample_of = set_of[wanted - wanted[0]], sample_of[wanted - wanted[0]]
        rows: list[Int64Array] = []
        places: list[Int64Array] = []
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(set_of == number)
            if len(mine):
                rows.append(part.batch(sample_of[mine]))
                places.append(mine)
        joined = np.concatenate(rows)
        tokens_BT = np.empty_like(joined)
        tokens_BT[np.concatenate(places)] = joined
        return tokens_BT

    def places(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """See ``Dataset``; the samples have ascending numbers behind each other."""
        wanted = np.asarray(indices, dtype=np.int64)
        set_of, sample_of = blend(self.weights, int(wanted[0]), int(wanted[-1]) + 1)
        return [self.parts[number].places([sample])[0] for number, sample in zip(set_of, sample_of, strict=True)]
