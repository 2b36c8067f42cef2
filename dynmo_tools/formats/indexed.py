"""The indexed dataset, ``PREFIX.bin`` and ``PREFIX.idx``, in its three forms; ``indexed.md`` is the specification.

    PREFIX.bin   | tokens of sequence 0 | sequence 1 | sequence 2 | ...            dtype of the header
    PREFIX.idx   lengths    [sequences]      tokens of each sequence
                 pointers   [sequences]      start of each sequence in .bin: bytes (mmap) or tokens (cached, lazy)
                 documents  [documents + 1]  first sequence of each document, then the number of sequences

GPT readers use sequences, BERT and T5 readers use documents, whose sequences are sentences. The bytes are those of
Megatron; what Megatron wrote is read, and it reads what is written here.

Pointers are computed from the lengths, never stored in memory: an ``Index`` consists of lengths and documents, as
``IntColumn`` that are generated block by block. Neither tokens nor an index are in memory completely. A reader
compares the stored pointers with the computed ones and reports all problems at once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .._common.document import Problem, check_regular
from .._common.errors import UsageError
from .dataset import content_problems, digest_vocabulary, read_sidecar
from .int_columns import Int64s, IntColumn, arange, bounds, exclusive_cumsum, in_file

MMAP_MAGIC = b"MMIDIDX\0\0"
TNT_MAGIC = b"TNTIDX\0\0"
VERSION = 1
MMAP_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
TNT_HEADER = struct.Struct("<8sQQQQQQ")  # magic, version, dtype code, element bytes, items, sizes, boundaries
# Code 7 is float64 in the classic reader and float32 in the newer one. The header does not state which, so it is
# refused. Code 6 is float64 in both.
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
# Megatron's limit, not 65,536; other writers use the latter, and their headers state their type.
SMALL_VOCABULARY = 65_500
# The lengths of mmap are int32.
MAX_SEQUENCE_TOKENS = (1 << 31) - 1
VERIFY_TOKENS = 1 << 22


class IndexedError(UsageError):
    """A dataset that violates the format; has all problems found."""

    def __init__(self, prefix: Path, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n  ".join([f"{prefix}: invalid indexed dataset", *map(str, problems)]))


def bin_path(prefix: Path) -> Path:
    """The path of the tokens."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The path of the index."""
    return prefix.with_name(prefix.name + ".idx")


def best_dtype(num_ids: int) -> np.dtype[Any]:
    """The token type for ids below ``num_ids``, as in Megatron: uint16 below 65,500, else int32."""
    return np.dtype(np.uint16 if num_ids < SMALL_VOCABULARY else np.int32)


@dataclass(frozen=True, kw_only=True)
class Index:
    """The index of a dataset, in tokens and sequences for all forms.

    Attributes:
        form: ``mmap`` or ``tnt`` (``cached`` and ``lazy`` have the same bytes).
        dtype: data type of a token.
        lengths: tokens per sequence ``[sequences]``.
        documents: number of sequences before each document, and in total ``[documents + 1]``.
        modes: mode of each sequence of a multimodal dataset ``[sequences]``, or None.
    """

    form: str
    dtype: np.dtype[Any]
    lengths: IntColumn
    documents: IntColumn
    modes: IntColumn | None = None

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return max(len(self.documents) - 1, 0)

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.lengths.total()


def encode_mmap(index: Index) -> Iterator[bytes]:
    """The bytes of an ``mmap`` index, in pieces.

    Raises:
        UsageError: a sequence is too long for 32-bit lengths.
    """
    yield MMAP_HEADER.pack(MMAP_MAGIC, VERSION, CODES[index.dtype], len(index.lengths), len(index.documents))
    sequence = 0
    for block in index.lengths.blocks():
        if int(block.max(initial=0)) > MAX_SEQUENCE_TOKENS:
            at = int(block.argmax())
            raise UsageError(
                f"sequence {sequence + at} has {block[at]} tokens; the maximum is {MAX_SEQUENCE_TOKENS}: split it"
            )
        sequence += len(block)
        yield block.astype("<i4").tobytes()
    yield from _encode(exclusive_cumsum(index.lengths, index.dtype.itemsize))
    yield from _encode(index.documents)
    if index.modes is not None:
        yield from _encode(index.modes, "i1")


