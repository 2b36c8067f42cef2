"""Binarize: documents to tokens, tokens to an indexed data set that Megatron reads.

Each slice is tokenized into raw tokens and sequence lengths; the parts are then joined by copying, and the index is
computed from the lengths. The index takes its name last: a data set without ``.idx`` is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .formats.indexed import Index, best_dtype, bin_path, encode_index, idx_path
from .joining import copy_into
from .plan import Plan
from .settings import BinarizeSettings
from .tasks import Phase, Task, marker_of
from .tokenizers import Tokenizer, load_tokenizer

BATCH_CHARACTERS = 1 << 20
TOKENS, LENGTHS = "tokens.bin", "lengths.i32"


def binarize_phases(plan: Plan) -> list[Phase]:
    """The phases of ``binarize``."""
    return [
        Phase(name="tokenize", run="binarize:tokenize_slice", tasks=len(plan.tasks), reads=True),
        Phase(name="join", run="binarize:join", tasks=1),
    ]


def data_prefix(output: Path, key: str) -> Path:
    """``PREFIX_text_document``: the data set's name, as the classic tools make it."""
    return output.with_name(f"{output.name}_{key}_document")


@functools.lru_cache(maxsize=2)
def _tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


def _eod(tokenizer: Tokenizer, settings: BinarizeSettings) -> int | None:
    if not settings.append_eod:
        return None
    found = tokenizer.token_id(settings.eod_token)
    if found is None:
        raise UsageError(
            f"{settings.tokenizer}: has no token {settings.eod_token!r} to end documents with; name it by --eod-token"
        )
    return found


class SequenceWriter:
    """Appends batches of sequences to a file of tokens and a file of lengths."""

    def __init__(self, tokens: IO[bytes], lengths: IO[bytes], dtype: np.dtype[Any], eod: int | None) -> None:
        self._tokens, self._lengths, self._dtype, self._eod = tokens, lengths, dtype, eod
        self.num_sequences = self.num_tokens = self.num_empty = 0

    def write(self, encoded: Sequence[Sequence[int]], *, keep_empty: bool) -> None:
        """Append one sequence for each document that has tokens, or for every one if ``keep_empty``."""
        kept = [ids for ids in encoded if len(ids) or keep_empty]
        self.num_empty += len(encoded) - len(kept)
        lengths = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
        extra = 0 if self._eod is None else 1
        flat: npt.NDArray[Any] = np.empty(int(lengths.sum()) + extra * len(kept), dtype=np.int64)
        at = 0
        for ids in kept:
            flat[at : at + len(ids)] = ids
            at += len(ids)
            if self._eod is not None:
                flat[at] = self._eod
                at += 1
        self._tokens.write(self._checked(flat).tobytes())
        self._lengths.write((lengths + extra).astype("<i4").tobytes())
        self.num_sequences += len(kept)
        self.num_tokens += len(flat)

    def _checked(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        largest = int(flat.max(initial=0))
        if largest > np.iinfo(self._dtype).max:
            raise UsageError(f"the tokenizer gave the id {largest}, which {self._dtype.name} cannot hold")
        return flat.astype(self._dtype)


def tokenize_slice(task: Task) -> None:
    """Task function: the tokens and lengths of one slice."""
    settings: BinarizeSettings = task.job.settings
    tokenizer = _tokenizer(settings.tokenizer)
    dtype = best_dtype(tokenizer.num_ids).newbyteorder("<")
    writer = SequenceWriter(
        task.create(task.part(TOKENS)), task.create(task.part(LENGTHS)), dtype, _eod(tokenizer, settings)
    )
    waiting: list[str] = []
    size = 0
    for _, text in task.documents(settings.json_key):
        waiting.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            writer.write(tokenizer.encode_batch(waiting), keep_empty=settings.keep_empty)
            waiting, size = [], 0
    writer.write(tokenizer.encode_batch(waiting), keep_empty=settings.keep_empty)
    task.tally.documents_kept += writer.num_sequences
    task.tally.bytes_out += writer.num_tokens * dtype.itemsize
    if writer.num_empty:
        task.tally.dropped["empty"] = writer.num_empty
    task.result.update(tokens=writer.num_tokens, num_ids=tokenizer.num_ids)


def join(task: Task) -> None:
    """Task function: the data set of all slices."""
    settings: BinarizeSettings = task.job.settings
    prefix = data_prefix(task.job.output, settings.json_key)
    slices = range(len(task.plan.tasks))
    num_ids = max((marker_of(task, "tokenize", i)["result"]["num_ids"] for i in slices), default=0)
    copy_into(task.create(bin_path(prefix), plain=True), [task.part(TOKENS, i) for i in slices])
    lengths = np.concatenate([np.fromfile(task.part(LENGTHS, i), dtype="<i4") for i in slices]).astype(np.int64)
    index = Index(
        form="mmap",
        dtype=best_dtype(num_ids),
        lengths=lengths,
        documents=np.arange(len(lengths) + 1, dtype=np.int64),
    )
    writer = task.create(idx_path(prefix))
    for piece in encode_index(index):
        writer.write(piece)
    task.facts.update(tokens=index.num_tokens, sequences=len(lengths), data_prefix=str(prefix), num_ids=num_ids)
