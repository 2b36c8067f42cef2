"""MinHash signatures of many documents at once, the same bits as datasketch's ``affine32`` scheme.

datasketch owns the permutations, the scheme and the seed; numpy applies them to blocks of shingles of many documents.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .._common.errors import MissingExtraError, UsageError
from .shingles import U32, U64, code_points, hash_whole, hash_windows

SCHEME = "affine32"
BLOCK_SHINGLES = 1 << 16
EMPTY = np.uint32(0xFFFFFFFF)

Permutations = tuple[U32, U32]


def _minhash() -> types.ModuleType:
    """The module ``datasketch.minhash``, without what else the package loads.

    The package's own start loads its indices and scipy with them: a third of a second in every worker. So the module is
    loaded below an empty package, which is taken away again: whoever imports datasketch afterwards gets all of it.
    """
    if "datasketch" in sys.modules:
        return importlib.import_module("datasketch.minhash")
    found = importlib.util.find_spec("datasketch")
    if found is None:
        raise MissingExtraError("datasketch", "prep")
    sys.modules["datasketch"] = importlib.util.module_from_spec(found)
    try:
        return importlib.import_module("datasketch.minhash")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "datasketch"]:
            del sys.modules[name]


@functools.lru_cache(maxsize=4)
def permutations(num_seeds: int, seed: int) -> Permutations:
    """The multipliers and addends, ``[num_seeds]`` each, that datasketch draws for this seed."""
    a, b = _minhash().MinHash(num_perm=num_seeds, seed=seed, scheme=SCHEME).permutations
    return np.ascontiguousarray(a, dtype=np.uint32), np.ascontiguousarray(b, dtype=np.uint32)


def premix(hashes: U32) -> U32:
    """MurmurHash3's 32-bit finish, which the scheme applies to each hash before it permutes."""
    mixed = hashes ^ (hashes >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def shingle_hashes(text: str, length: int) -> U32:
    """The 32-bit hashes of a text's shingles; of the whole text where it is shorter than one, none if it is empty."""
    return joined_hashes([text], length)[0]


def joined_hashes(texts: Sequence[str], length: int) -> tuple[U32, npt.NDArray[np.int64]]:
    """The hashes of the shingles of all texts, one text behind the other, and how many each has ``[texts]``.

    The texts are hashed as one, and the windows that reach from one into the next are left out: a text of a few words
    costs no more than its characters.
    """
    sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    points = code_points("".join(texts))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    keep = np.ones(len(points), dtype=np.bool_)
    for back in range(1, length):
        last = ends - back
        keep[last[last >= starts]] = False
    hashes = np.zeros(len(points), dtype=np.uint32)
    windows = hash_windows(points, length)
    hashes[: len(windows)] = windows
    short = np.flatnonzero((sizes > 0) & (sizes < length))
    for begin, end in zip(starts[short].tolist(), ends[short].tolist(), strict=True):
        hashes[begin] = hash_whole(points[begin:end])
    keep[starts[short]] = True
    counts = np.maximum(sizes - length + 1, 0)
    counts[short] = 1
    return hashes[keep], counts


def sign_hashes(hashes: U32, counts: npt.NDArray[np.int64], perms: Permutations) -> U32:
    """The signatures ``[documents, num_seeds]`` of documents given by their shingles' hashes.

    Args:
        hashes: of all documents, one behind the other.
        counts: how many of them each document has, ``[documents]``.
        perms: what ``permutations`` gives.
    """
    a, b = perms
    signatures = np.full((len(counts), len(a)), EMPTY, dtype=np.uint32)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return signatures
    joined = premix(hashes)
    starts = (np.cumsum(counts) - counts)[filled]
    permuted = np.empty_like(joined)
    for column, (factor, addend) in enumerate(zip(a, b, strict=True)):
        np.multiply(joined, factor, out=permuted)
        permuted += addend
        signatures[filled, column] = np.minimum.reduceat(permuted, starts)
    return signatures


def sign(texts: Sequence[str], length: int, perms: Permutations) -> U32:
    """The signatures ``[documents, num_seeds]`` of texts, in blocks that stay in the processor's cache."""
    blocks: list[U32] = []
    waiting: list[str] = []
    size = 0
    for text in texts:
        waiting.append(text)
        size += len(text)
        if size >= BLOCK_SHINGLES:
            blocks.append(sign_hashes(*joined_hashes(waiting, length), perms))
            waiting, size = [], 0
    blocks.append(sign_hashes(*joined_hashes(waiting, length), perms))
    return np.concatenate(blocks)


def band_keys(signatures: U32, band: int, num_bands: int) -> U64:
    """A 64-bit key ``[documents]`` of each document's values in one band; equal values have equal keys.

    Raises:
        UsageError: the permutations do not divide into bands.
    """
    num_seeds = signatures.shape[1]
    if num_bands < 1 or num_seeds % num_bands:
        raise UsageError(f"{num_seeds} permutations do not divide into {num_bands} bands; choose a divisor")
    rows = num_seeds // num_bands
    keys: U64 = np.zeros(len(signatures), dtype=np.uint64)
    for column in range(band * rows, (band + 1) * rows):
        keys *= np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
        keys += signatures[:, column]
    return keys


def agreement(signatures: U32, first: int, second: int) -> float:
    """The share of equal values of two signatures: an estimate of the Jaccard index."""
    return float(np.mean(signatures[first] == signatures[second]))


def candidate_probability(jaccard: npt.ArrayLike, num_bands: int, rows: int) -> npt.NDArray[np.float64]:
    """The chance that documents of this Jaccard index share a band: ``1 - (1 - J**rows)**num_bands``.

    Worked: J = 0.9 with 10 bands of 10 gives 0.986 (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, 3.4).
    """
    return 1.0 - (1.0 - np.asarray(jaccard, dtype=np.float64) ** rows) ** num_bands
