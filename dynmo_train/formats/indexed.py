r"""Reader of indexed data sets: Megatron's ``mmap`` form, ``PREFIX.bin`` and ``PREFIX.idx``.

Layout of the index, little-endian: magic ``MMIDIDX\0\0``, version as u64 (1), data type as u8, number of sequences n
as u64, length d of the document index as u64, n lengths in tokens as i32, n byte offsets into ``.bin`` as i64, d
document boundaries (counts of sequences, from 0) as i64, and for multimodal data n modes as i8. ``.bin`` is bare ids.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ._document import DocumentError, Problem

MAGIC = b"MMIDIDX\x00\x00"
OTHER_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
INTEGER_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedDataset:
    """An open data set; the arrays are read from disk as they are touched.

    ``tokens`` are all ids of ``.bin``; sequence ``s`` is ``tokens[starts[s] : starts[s] + lengths[s]]``; document ``d``
    is the sequences ``documents[d]`` up to, not including, ``documents[d + 1]``.
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
    """Faults of the fixed part, and of the size that it promises."""
    magic, version, code, sequences, boundaries = header
    if magic[: len(OTHER_MAGIC)] == OTHER_MAGIC:
        return [Problem("magic", "magic", "is of the cached or lazy form (TNTIDX); binarize the data in the mmap form")]
    if magic != MAGIC:
        return [Problem("magic", "magic", f"must be {MAGIC!r}, is {magic!r}: not an index of an indexed data set")]
    if version != 1:
        return [Problem("version", "version", f"is {version}; this program reads version 1")]
    if code not in INTEGER_TYPES:
        return [Problem("dtype", "choice", f"must be a code of an integer type, is {code}; token ids are integers")]
    size = HEADER.size + 12 * sequences + 8 * boundaries
    if len(index) not in (size, size + sequences):
        words = (
            f"{sequences} sequences and {boundaries} document boundaries take {size} bytes; the file has {len(index)}"
        )
        return [Problem("", "truncated" if len(index) < size else "size", words)]
    return []


def _array_problems(
    lengths: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
    item_bytes: int,
    bin_bytes: int,
) -> list[Problem]:
    """Faults of the three arrays against each other and against the size of ``.bin``."""
    problems = []
    if len(lengths):
        if lengths.min() < 0:
            problems.append(Problem("lengths", "range", f"sequence {int(lengths.argmin())} has a negative length"))
        ends = lengths.cumsum(dtype=np.int64) * item_bytes
        begins = ends - lengths.astype(np.int64) * item_bytes
        if (pointers != begins).any():
            at = int((pointers != begins).argmax())
            words = f"sequence {at} is said to begin at byte {pointers[at]}; the lengths before it end at {begins[at]}"
            problems.append(Problem("pointers", "order", words))
    needed = int(lengths.sum(dtype=np.int64)) * item_bytes
    if needed != bin_bytes:
        problems.append(Problem("lengths", "length", f"add up to {needed} bytes; the .bin has {bin_bytes}"))
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        rule = f"must start at 0, never fall and end at the number of sequences, {len(lengths)}"
        problems.append(Problem("documents", "order", rule))
    return problems


def open_indexed(prefix: str) -> IndexedDataset:
    """Open ``PREFIX.bin`` and ``PREFIX.idx`` without reading them whole.

    Raises:
        DocumentError: a file is missing, not of this format, truncated, or the two do not fit; with every problem.
    """
    index_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    missing = [path for path in (index_path, bin_path) if not path.is_file()]
    if missing:
        problems = [Problem(str(path), "missing", "no such file") for path in missing]
        raise DocumentError(f"data set {prefix}", problems)
    with index_path.open("rb") as handle:
        head = handle.read(HEADER.size)
    if len(head) < HEADER.size:
        raise DocumentError(str(index_path), [Problem("", "truncated", f"has {len(head)} bytes, fewer than a header")])
    index = np.memmap(index_path, dtype=np.uint8, mode="r")
    header = HEADER.unpack(head)
    if problems := _header_problems(index, header):
        raise DocumentError(str(index_path), problems)
    _magic, _version, code, sequences, boundaries = header
    parts = np.split(index, HEADER.size + np.array([0, 4, 12]) * sequences)
    lengths, pointers = parts[1].view("<i4"), parts[2].view("<i8")
    documents = parts[3][: 8 * boundaries].view("<i8")
    dtype, bin_bytes = np.dtype(INTEGER_TYPES[code]), bin_path.stat().st_size
    if problems := _array_problems(lengths, pointers, documents, dtype.itemsize, bin_bytes):
        raise DocumentError(str(index_path), problems)
    whole = bin_bytes // dtype.itemsize
    tokens = np.memmap(bin_path, dtype=dtype, mode="r", shape=(whole,)) if whole else np.zeros(0, dtype)
    return IndexedDataset(
        prefix=prefix, tokens=tokens, lengths=lengths, starts=pointers // dtype.itemsize, documents=documents
    )
