"""The step ``binarize``: documents to tokens, tokens to an indexed dataset.

    slice of documents ─ tokenize ─> tokens-K.bin      tokens of the slice, in the final data type
                                     lengths-K.i32     tokens per sequence
                                     documents-K.i32   sequences per document
    parts of all slices ─ join ────> PREFIX_KEY_document.bin            concatenated tokens
                                     PREFIX_KEY_document.dataset.json   sidecar: tokenizer, inputs, checksums
                                     PREFIX_KEY_document.idx            computed from the lengths

K is the index of a text key; each key becomes one dataset. Tokens are hashed while they are written, so the sidecar
costs no second pass. ``.idx`` is renamed last: a dataset without it is incomplete.

The data type of the tokens follows from the vocabulary size, not from the tokens, so all slices agree without
communication.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .._common.errors import UsageError
from ..config.settings import BinarizeSettings, IndexForm
from ..formats.dataset import Piece, copy_pieces, digest_file, digest_vocabulary, encode_sidecar, sidecar_path
from ..formats.indexed import Index, best_dtype, bin_path, encode_index, idx_path
from ..formats.int_columns import IntColumn, bounds, concatenate, map_file
from ..io.concat_files import append_files
from ..io.jsonl import BadLineError, parse_line, parse_plain_line, text_of
from ..runner.task import Phase, Task, read_marker
from ..runner.task_manifest import TaskManifest
from .provenance import new_sidecar, steps_of, tokenizer_files
from .sentences import split_sentences
from .tokenizers import Encoded, Tokenizer, TokenizerFiles, load_tokenizer

# Texts of a call of the tokenizer; about 1 MiB amortizes the call, and bounds the memory of ids and texts.
BATCH_CHARACTERS = 1 << 20


def binarize_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``binarize``."""
    return [
        Phase(name="tokenize", run="tokenization.binarize:tokenize_slice", tasks=len(manifest.tasks), reads=True),
        Phase(name="join", run="tokenization.binarize:join", tasks=1),
    ]


# A worker runs many tasks: it loads the tokenizer, and compares the engines, once.
@functools.lru_cache(maxsize=2)
def _tokenizer(files: TokenizerFiles) -> Tokenizer:
    return load_tokenizer(files)


def tokenizer_of(settings: BinarizeSettings) -> Tokenizer:
    """The tokenizer of the settings."""
    return _tokenizer(
        TokenizerFiles(
            kind=settings.tokenizer_type,
            model=settings.tokenizer,
            vocab=settings.vocab_file,
            merges=settings.merge_file,
            engine=settings.engine,
        )
    )


def eod_of(tokenizer: Tokenizer, settings: BinarizeSettings) -> int | None:
    """The end-of-document id; None if documents are not terminated.

    Raises:
        UsageError: documents shall be terminated, and the tokenizer has no such token.
    """
    if not settings.append_eod:
        return None
    found = tokenizer.token_id(settings.eod_token)
    if found is None:
        missing = "end-of-document token" if settings.eod_token is None else f"token {settings.eod_token!r}"
        raise UsageError(f"the tokenizer has no {missing}; select one of its tokens with --eod-token")
    return found


def token_dtype(num_ids: int, form: IndexForm) -> np.dtype[Any]:
    """The data type of tokens.

    Args:
        num_ids: one more than the largest id of the tokenizer, including added tokens.
        form: form of the index; ``cached`` and ``lazy`` always have int32, as in Megatron's builder.
    """
    return best_dtype(num_ids) if form is IndexForm.MMAP else np.dtype(np.int32)


def with_eod(encoded: Encoded, ends: npt.NDArray[np.bool_], eod: int) -> Encoded:
    """Append ``eod`` to some sequences.

    Args:
        encoded: the sequences.
        ends: whether a sequence ends a document ``[sequences]``.
        eod: end-of-document id.

    Returns:
        All sequences; those that end a document are one token longer.
    """
    # A bool counts 1: sequences that end a document become one token longer.
    lengths = encoded.lengths + ends
    ids = np.full(int(lengths.sum()), eod, dtype=np.int64)
    keep = np.ones(len(ids), dtype=np.bool_)
    keep[np.cumsum(lengths)[ends] - 1] = False
    ids[keep] = encoded.ids
    return Encoded(ids=ids, lengths=lengths)


