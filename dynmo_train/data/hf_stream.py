"""Samples of a data set that Hugging Face ``datasets`` streams: read, tokenized and packed while a run needs them.

    files or hub --datasets, streaming--> documents --block, shuffle--> token ids, an end-of-document id after each
        --cut at multiples of T--> samples of T + 1 tokens

Sample ``n`` has the tokens ``[n T, n T + T]`` of all documents in their order, as in ``gpt_dataset``: a sample begins
with the last token of the one before. After the last document the next epoch follows. The order is a function of the
data set, the options and the seed; it does not depend on the number of ranks or workers.

A stream has no index, so that a sample is found by reading what precedes it. A checkpoint has the position, from which
a resumed run reads on: the epoch, the file and the reader's state at the start of a block of documents, and how many
documents and tokens of the block precede the sample. Blocks make the shuffle exact on resume: ``datasets`` has a
shuffle buffer too, but loses its contents when it resumes.

Memory, per process that reads: a block (``--hf-shuffle-buffer`` documents, at least ``BLOCK``), the tokens of a
document and of a sample, and what the reader of the file format reads at once (a row group of Parquet, 10 MiB of JSON).
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.errors import DynmoError, MissingExtraError, UsageError
from ..config import Config
from .sample_format import SPLITS, Int64Array, SampleError, Split
from .tokenizer import TokenizerFiles, open_tokenizer

BLOCK = 64
"""Documents of a block without a shuffle; a resumed run reads at most one block again."""
ENDLESS = 1 << 62
"""Number of samples of a stream, which starts again after its last document."""
BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
REMEDY = "give the name of a data set on the Hugging Face hub, which needs a network, or the path of local files"


class StreamError(SampleError):
    """A stream cannot be read, or has no text; all ranks raise it in the same step."""


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Which documents a stream has, and their order.

    Attributes:
        flag: the option that names the data set, for messages.
        dataset: name on the hub, folder, file, or pattern of files.
        name: configuration of the data set; None: its default.
        split: split of the data set.
        revision: branch, tag or commit on the hub; None: the latest.
        field: field with the text.
        shuffle_buffer: documents that are shuffled together; 0 keeps the order of the files.
        seed: seed of the shuffles.
    """

    flag: str
    dataset: str
    name: str | None
    split: str
    revision: str | None
    field: str
    shuffle_buffer: int
    seed: tuple[int, ...]

    @property
    def label(self) -> str:
        """The option and its value."""
        return f"{self.flag} {self.dataset}"


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """Where a sample begins; its fields are those of ``x_data_position`` in a checkpoint.

    Attributes:
        sample: number of the sample.
        epoch: passes over the data set before it.
        block: blocks of the epoch before it.
        shard: files of the epoch before the start of the block, in the order of the epoch.
        state: state of the reader of that file at the start of the block; None at the start of the file.
        document: documents of the block before it, in shuffled order.
        token: tokens of the document before it.
    """

    sample: int = 0
    epoch: int = 0
    block: int = 0
    shard: int = 0
    state: Mapping[str, Any] | None = None
    document: int = 0
    token: int = 0


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "datasets") from error
    return datasets


@contextmanager
def _reported(spec: StreamSpec) -> Iterator[None]:
    try:
        yield
    except DynmoError:
        raise
    except Exception as error:  # of datasets, of its file systems, of the network: they have no common class
        text = str(error).strip() or type(error).__name__
        raise StreamError(f"{spec.label}: {text.rstrip('.')}; {REMEDY}") from error


def _file_builder(dataset: str) -> str | None:
    """The builder of ``datasets`` for a file, or for a pattern of files; None for a folder or a name on the hub."""
    path = Path(dataset)
    if path.suffix in COMPRESSED:
        path = path.with_suffix("")
    builder = BUILDERS.get(path.suffix)
    return builder if builder and not Path(dataset).is_dir() else None