def encode_tnt(index: Index) -> Iterator[bytes]:
    """The bytes of a ``cached`` or ``lazy`` index, in pieces; its data offsets count tokens, not bytes."""
    count = len(index.lengths)
    yield TNT_HEADER.pack(
        TNT_MAGIC, VERSION, CODES[index.dtype], index.dtype.itemsize, count, count, len(index.documents)
    )
    for column in (arange(count + 1), bounds(index.lengths), index.lengths, index.documents):
        yield from _encode(column)


def _encode(column: IntColumn, kind: str = "<i8") -> Iterator[bytes]:
    for block in column.blocks():
        yield block.astype(kind).tobytes()


def encode_index(index: Index) -> Iterator[bytes]:
    """The bytes of an index in its form."""
    return encode_mmap(index) if index.form == "mmap" else encode_tnt(index)


def _column(handle: IO[bytes], kind: str, count: int, size: int) -> IntColumn:
    """The ``count`` numbers at the position of ``handle``, which moves past them; ``size`` is the file size."""
    width, at = np.dtype(kind).itemsize, handle.seek(0, os.SEEK_CUR)
    if count * width > size - at:
        raise _TruncatedIndexError(
            f"the header states {count} values of {width} bytes, but {max(size - at, 0)} bytes remain"
        )
    handle.seek(count * width, os.SEEK_CUR)
    return in_file(Path(handle.name), kind, count, at)


class _TruncatedIndexError(Exception):
    """The file is shorter than its header states."""


def read_index(prefix: Path) -> Index:
    """Read ``PREFIX.idx``, and check it against itself and the size of ``PREFIX.bin``.

    Raises:
        IndexedError: with all problems found.
        UsageError: a file is missing.
    """
    path = idx_path(prefix)
    check_regular(path)
    check_regular(bin_path(prefix))
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
                raise IndexedError(prefix, [Problem("idx.magic", "magic", f"is {magic!r}, not that of a known form")])
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except _TruncatedIndexError as error:
        raise IndexedError(prefix, [Problem("idx", "truncated", str(error))]) from error
    if index is not None:
        problems = [*problems, *_problems(index, tokens_bytes)]
    if problems or index is None:
        raise IndexedError(prefix, problems)
    return index


def _header(handle: IO[bytes], layout: struct.Struct) -> tuple[Any, ...]:
    head = handle.read(layout.size)
    if len(head) < layout.size:
        raise _TruncatedIndexError(f"has {len(head)} bytes; the header has {layout.size}")
    return layout.unpack(head)


def _code_problems(version: int, code: int, element_bytes: int | None = None) -> list[Problem]:
    if version != VERSION:
        return [Problem("idx.version", "version", f"is {version}; must be {VERSION}")]
    if code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        return [Problem("idx.dtype", "choice", f"is {code}; must be one of {known}")]
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
    lengths = _column(handle, "<i4", count, size)
    pointers = _column(handle, "<i8", count, size)
    documents = _column(handle, "<i8", boundaries, size)
    # The header does not state whether modes follow; exactly one byte per sequence at the end means that they do.
    left = size - handle.seek(0, os.SEEK_CUR)
    modes = _column(handle, "i1", count, size) if left == count and count else None
    if left and modes is None:
        problems.append(Problem("idx", "length", f"has {left} bytes after its content"))
    index = Index(form="mmap", dtype=dtype, lengths=lengths, documents=documents, modes=modes)
    wrong = _first_difference(pointers, exclusive_cumsum(lengths, dtype.itemsize))
    if wrong is not None:
        at, found, expected = wrong
        problems.append(
            Problem(f"idx.pointers[{at}]", "order", f"is {found}; must be {expected}, the sum of the lengths before it")
        )
    return index, problems