def pack(encoded: Encoded, counts: npt.NDArray[np.int64], eod: int | None, *, keep_empty: bool) -> tuple[Encoded, Any]:
    """Remove empty sequences and documents, and append end-of-document ids.

    Args:
        encoded: sequences of some documents.
        counts: sequences per document ``[documents]``, int64.
        eod: end-of-document id, or None.
        keep_empty: keep documents without tokens.

    Returns:
        The remaining sequences, and their number per remaining document ``[documents]``, int64.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    is_filled = encoded.lengths > 0
    sequences = Encoded(ids=encoded.ids, lengths=encoded.lengths[is_filled])
    owner = owner[is_filled]
    remaining = np.bincount(owner, minlength=len(counts))
    if eod is not None and len(owner):
        last = np.ones(len(owner), dtype=np.bool_)
        last[:-1] = owner[1:] != owner[:-1]
        sequences = with_eod(sequences, last, eod)
    return sequences, remaining if keep_empty else remaining[remaining > 0]


class SequenceWriter:
    """Writes batches of sequences to three files: tokens, sequence lengths, sequences per document.

    Args:
        task: the task.
        key: index of the text key.
        dtype: data type of the tokens.
    """

    def __init__(self, task: Task, key: int, dtype: np.dtype[Any]) -> None:
        self._files: list[IO[bytes]] = [task.create(task.part(name)) for name in part_names(key)]
        self._dtype = dtype
        self._digest = hashlib.sha256()
        self.num_documents = self.num_tokens = 0

    def write(self, encoded: Encoded, counts: npt.NDArray[Any]) -> None:
        """Append sequences.

        Args:
            encoded: the sequences.
            counts: sequences per document ``[documents]``.

        Raises:
            UsageError: an id exceeds the data type.
        """
        # Checked in every block: a conversion to uint16 would wrap around silently.
        largest = int(encoded.ids.max(initial=0))
        if largest > np.iinfo(self._dtype).max:
            raise UsageError(
                f"the tokenizer returned the id {largest}, above the maximum of {self._dtype.name}; "
                "its vocabulary is inconsistent: check its files"
            )
        payload = encoded.ids.astype(self._dtype.newbyteorder("<")).tobytes()
        self._digest.update(payload)
        self._files[0].write(payload)
        self._files[1].write(encoded.lengths.astype("<i4").tobytes())
        self._files[2].write(counts.astype("<i4").tobytes())
        self.num_documents += len(counts)
        self.num_tokens += len(encoded.ids)

    def piece(self) -> Piece:
        """Bytes and SHA-256 of the written tokens."""
        return {"bytes": self.num_tokens * self._dtype.itemsize, "sha256": self._digest.hexdigest()}


def part_names(key: int) -> tuple[str, str, str]:
    """Names of a slice's parts for the dataset of a key."""
    return f"tokens-{key}.bin", f"lengths-{key}.i32", f"documents-{key}.i32"


def tokenize_slice(task: Task) -> None:
    """Task function: tokens, lengths and documents of one slice, for each key."""
    settings: BinarizeSettings = task.job.settings
    tokenizer = tokenizer_of(settings)
    eod = eod_of(tokenizer, settings)
    dtype = token_dtype(tokenizer.num_ids, settings.dataset_impl)
    writers = [SequenceWriter(task, key, dtype) for key in range(len(settings.json_keys))]
    waiting: list[list[str]] = [[] for _ in writers]
    size = num_documents = 0

    def flush() -> None:
        for texts, writer in zip(waiting, writers, strict=True):
            sequences, counts = _cut(texts, settings)
            encoded = tokenizer.encode_batch(sequences)
            writer.write(*pack(encoded, counts, eod, keep_empty=settings.keep_empty))
            texts.clear()

    for row in task.objects(parse=parse_plain_line if settings.plain_text else parse_line):
        try:
            found = [text_of(row.value, key) for key in settings.json_keys]
        except BadLineError as error:
            task.reject_row(row, error.reason)
            continue
        num_documents += 1
        for texts, text in zip(waiting, found, strict=True):
            texts.append(text if settings.keep_empty or not text.isspace() else "")
            size += len(text)
        if size >= BATCH_CHARACTERS:
            flush()
            size = 0
    flush()
    first = writers[0]
    task.counts.documents_out += first.num_documents
    task.counts.bytes_out += sum(writer.num_tokens for writer in writers) * dtype.itemsize
    if num_documents > first.num_documents:
        task.counts.dropped["empty"] = num_documents - first.num_documents
    task.result.update(
        num_ids=tokenizer.num_ids,
        eod_id=eod,
        tokens=[writer.piece() for writer in writers],
        input=digest_file(task.slice.path, *task.slice.stored),
    )
    # Equal for all tasks, so it is computed once.
    if task.index == 0:
        task.result["vocab_sha256"] = digest_vocabulary(tokenizer.vocabulary())


