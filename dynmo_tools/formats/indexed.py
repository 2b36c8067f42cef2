"""The indexed data set, ``PREFIX.bin`` and ``PREFIX.idx``: its three forms, read and written byte for byte.

``indexed.md`` beside this file states the bytes. Nothing here holds more than the index of one data set in memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ._document import Problem

MMAP_MAGIC = b"MMIDIDX\0\0"
TNT_MAGIC = b"TNTIDX\0\0"
VERSION = 1
MMAP_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
TNT_HEADER = struct.Struct("<8sQQQQQQ")  # magic, version, dtype code, element bytes, items, sizes, boundaries
# Code 6 is the two readings' common type; 7 is float64 to the classic reader and float32 to the newer one, so the
# header alone does not say what it means, and it is read as neither.
DTYPES: dict[int, npt.DTypeLike] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    8: np.uint16,
}
CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}
SMALL_VOCABULARY = 65_500
MAX_SEQUENCE_TOKENS = (1 << 31) - 1
VERIFY_TOKENS = 1 << 24

Int64s = npt.NDArray[np.int64]


class IndexedError(UsageError):
    """A data set whose bytes break the rules of the format; carries every problem found."""

    def __init__(self, prefix: Path, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n  ".join([f"{prefix}: is no sound indexed data set", *map(str, problems)]))


def bin_path(prefix: Path) -> Path:
    """The file of the tokens."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The file of the index."""
    return prefix.with_name(prefix.name + ".idx")


def best_dtype(num_ids: int) -> np.dtype[Any]:
    """The type of tokens for ids below ``num_ids``: two bytes below 65,500, as Megatron chooses, else four."""
    return np.dtype(np.uint16 if num_ids < SMALL_VOCABULARY else np.int32)


@dataclass(frozen=True, kw_only=True)
class Index:
    """The index of a data set, in tokens and sequences whatever its form on disk.

    Attributes:
        form: ``mmap`` or ``tnt`` (the bytes of ``cached`` and ``lazy`` are the same).
        dtype: of a token.
        lengths: tokens of each sequence, ``[sequences]``.
        documents: the sequence count before each document and in all, ``[documents + 1]``, beginning with 0.
        modes: the mode of each sequence of a multimodal data set, ``[sequences]``, or None.
    """

    form: str
    dtype: np.dtype[Any]
    lengths: Int64s
    documents: Int64s
    modes: npt.NDArray[np.int8] | None = None

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return max(len(self.documents) - 1, 0)

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return int(self.lengths.sum())

    def starts(self) -> Int64s:
        """The first token of each sequence and, last, the number of tokens in all, ``[sequences + 1]``."""
        starts: Int64s = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=starts[1:])
        return starts


def encode_mmap(index: Index) -> Iterator[bytes]:
    """The bytes of an ``mmap`` index, in pieces.

    Raises:
        UsageError: a sequence is longer than 32-bit lengths allow.
    """
    longest = int(index.lengths.max(initial=0))
    if longest > MAX_SEQUENCE_TOKENS:
        at = int(index.lengths.argmax())
        raise UsageError(f"sequence {at} has {longest} tokens; the format holds {MAX_SEQUENCE_TOKENS}: split it")
    yield MMAP_HEADER.pack(MMAP_MAGIC, VERSION, CODES[index.dtype], len(index.lengths), len(index.documents))
    yield index.lengths.astype("<i4").tobytes()
    yield (index.starts()[:-1] * index.dtype.itemsize).astype("<i8").tobytes()
    yield index.documents.astype("<i8").tobytes()
    if index.modes is not None:
        yield index.modes.tobytes()


def encode_tnt(index: Index) -> Iterator[bytes]:
    """The bytes of a ``cached`` or ``lazy`` index, in pieces; its data offsets count tokens, not bytes."""
    count = len(index.lengths)
    yield TNT_HEADER.pack(
        TNT_MAGIC, VERSION, CODES[index.dtype], index.dtype.itemsize, count, count, len(index.documents)
    )
    yield np.arange(count + 1, dtype="<i8").tobytes()
    yield index.starts().astype("<i8").tobytes()
    yield index.lengths.astype("<i8").tobytes()
    yield index.documents.astype("<i8").tobytes()


def encode_index(index: Index) -> Iterator[bytes]:
    """The bytes of an index in its own form."""
    return encode_mmap(index) if index.form == "mmap" else encode_tnt(index)