def open_shards(spec: StreamSpec) -> list[Any]:
    """The files of a data set as streams of ``datasets``, in their order.

    Raises:
        StreamError: the data set cannot be opened.
        MissingExtraError: ``datasets`` is not installed.
    """
    load, builder = _library().load_dataset, _file_builder(spec.dataset)
    with _reported(spec):
        if builder is not None:
            if glob.has_magic(spec.dataset) and not glob.glob(spec.dataset, recursive=True):
                raise StreamError(f"{spec.label}: no file matches the pattern")
            whole = load(builder, spec.name, data_files=spec.dataset, split=spec.split, streaming=True)
        else:
            whole = load(spec.dataset, spec.name, split=spec.split, revision=spec.revision, streaming=True)
        return [whole.shard(num_shards=whole.num_shards, index=index) for index in range(whole.num_shards)]


def _text(spec: StreamSpec, example: Mapping[str, Any]) -> str:
    if spec.field not in example:
        raise StreamError(
            f"{spec.label} has the fields {', '.join(sorted(example))}, and no {spec.field!r}; give the field with the"
            " text: --hf-text-field"
        )
    text = example[spec.field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise StreamError(
            f"{spec.label}: the field {spec.field!r} has a {type(text).__name__}; it must be text: --hf-text-field"
        )
    return "" if text.isspace() else text


def read_blocks(spec: StreamSpec, start: StreamPosition) -> Iterator[tuple[StreamPosition, list[str]]]:
    """The documents from the block at ``start`` on, over epochs without end; empty documents are left out.

    Yields:
        Position of the block, whose ``sample``, ``document`` and ``token`` are 0, and its documents, shuffled.

    Raises:
        StreamError: the data set cannot be read, or has no text.
    """
    at = replace(start, sample=0, document=0, token=0)
    while True:
        is_empty = at.block == 0
        for block in _read_epoch(spec, at):
            is_empty = False
            yield block
        if is_empty:
            raise StreamError(f"{spec.label} has no text in the field {spec.field!r} of the split {spec.split!r}")
        at = StreamPosition(epoch=at.epoch + 1)


def _read_epoch(spec: StreamSpec, at: StreamPosition) -> Iterator[tuple[StreamPosition, list[str]]]:
    """The blocks of the epoch of ``at`` from there on."""
    shards, size = open_shards(spec), max(BLOCK, spec.shuffle_buffer)
    order = np.arange(len(shards))
    if spec.shuffle_buffer:
        order = np.random.default_rng([*spec.seed, at.epoch]).permutation(order)
    documents: list[str] = []
    for number in range(at.shard, len(order)):
        shard = shards[order[number]]
        if number == at.shard and at.state is not None:
            shard.load_state_dict(dict(at.state))
        for text in _texts(spec, shard):
            documents.append(text)
            if len(documents) == size:
                yield at, _shuffled(spec, at, documents)
                at, documents = replace(at, block=at.block + 1, shard=number, state=shard.state_dict()), []
    if documents:
        yield at, _shuffled(spec, at, documents)


def _texts(spec: StreamSpec, shard: Any) -> Iterator[str]:
    examples = iter(shard)
    while True:
        with _reported(spec):
            example = next(examples, None)
        if example is None:
            return
        if text := _text(spec, example):
            yield text


def _shuffled(spec: StreamSpec, at: StreamPosition, documents: list[str]) -> list[str]:
    if not spec.shuffle_buffer:
        return documents
    order = np.random.default_rng([*spec.seed, at.epoch, at.block]).permutation(len(documents))
    return [documents[index] for index in order]


@dataclass
class _Piece:
    """The tokens of a document that are not part of a complete sample yet; ``begin`` is the first of them."""

    block: StreamPosition
    document: int
    tokens: npt.NDArray[np.int64]
    begin: int


class Packer:
    """Cuts the tokens of a stream into samples, from a position on.

    Args:
        spec: the documents.
        encode: a document's token ids, with the end-of-document id.
        seq_length: tokens T that the model reads of a sample.
        start: position of the first sample.
    """

    def __init__(
        self, spec: StreamSpec, encode: Callable[[str], list[int]], seq_length: int, start: StreamPosition
    ) -> None:
        self._spec, self._seq_length, self._start = spec, seq_length, start
        self._pieces: deque[_Piece] = deque()
        self._available = 0
        self._documents = self._encoded(encode)
        self.sample = start.sample

    def _encoded(self, encode: Callable[[str], list[int]]) -> Iterator[_Piece]:
        document, begin = self._start.document, self._start.token
        last = self._start.epoch
        for block, documents in read_blocks(self._spec, self._start):
            for number in range(document, len(documents)):
                tokens = np.asarray(encode(documents[number]), dtype=np.int64)
                if len(tokens):
                    last = block.epoch
                    yield _Piece(block=block, document=number, tokens=tokens, begin=begin)
                elif block.epoch > last + 1:
                    raise StreamError(f"{self._spec.label}: the tokenizer makes no token of any document")
                begin = 0
            document = 0

    def _read(self) -> None:
        """Read documents until a sample is complete."""
        while self._available <= self._seq_length:
            piece = next(self._documents)
            self._pieces.append(piece)
            self._available += len(piece.tokens) - piece.begin

    def rows(self, count: int) -> Int64Array:
        """The next ``count`` samples, int64 ``[count, seq_length + 1]``."""
        rows_NC = np.empty((count, self._seq_length + 1), dtype=np.int64)
        for row in rows_NC:
            self._read()
            filled = 0
            for piece in self._pieces:
                tokens = piece.tokens[piece.begin : piece.begin + len(row) - filled]
                row[filled : filled + len(tokens)] = tokens
                filled += len(tokens)
            self._consume()
        return rows_NC

    def skip(self, count: int) -> None:
        """Leave out ``count`` samples."""
        for _ in range(count):
            self._read()
            self._consume()

    def _consume(self) -> None:
        """Remove the first T tokens; the token after them is also the first one of the next sample."""
        left = self._seq_length
        while left:
            piece = self._pieces[0]
            taken = min(left, len(piece.tokens) - piece.begin)
            piece.begin, left = piece.begin + taken, left - taken
            if piece.begin == len(piece.tokens):
                self._pieces.popleft()
        self._available -= self._seq_length
        self.sample += 1

    def position(self) -> StreamPosition:
        """Where the next sample begins."""
        if not self._pieces:
            return self._start
        piece = self._pieces[0]
        return replace(piece.block, sample=self.sample, document=piece.document, token=piece.begin)


class HfDataset:
    """The samples of a stream; see ``Dataset``.

    Reading is sequential: samples before the last ones that were read are read again from the start.

    Args:
        spec: the documents.
        encode: a document's token ids, with the end-of-document id.
        seq_length: tokens that the model reads of a sample.
        identity: digest of everything that the samples depend on.
        stored: position in a checkpoint; one of another stream is ignored.
    """

    def __init__(
        self,
        spec: StreamSpec,
        encode: Callable[[str], list[int]],
        seq_length: int,
        identity: str,
        stored: Mapping[str, Any] | None,
    ) -> None:
        self._spec, self._encode, self._seq_length, self._identity = spec, encode, seq_length, identity
        self._start = _stored_position(stored, identity)
        self._packer: Packer | None = None

    def __len__(self) -> int:
        return ENDLESS

    @property
    def first_sample(self) -> int:
        """The sample that reading starts from: 0, or that of a checkpoint."""
        return self._start.sample

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Rows of several samples, int64 ``[n, seq_length + 1]``; ``indices`` ``[n]`` are consecutive and ascending.

        Raises:
            StreamError: the data set cannot be read.
        """
        requested = np.asarray(indices, dtype=np.int64)
        packer, first = self._packer, int(requested[0])
        if packer is None or packer.sample > first:
            start = self._start if self._start.sample <= first else StreamPosition()
            packer = self._packer = Packer(self._spec, self._encode, self._seq_length, start)
        try:
            packer.skip(first - packer.sample)
            return packer.rows(len(requested))
        except StreamError:
            # Its generators have ended: the next request opens the data set again.
            self._packer = None
            raise

    def token_ranges(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """No ranges of any sample, since a stream has no index; ``indices`` are sample numbers, ``[n]``."""
        return [[] for _ in np.asarray(indices)]

    def position(self) -> dict[str, Any]:
        """Where the next sample begins, for a checkpoint."""
        position = self._packer.position() if self._packer is not None else self._start
        return {"stream": self._identity, **asdict(position)}


def _stored_position(stored: Mapping[str, Any] | None, identity: str) -> StreamPosition:
    if stored is None or stored.get("stream") != identity:
        return StreamPosition()
    try:
        return StreamPosition(**{name: value for name, value in stored.items() if name != "stream"})
    except TypeError:  # of another version: read from the start
        return StreamPosition()


def stream_spec(config: Config, split: Split) -> StreamSpec | None:
    """The documents of a split of ``--hf-dataset``; None where the options name none for the split."""
    data = config.data
    if data.hf_dataset is None or (split == "valid" and not (data.hf_valid_dataset or data.hf_valid_split)):
        return None
    if split == "test":
        return None
    is_other = split == "valid" and data.hf_valid_dataset is not None
    return StreamSpec(
        flag="--hf-valid-dataset" if is_other else "--hf-dataset",
        dataset=str(data.hf_valid_dataset if is_other else data.hf_dataset),
        name=None if is_other else data.hf_dataset_name,
        split=(data.hf_valid_split or ("train" if is_other else "")) if split == "valid" else data.hf_dataset_split,
        revision=None if is_other else data.hf_dataset_revision,
        field=data.hf_text_field,
        # The order of evaluations does not matter: the same samples in each epoch.
        shuffle_buffer=data.hf_shuffle_buffer if split == "train" else 0,
        seed=(config.training.seed, SPLITS.index(split)),
    )


def open_hf_dataset(config: Config, split: Split, stored: Mapping[str, Any] | None = None) -> HfDataset | None:
    """The samples of a split of ``--hf-dataset``; None where the options name none for the split.

    Args:
        config: the run's options.
        split: which split.
        stored: position of the split in the checkpoint that the run resumes from.

    Raises:
        UsageError: the data set cannot be read, has no text, or the tokenizer cannot be used.
        MissingExtraError: ``datasets`` is not installed.
    """
    spec = stream_spec(config, split)
    if spec is None:
        return None
    named = TokenizerFiles.of(vars(config.data))
    if named is None:
        raise UsageError(f"{spec.label} is text, and needs a tokenizer; give --tokenizer-model or --vocab-file")
    tokenizer, seq_length = open_tokenizer(named), config.model.seq_length
    source = ", ".join(str(path) for path in named.files.values())
    if tokenizer.eod is None:
        raise UsageError(f"{source} has no end-of-document token, which separates documents; use another tokenizer")
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"--vocab-size {config.model.vocab_size}: must be at least {tokenizer.vocab_size}, the ids of {source};"
            " raise it, or leave it out"
        )
    to_ids, eod = tokenizer.to_ids, tokenizer.eod

    def encode(text: str) -> list[int]:
        """Token ids and the end-of-document id; nothing for a text without tokens."""
        ids = to_ids(text)
        return [*ids, eod] if ids else []

    # Opened and dropped: a process that reads opens its own, since connections do not survive a fork.
    next(read_blocks(replace(spec, shuffle_buffer=0), StreamPosition()))
    identity = {**asdict(spec), "seq_length": seq_length, "eod": eod, "vocab_size": tokenizer.vocab_size}
    del identity["flag"]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return HfDataset(spec, encode, seq_length, digest, stored)