def _cut(texts: Sequence[str], settings: BinarizeSettings) -> tuple[list[str], npt.NDArray[np.int64]]:
    if not settings.split_sentences:
        return list(texts), np.ones(len(texts), dtype=np.int64)
    cut = [split_sentences(text, keep_newlines=settings.keep_newlines) for text in texts]
    counts = np.fromiter(map(len, cut), dtype=np.int64, count=len(cut))
    return [sentence for sentences in cut for sentence in sentences], counts


def join(task: Task) -> None:
    """Task function: the datasets of all slices, one per key, with their sidecars."""
    settings: BinarizeSettings = task.job.settings
    slices = range(len(task.manifest.tasks))
    results = [read_marker(task, "tokenize", index)["result"] for index in slices]
    # From the markers: this task need not load the tokenizer.
    num_ids = max((result["num_ids"] for result in results), default=0)
    dtype = token_dtype(num_ids, settings.dataset_impl)
    first = results[0]
    tokenizer = {
        "type": settings.tokenizer_type.value,
        "vocab_size": first["num_ids"],
        "vocab_sha256": first["vocab_sha256"],
        "files": tokenizer_files(settings),
    }
    form = "mmap" if settings.dataset_impl is IndexForm.MMAP else "tnt"
    for number, key in enumerate(settings.json_keys):
        prefix = settings.data_prefix(task.job.output, key)
        index = join_parts(
            task, results, prefix, part=number, form=form, dtype=dtype, tokenizer=tokenizer, eod=first["eod_id"]
        )
        if number == 0:
            task.facts.update(
                tokens=index.num_tokens, sequences=len(index.lengths), data_prefix=str(prefix), num_ids=num_ids
            )


def join_parts(
    task: Task,
    results: Sequence[dict[str, Any]],
    prefix: Path,
    *,
    part: int,
    form: str,
    dtype: np.dtype[Any],
    tokenizer: dict[str, Any] | None,
    eod: int | None,
) -> Index:
    """Write a dataset with its sidecar from the parts of all slices.

    Args:
        task: the task.
        results: results of the tasks of the slices; ``tokens`` has the piece of each part.
        prefix: name of the dataset.
        part: which of the slices' parts.
        form: form of the index.
        dtype: data type of the tokens.
        tokenizer: the tokenizer, as the sidecar states it.
        eod: id at the end of each document, or None.
    """
    slices = range(len(task.manifest.tasks))
    tokens, lengths, documents = part_names(part)
    append_files(task.create(bin_path(prefix), plain=True), [task.part(tokens, i) for i in slices])
    index = Index(form=form, dtype=dtype, lengths=_numbers(task, lengths), documents=bounds(_numbers(task, documents)))
    # Outputs are renamed in the order of their creation: the sidecar before ``.idx``, which completes the dataset.
    sidecar = task.create(sidecar_path(prefix), plain=True)
    idx = copy_pieces(encode_index(index), task.create(idx_path(prefix)))
    inputs: dict[str, list[Piece]] = {}
    for source, result in zip(task.manifest.tasks, results, strict=True):
        inputs.setdefault(str(source.path), []).extend([result["input"]] if result["input"]["bytes"] else [])
    document = new_sidecar(
        tokenizer=tokenizer,
        eod_id=eod,
        inputs=[{"path": path, "pieces": pieces} for path, pieces in inputs.items()],
        steps=steps_of(task.job),
        bin_pieces=[result["tokens"][part] for result in results],
        idx=idx,
    )
    sidecar.write(encode_sidecar(document))
    return index


def _numbers(task: Task, kind: str) -> IntColumn:
    """The numbers of one kind of all slices; they stay on disk."""
    return concatenate([map_file(task.part(kind, index), "<i4") for index in range(len(task.manifest.tasks))])
