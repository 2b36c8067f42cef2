"""MinHash signatures of many documents at once, bit-identical to the ``affine32`` scheme of datasketch.

    texts ─> joined_hashes ─> shingle hashes ─> premix ─> h * a + b (mod 2^32) ─> minimum per document ─> signature
                                                            one pair (a, b) per permutation

datasketch defines the permutations, the scheme and the seed. numpy applies each permutation to the shingles of a whole
block of documents, instead of all permutations to one document.

Documents of Jaccard index J share at least one of ``num_bands`` bands of r values with probability
1 - (1 - J^r)^num_bands (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, 3.4): 0.986 for J = 0.9 and 10 bands
of 10 values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .._common.errors import MissingExtraError, UsageError
from .shingles import U32, U64, code_points, hash_whole, hash_windows

SCHEME = "affine32"
# A block of hashes and its permuted copy take 512 KiB, so all permutations run within the CPU cache.
BLOCK_SHINGLES = 1 << 16
LONG_CHARACTERS = 1 << 20
"""Longer texts are signed in pieces."""
# What datasketch starts with: the maximum, which no minimum exceeds.
EMPTY = np.uint32(0xFFFFFFFF)

Permutations = tuple[U32, U32]


@functools.lru_cache(maxsize=4)
def permutations(num_seeds: int, seed: int) -> Permutations:
    """The multipliers and addends that datasketch draws for a seed.

    Args:
        num_seeds: number of permutations.
        seed: seed of the generator.

    Returns:
        Two uint32 arrays ``[num_seeds]``.

    Raises:
        MissingExtraError: datasketch is not installed.
    """
    try:
        from datasketch import MinHash  # 0.4 s with scipy: once per worker, and only in workers that hash
    except ImportError as error:
        raise MissingExtraError("datasketch", "prep") from error
    a, b = MinHash(num_perm=num_seeds, seed=seed, scheme=SCHEME).permutations
    return np.ascontiguousarray(a, dtype=np.uint32), np.ascontiguousarray(b, dtype=np.uint32)


def premix(hashes: U32) -> U32:
    """The 32-bit finalizer of MurmurHash3 on ``hashes`` ``[hashes]``, which the scheme applies before permutations."""
    mixed = hashes ^ (hashes >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def joined_hashes(texts: Sequence[str], length: int) -> tuple[U32, npt.NDArray[np.int64]]:
    """Hash the character shingles of all texts. A text shorter than one shingle has one hash, an empty one has none.

    The texts are hashed as one string, and windows across two texts are removed: short texts then have no overhead.

    Args:
        texts: the texts.
        length: characters per shingle.

    Returns:
        uint32 hashes of all texts, concatenated, and the number of hashes of each text ``[texts]``, int64.
    """
    sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    points = code_points("".join(texts))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    keep = np.ones(len(points), dtype=np.bool_)
    # The windows that begin at the last ``length - 1`` characters of a text extend into the next text.
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
    """Compute MinHash signatures from shingle hashes.

    Args:
        hashes: uint32 shingle hashes of all documents, concatenated.
        counts: number of hashes of each document ``[documents]``, int64.
        perms: result of ``permutations``.

    Returns:
        Signatures ``[documents, num_seeds]``, uint32; a document without shingles has ``EMPTY`` in every column.
    """
    a, b = perms
    signatures = np.full((len(counts), len(a)), EMPTY, dtype=np.uint32)
    # Without documents that have no shingles: for an empty range, reduceat returns an element of the next document.
    filled = np.flatnonzero(counts)
    if not len(filled):
        return signatures
    joined = premix(hashes)
    starts = (np.cumsum(counts) - counts)[filled]
    permuted = np.empty_like(joined)
    for column, (factor, addend) in enumerate(zip(a, b, strict=True)):
        # uint32 arithmetic wraps around, which is the modulus 2^32 of the scheme. One buffer serves all permutations.
        np.multiply(joined, factor, out=permuted)
        permuted += addend
        signatures[filled, column] = np.minimum.reduceat(permuted, starts)
    return signatures


def sign_long(text: str, length: int, perms: Permutations) -> U32:
    """Compute the signature of a text in pieces ``[1, num_seeds]``: hashes of all shingles take 20 times its bytes.

    Args:
        text: the text, not shorter than a shingle.
        length: characters per shingle.
        perms: result of ``permutations``.
    """
    # Pieces overlap by a shingle less one character, so together they have its shingles.
    pieces = (text[at : at + LONG_CHARACTERS + length - 1] for at in range(0, len(text) - length + 1, LONG_CHARACTERS))
    return functools.reduce(np.minimum, (sign([piece], length, perms) for piece in pieces))


def sign(texts: Sequence[str], length: int, perms: Permutations) -> U32:
    """Compute the signatures of texts, in blocks that fit into the CPU cache.

    Args:
        texts: the documents.
        length: characters per shingle.
        perms: result of ``permutations``, two arrays ``[num_seeds]``.

    Returns:
        ``[documents, num_seeds]``, uint32.
    """
    blocks: list[U32] = []
    waiting: list[str] = []
    size = 0
    for text in texts:
        if len(text) > LONG_CHARACTERS + length:
            if waiting:
                blocks.append(sign_hashes(*joined_hashes(waiting, length), perms))
                waiting, size = [], 0
            blocks.append(sign_long(text, length, perms))
            continue
        waiting.append(text)
        size += len(text)
        if size >= BLOCK_SHINGLES:
            blocks.append(sign_hashes(*joined_hashes(waiting, length), perms))
            waiting, size = [], 0
    blocks.append(sign_hashes(*joined_hashes(waiting, length), perms))
    return np.concatenate(blocks)


def band_keys(signatures: U32, band: int, num_bands: int) -> U64:
    """Hash the values of each document in one band to a 64-bit key; equal values have equal keys.

    Args:
        signatures: ``[documents, num_seeds]``, uint32.
        band: index of the band.
        num_bands: number of bands.

    Returns:
        Keys ``[documents]``, uint64.

    Raises:
        UsageError: ``num_bands`` does not divide ``num_seeds``.
    """
    num_seeds = signatures.shape[1]
    if num_bands < 1 or num_seeds % num_bands:
        raise UsageError(f"{num_seeds} permutations cannot be divided into {num_bands} bands; choose a divisor of it")
    rows = num_seeds // num_bands
    keys: U64 = np.zeros(len(signatures), dtype=np.uint64)
    for column in range(band * rows, (band + 1) * rows):
        # Wraps around modulo 2^64. Each step is a bijection of the key, so equal bands only differ from others by
        # collisions of 64 bits.
        keys *= np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
        keys += signatures[:, column]
    return keys