def _first_difference(found: IntColumn, expected: IntColumn) -> tuple[int, int, int] | None:
    """The first difference of two columns of the same length: position, and both numbers; None if they are equal."""
    begin = 0
    theirs = np.zeros(0, dtype=np.int64)
    others = expected.blocks()
    for mine in found.blocks():
        # The blocks of the two columns may have different sizes.
        while len(theirs) < len(mine):
            theirs = np.concatenate([theirs, next(others)])
        wrong = np.flatnonzero(mine != theirs[: len(mine)])
        if len(wrong):
            at = int(wrong[0])
            return begin + at, int(mine[at]), int(theirs[at])
        begin, theirs = begin + len(mine), theirs[len(mine) :]
    return None


def _read_tnt(handle: IO[bytes], size: int) -> tuple[Index | None, list[Problem]]:
    _, version, code, element_bytes, count, sizes, boundaries = _header(handle, TNT_HEADER)
    problems = _code_problems(version, code, element_bytes)
    if problems:
        return None, problems
    if sizes != count:
        return None, [Problem("idx.sizes", "length", f"has {sizes} values for {count} items; must have one per item")]
    dimensions = _column(handle, "<i8", count + 1, size)
    offsets = _column(handle, "<i8", count + 1, size)
    lengths = _column(handle, "<i8", sizes, size)
    documents = _column(handle, "<i8", boundaries, size)
    if left := size - handle.seek(0, os.SEEK_CUR):
        problems.append(Problem("idx", "length", f"has {left} bytes after its content"))
    index = Index(form="tnt", dtype=np.dtype(DTYPES[code]), lengths=lengths, documents=documents)
    for name, column, expected in (
        ("dim_offsets", dimensions, arange(count + 1)),
        ("data_offsets", offsets, bounds(lengths)),
    ):
        wrong = _first_difference(column, expected)
        if wrong is not None:
            at, found, right = wrong
            problems.append(Problem(f"idx.{name}[{at}]", "order", f"is {found}; must be {right}"))
    return index, problems


def _problems(index: Index, tokens_bytes: int) -> list[Problem]:
    problems = []
    begin = 0
    for block in index.lengths.blocks():
        if block.min(initial=0) < 0:
            at = int(np.argmax(block < 0))
            problems.append(Problem(f"idx.lengths[{begin + at}]", "range", f"is {block[at]}; must not be negative"))
            break
        begin += len(block)
    # Exactly: a longer .bin is one whose index was not renewed, which readers would not notice.
    expected = index.num_tokens * index.dtype.itemsize
    if tokens_bytes != expected:
        problems.append(Problem("bin", "length", f"has {tokens_bytes} bytes; the index states {expected}"))
    return [*problems, *_document_problems(index)]


def _document_problems(index: Index) -> list[Problem]:
    if len(index.documents) == 0:
        return [Problem("idx.documents", "length", "is empty; must have at least one 0")]
    begin, before = 0, 0
    problems = []
    for block in index.documents.blocks():
        if begin == 0 and block[0] != 0:
            problems.append(Problem("idx.documents[0]", "range", f"is {block[0]}; must be 0"))
            before = int(block[0])
        falls = np.flatnonzero(block < np.concatenate([[before], block[:-1]]))
        if len(falls):
            at = int(falls[0])
            return [
                *problems,
                Problem(f"idx.documents[{begin + at}]", "order", f"is {block[at]}, below the previous one"),
            ]
        begin, before = begin + len(block), int(block[-1])
    if before != len(index.lengths):
        rule = f"is {before}; must be {len(index.lengths)}, the number of sequences"
        problems.append(Problem(f"idx.documents[{begin - 1}]", "range", rule))
    return problems