def _array(handle: IO[bytes], kind: str, count: int, left: int) -> Int64s:
    size = np.dtype(kind).itemsize
    if count * size > left:
        raise _Short(f"the header asks for {count} values of {size} bytes where {max(left, 0)} bytes are left")
    return np.frombuffer(handle.read(count * size), dtype=kind).astype(np.int64)


class _Short(Exception):
    """The file ends before what its header announces."""


def read_index(prefix: Path) -> Index:
    """Read and check ``PREFIX.idx`` against itself and against the size of ``PREFIX.bin``.

    Raises:
        IndexedError: with every problem found.
        UsageError: a file is missing.
    """
    path = idx_path(prefix)
    try:
        size = os.path.getsize(path)
        tokens_bytes = os.path.getsize(bin_path(prefix))
        with open(path, "rb") as handle:
            magic = handle.read(len(MMAP_MAGIC))
            handle.seek(0)
            if magic == MMAP_MAGIC:
                index, problems = _read_mmap(handle, size)
            elif magic.startswith(TNT_MAGIC):
                index, problems = _read_tnt(handle, size)
            else:
                raise IndexedError(
                    prefix, [Problem("idx.magic", "magic", f"begins with {magic!r}, which no form does")]
                )
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except _Short as error:
        raise IndexedError(prefix, [Problem("idx", "truncated", str(error))]) from error
    if index is not None:
        problems = [*problems, *_problems(index, tokens_bytes)]
    if problems or index is None:
        raise IndexedError(prefix, problems)
    return index


def _header(handle: IO[bytes], layout: struct.Struct) -> tuple[Any, ...]:
    head = handle.read(layout.size)
    if len(head) < layout.size:
        raise _Short(f"is {len(head)} bytes; the header alone has {layout.size}")
    return layout.unpack(head)


def _code_problems(version: int, code: int, element_bytes: int | None = None) -> list[Problem]:
    if version != VERSION:
        return [Problem("idx.version", "version", f"is {version}; this program reads version {VERSION}")]
    if code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        return [Problem("idx.dtype", "choice", f"has code {code}; readable are {known}")]
    if element_bytes is not None and element_bytes != np.dtype(DTYPES[code]).itemsize:
        return [
            Problem(
                "idx.element_bytes",
                "range",
                f"is {element_bytes}; tokens of code {code} have {np.dtype(DTYPES[code]).itemsize} bytes",
            )
        ]
    return []


def _read_mmap(handle: IO[bytes], size: int) -> tuple[Index | None, list[Problem]]:
    _, version, code, count, boundaries = _header(handle, MMAP_HEADER)
    problems = _code_problems(version, code)
    if problems:
        return None, problems
    dtype = np.dtype(DTYPES[code])
    lengths = _array(handle, "<i4", count, size - handle.tell())
    pointers = _array(handle, "<i8", count, size - handle.tell())
    documents = _array(handle, "<i8", boundaries, size - handle.tell())
    left = size - handle.tell()
    modes = np.frombuffer(handle.read(count), dtype=np.int8) if left == count and count else None
    if left and modes is None:
        problems.append(Problem("idx", "length", f"has {left} bytes behind its content"))
    index = Index(form="mmap", dtype=dtype, lengths=lengths, documents=documents, modes=modes)
    wrong = np.flatnonzero(pointers != index.starts()[:-1] * dtype.itemsize)
    if len(wrong):
        at = int(wrong[0])
        expected = int(index.starts()[at]) * dtype.itemsize
        problems.append(
            Problem(f"idx.pointers[{at}]", "order", f"is {pointers[at]}; the lengths before it give {expected}")
        )
    return index, problems


def _read_tnt(handle: IO[bytes], size: int) -> tuple[Index | None, list[Problem]]:
    _, version, code, element_bytes, count, sizes, boundaries = _header(handle, TNT_HEADER)
    problems = _code_problems(version, code, element_bytes)
    if problems:
        return None, problems
    if sizes != count:
        return None, [Problem("idx.sizes", "length", f"has {sizes} values for {count} items; only flat items are read")]
    dimensions = _array(handle, "<i8", count + 1, size - handle.tell())
    offsets = _array(handle, "<i8", count + 1, size - handle.tell())
    lengths = _array(handle, "<i8", sizes, size - handle.tell())
    documents = _array(handle, "<i8", boundaries, size - handle.tell())
    if left := size - handle.tell():
        problems.append(Problem("idx", "length", f"has {left} bytes behind its content"))
    index = Index(form="tnt", dtype=np.dtype(DTYPES[code]), lengths=lengths, documents=documents)
    for name, found, expected in (
        ("dim_offsets", dimensions, np.arange(count + 1)),
        ("data_offsets", offsets, index.starts()),
    ):
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            at = int(wrong[0])
            problems.append(Problem(f"idx.{name}[{at}]", "order", f"is {found[at]}; must be {expected[at]}"))
    return index, problems


