r"""Reads indexed datasets: Megatron's ``mmap``, ``cached`` and ``lazy`` forms, ``PREFIX.bin`` and ``PREFIX.idx``.

``.bin`` is bare ids. Layout of the index in the ``mmap`` form, little-endian: magic ``MMIDIDX\0\0``, version as u64
(1), data type as u8, number of sequences n as u64, length d of the document index as u64, n lengths in tokens as i32, n
byte offsets into ``.bin`` as i64, d document boundaries (counts of sequences, from 0) as i64, and for multimodal data n
modes as i8.

``cached`` and ``lazy`` have the same bytes: magic ``TNTIDX\0\0``, then as u64 version (1), data type, bytes of a token,
n, number of sizes (n), d; then as i64 n + 1 dimension offsets, n + 1 offsets into ``.bin`` in tokens, n lengths, d
document boundaries. They too are read as they are touched.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.document import DocumentError, Problem

MAGIC = b"MMIDIDX\x00\x00"
OTHER_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
OTHER_HEADER = struct.Struct("<8sQQQQQQ")
FORMS = {"mmap": MAGIC, "cached": OTHER_MAGIC, "lazy": OTHER_MAGIC}
INTEGER_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedDataset:
    """An open dataset; arrays are memory-mapped.

    Sequence ``s`` is ``tokens[starts[s] : starts[s] + lengths[s]]``; document ``d`` is the sequences from
    ``documents[d]`` up to, not including, ``documents[d + 1]``.

    Attributes:
        prefix: ``PREFIX`` of the files.
        tokens: All token ids of ``.bin``.
        lengths: Tokens of each sequence.
        starts: First token of each sequence.
        documents: First sequence of each document, and the number of sequences.
    """

    prefix: str
    tokens: npt.NDArray[np.integer[Any]]
    lengths: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1


def _header_problems(index: bytes | npt.NDArray[np.uint8], header: tuple[Any, ...]) -> list[Problem]:
    """Return the problems of the header, and of the size that follows from it."""
    magic, version, code, sequences, boundaries = header
    if magic != MAGIC:
        return [Problem("magic", "magic", f"must be {MAGIC!r}, is {magic!r}: not an index of an indexed dataset")]
    if version != 1:
        return [Problem("version", "version", f"is {version}; this program reads version 1")]
    if code not in INTEGER_TYPES:
        return [Problem("dtype", "choice", f"must be a code of an integer type, is {code}; token ids are integers")]
    size = HEADER.size + 12 * sequences + 8 * boundaries
    return _size_problems(len(index), (size, size + sequences), sequences, boundaries)


def _size_problems(found: int, sizes: tuple[int, ...], sequences: int, boundaries: int) -> list[Problem]:
    if found in sizes:
        return []
    words = f"{sequences} sequences and {boundaries} document boundaries take {sizes[0]} bytes; the file has {found}"
    return [Problem("", "truncated" if found < sizes[0] else "size", words)]


def _other_header_problems(index: npt.NDArray[np.uint8], header: tuple[Any, ...]) -> list[Problem]:
    """The same for a ``cached`` or ``lazy`` index."""
    _magic, version, code, token_bytes, sequences, sizes, boundaries = header
    if version != 1:
        return [Problem("version", "version", f"is {version}; this program reads version 1")]
    if code not in INTEGER_TYPES:
        return [Problem("dtype", "choice", f"must be a code of an integer type, is {code}; token ids are integers")]
    problems = []
    if token_bytes != np.dtype(INTEGER_TYPES[code]).itemsize:
        problems.append(Problem("element_bytes", "range", f"is {token_bytes}; the type {code} has another size"))
    if sizes != sequences:
        problems.append(Problem("sizes", "length", f"{sizes} sizes for {sequences} sequences; a sequence has one"))
    if problems:
        return problems
    size = OTHER_HEADER.size + 8 * (3 * sequences + 2 + boundaries)
    return _size_problems(len(index), (size,), sequences, boundaries)


def _array_problems(
    lengths: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
    item_bytes: int,
    bin_bytes: int,
) -> list[Problem]:
    """Return the contradictions between the arrays, and with the size of ``.bin``."""
    problems = []
    if len(lengths):
        if int(lengths.min()) < 0:
            problems.append(Problem("lengths", "range", f"sequence {int(lengths.argmin())} has a negative length"))
        # int64: a data set can have more than 2**31 tokens, and the lengths are int32.
        ends = lengths.cumsum(dtype=np.int64) * item_bytes
        begins = ends - lengths.astype(np.int64) * item_bytes
        if (pointers != begins).any():
            at = int((pointers != begins).argmax())
            words = (
                f"sequence {at} begins at byte {pointers[at]}; must be {begins[at]}, the end of the sequence before it"
            )
            problems.append(Problem("pointers", "order", words))
    needed = int(lengths.sum(dtype=np.int64)) * item_bytes
    if needed != bin_bytes:
        problems.append(Problem("lengths", "length", f"add up to {needed} bytes; the .bin has {bin_bytes}"))
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        rule = f"must start at 0, never fall and end at the number of sequences, {len(lengths)}"
        problems.append(Problem("documents", "order", rule))
    return problems


Arrays = tuple[np.dtype[Any], npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _read_mmap(index: npt.NDArray[np.uint8]) -> tuple[Arrays | None, list[Problem]]:
    """Return dtype, lengths, byte offsets and document boundaries of an ``mmap`` index, or its problems."""
    header = HEADER.unpack(index[: HEADER.size].tobytes())
    if problems := _header_problems(index, header):
        return None, problems
    _magic, _version, code, sequences, boundaries = header
    parts = np.split(index, HEADER.size + np.array([0, 4, 12]) * sequences)
    documents = parts[3][: 8 * boundaries].view("<i8")
    return (np.dtype(INTEGER_TYPES[code]), parts[1].view("<i4"), parts[2].view("<i8"), documents), []


def _read_other(index: npt.NDArray[np.uint8]) -> tuple[Arrays | None, list[Problem]]:
    """The same for a ``cached`` or ``lazy`` index."""
    if len(index) < OTHER_HEADER.size:
        return None, [Problem("", "truncated", f"has {len(index)} bytes, fewer than a header")]
    header = OTHER_HEADER.unpack(index[: OTHER_HEADER.size].tobytes())
    if problems := _other_header_problems(index, header):
        return None, problems
    _magic, _version, code, token_bytes, sequences, _sizes, _boundaries = header
    numbers = index[OTHER_HEADER.size :].view("<i8")
    dimensions, offsets, lengths, documents = np.split(numbers, np.cumsum([sequences + 1, sequences + 1, sequences]))
    problems = []
    if (dimensions != np.arange(sequences + 1)).any():
        problems.append(Problem("dimensions", "order", "must be 0, 1, ... n: a sequence has one dimension"))
    if sequences and (int(lengths.max()) > np.iinfo(np.int32).max or int(lengths.min()) < np.iinfo(np.int32).min):
        problems.append(Problem("lengths", "range", "a sequence has more than 2,147,483,647 tokens"))
    if not problems and int(offsets[-1]) != int(lengths.sum()):
        problems.append(Problem("pointers", "order", f"end at token {offsets[-1]}; the lengths at {lengths.sum()}"))
    if problems:
        return None, problems
    return (np.dtype(INTEGER_TYPES[code]), lengths.astype(np.int32), offsets[:-1] * token_bytes, documents), []


def prefix_of(path: str) -> str:
    """Return ``PREFIX`` for ``PREFIX``, ``PREFIX.bin`` or ``PREFIX.idx``."""
    stem, suffix = os.path.splitext(path)
    return stem if suffix in (".bin", ".idx") and not os.path.exists(f"{path}.idx") else path


def open_indexed(prefix: str) -> IndexedDataset:
    """Open ``PREFIX.bin`` and ``PREFIX.idx`` by memory mapping.

    Args:
        prefix: ``PREFIX``, or the path of either file.

    Raises:
        DocumentError: A file is missing, truncated or not of this format, or the two contradict; with every problem.
    """
    prefix = prefix_of(prefix)
    index_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    missing = [path for path in (index_path, bin_path) if not path.is_file()]
    if missing:
        problems = [Problem(str(path), "missing", "no such file") for path in missing]
        raise DocumentError(f"dataset {prefix}", problems)
    with index_path.open("rb") as handle:
        head = handle.read(HEADER.size)
    if len(head) < HEADER.size:
        raise DocumentError(str(index_path), [Problem("", "truncated", f"has {len(head)} bytes, fewer than a header")])
    index = np.memmap(index_path, dtype=np.uint8, mode="r")
    read = _read_other if head[: len(OTHER_MAGIC)] == OTHER_MAGIC else _read_mmap
    arrays, problems = read(index)
    bin_bytes = bin_path.stat().st_size
    if arrays is not None:
        dtype, lengths, pointers, documents = arrays
        problems = _array_problems(lengths, pointers, documents, dtype.itemsize, bin_bytes)
    if arrays is None or problems:
        raise DocumentError(str(index_path), problems)
    whole = bin_bytes // dtype.itemsize
    # An empty file cannot be memory-mapped.
    tokens = np.memmap(bin_path, dtype=dtype, mode="r", shape=(whole,)) if whole else np.zeros(0, dtype)
    return IndexedDataset(
        prefix=prefix, tokens=tokens, lengths=lengths, starts=pointers // dtype.itemsize, documents=documents
    )