class IndexedReader:
    """Reads sequences of a dataset by number; tokens are memory-mapped.

    Args:
        prefix: prefix of the dataset.

    Raises:
        IndexedError: the dataset violates the format.
    """

    def __init__(self, prefix: Path) -> None:
        self.index = read_index(prefix)
        self._prefix = prefix
        # np.memmap refuses an empty file.
        empty = self.index.num_tokens == 0
        self._tokens: npt.NDArray[Any] = (
            np.zeros(0, dtype=self.index.dtype)
            if empty
            else np.memmap(bin_path(prefix), dtype=self.index.dtype.newbyteorder("<"), mode="r")
        )

    def __len__(self) -> int:
        return len(self.index.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """The tokens of a sequence ``[tokens]``."""
        return self._tokens[self._starts[sequence] : self._starts[sequence + 1]]

    @cached_property
    def _starts(self) -> Int64s:
        return bounds(self.index.lengths).load()

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """All tokens in blocks ``[up to VERIFY_TOKENS]``, read instead of mapped."""
        kind = self.index.dtype.newbyteorder("<")
        # Mapped pages would count as memory of the process until they are evicted.
        for at in range(0, self.index.num_tokens, VERIFY_TOKENS):
            yield np.fromfile(bin_path(self._prefix), kind, VERIFY_TOKENS, offset=at * kind.itemsize)

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens ``[tokens]``."""
        return self._tokens


def describe(prefix: Path) -> dict[str, Any]:
    """The JSON view of a dataset (``indexed.schema.json``); fields of a missing sidecar are None."""
    reader = IndexedReader(prefix)
    sidecar = read_sidecar(prefix)
    tokenizer = sidecar["tokenizer"] if sidecar is not None else None
    index = reader.index
    extremes = index.lengths.extremes()
    return {
        "format": "megatron.indexed",
        "form": index.form,
        "dtype": index.dtype.name,
        "sequences": len(index.lengths),
        "documents": index.num_documents,
        "tokens": index.num_tokens,
        "bin_bytes": index.num_tokens * index.dtype.itemsize,
        "idx_bytes": os.path.getsize(idx_path(prefix)),
        "shortest_sequence_tokens": extremes[0] if extremes else None,
        "longest_sequence_tokens": extremes[1] if extremes else None,
        "largest_id": max((int(block.max()) for block in reader.blocks()), default=None)
        if index.dtype.kind in "iu"
        else None,
        "multimodal": index.modes is not None,
        "has_sidecar": sidecar is not None,
        "tokenizer": None if tokenizer is None else tokenizer["type"],
        "vocab_size": None if tokenizer is None else tokenizer["vocab_size"],
        "vocab_sha256": None if tokenizer is None else tokenizer["vocab_sha256"],
        "eod_id": None if sidecar is None else sidecar["eod_id"],
        "inputs": None if sidecar is None else len(sidecar["inputs"]),
    }


def verify(prefix: Path, vocabulary: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Check structure, tokens and, with a sidecar, checksums.

    Args:
        prefix: prefix of the dataset.
        vocabulary: vocabulary of the tokenizer. By default, the vocabulary size of the sidecar bounds the tokens;
            without a sidecar, tokens must not be negative.

    Returns:
        The JSON view of the dataset.

    Raises:
        IndexedError: with all problems found.
    """
    view = describe(prefix)
    sidecar = read_sidecar(prefix)
    problems = [] if sidecar is None else content_problems(sidecar, bin_path(prefix), idx_path(prefix))
    num_ids: int | None = view["vocab_size"]
    if vocabulary is not None:
        num_ids = max(vocabulary.values(), default=-1) + 1
        if view["vocab_sha256"] not in (None, digest_vocabulary(vocabulary)):
            rule = f"has {num_ids:,} ids and differs from that of the dataset, which has {view['vocab_size']:,}"
            problems.append(Problem("tokenizer", "vocabulary", rule))
    problems += _token_problems(prefix, num_ids)
    if problems:
        raise IndexedError(prefix, problems)
    return view


def _token_problems(prefix: Path, num_ids: int | None) -> list[Problem]:
    begin = 0
    for block in IndexedReader(prefix).blocks():
        bad = block < 0 if num_ids is None else (block < 0) | (block >= num_ids)
        if bad.any():
            at = int(np.argmax(bad))
            rule = "must not be negative" if num_ids is None else f"must be from 0 to {num_ids - 1}"
            return [Problem(f"bin.tokens[{begin + at}]", "range", f"is {block[at]}; {rule}")]
        begin += len(block)
    return []