def _problems(index: Index, tokens_bytes: int) -> list[Problem]:
    problems = []
    if index.lengths.min(initial=0) < 0:
        at = int(index.lengths.argmin())
        problems.append(Problem(f"idx.lengths[{at}]", "range", f"is {index.lengths[at]}; a length is not negative"))
    expected = index.num_tokens * index.dtype.itemsize
    if tokens_bytes != expected:
        problems.append(Problem("bin", "length", f"has {tokens_bytes} bytes; the index says {expected}"))
    documents = index.documents
    if len(documents) == 0:
        problems.append(Problem("idx.documents", "length", "is empty; it holds at least a 0"))
        return problems
    if documents[0] != 0:
        problems.append(Problem("idx.documents[0]", "range", f"is {documents[0]}; must be 0"))
    falls = np.flatnonzero(documents[1:] < documents[:-1])
    if len(falls):
        at = int(falls[0]) + 1
        problems.append(Problem(f"idx.documents[{at}]", "order", f"is {documents[at]}, below the one before"))
    if documents[-1] != len(index.lengths):
        problems.append(
            Problem(
                f"idx.documents[{len(documents) - 1}]",
                "range",
                f"is {documents[-1]}; must be {len(index.lengths)}, the number of sequences",
            )
        )
    return problems


class IndexedReader:
    """A data set open for reading: sequences by number, without loading the tokens."""

    def __init__(self, prefix: Path) -> None:
        self.index = read_index(prefix)
        self._starts = self.index.starts()
        empty = self.index.num_tokens == 0
        self._tokens: npt.NDArray[Any] = (
            np.zeros(0, dtype=self.index.dtype)
            if empty
            else np.memmap(bin_path(prefix), dtype=self.index.dtype.newbyteorder("<"), mode="r")
        )

    def __len__(self) -> int:
        return len(self.index.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """The tokens of a sequence."""
        return self._tokens[self._starts[sequence] : self._starts[sequence + 1]]

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens, ``[tokens]``."""
        return self._tokens


def describe(prefix: Path) -> dict[str, Any]:
    """The JSON view of a data set (``indexed.schema.json``)."""
    reader = IndexedReader(prefix)
    index, tokens = reader.index, reader.tokens
    return {
        "format": "megatron.indexed",
        "form": index.form,
        "dtype": index.dtype.name,
        "sequences": len(index.lengths),
        "documents": index.num_documents,
        "tokens": index.num_tokens,
        "bin_bytes": index.num_tokens * index.dtype.itemsize,
        "idx_bytes": os.path.getsize(idx_path(prefix)),
        "shortest_sequence_tokens": int(index.lengths.min()) if len(index.lengths) else None,
        "longest_sequence_tokens": int(index.lengths.max()) if len(index.lengths) else None,
        "largest_id": int(tokens.max()) if len(tokens) and index.dtype.kind in "iu" else None,
        "multimodal": index.modes is not None,
    }


def verify(prefix: Path, num_ids: int | None = None) -> dict[str, Any]:
    """Check structure and tokens; the JSON view of the data set.

    Args:
        prefix: of the data set.
        num_ids: one above the largest id that a token may have; None checks only that none is negative.

    Raises:
        IndexedError: with every problem found.
    """
    view = describe(prefix)
    tokens = IndexedReader(prefix).tokens
    problems = []
    for begin in range(0, len(tokens), VERIFY_TOKENS):
        block = tokens[begin : begin + VERIFY_TOKENS]
        bad = block < 0 if num_ids is None else (block < 0) | (block >= num_ids)
        if bad.any():
            at = int(np.argmax(bad))
            rule = "must not be negative" if num_ids is None else f"must be within 0 and {num_ids - 1}"
            problems.append(Problem(f"bin.tokens[{begin + at}]", "range", f"is {block[at]}; {rule}"))
            break
    if problems:
        raise IndexedError(prefix, problems)
    return view
