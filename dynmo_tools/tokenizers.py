"""Tokenizers behind one small face: texts in, one flat array of ids and the length of each text out.

Nothing here uses the network. BPE runs on gigatoken where that library reads the tokenizer and gives the ids that the
``tokenizers`` library gives on a set of probes, and on ``tokenizers`` otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import MissingExtraError, UsageError
from .settings import Engine, TokenizerType

GROWTH_BYTES = 96 << 20
PROBES = (
    "It's 2024, and they'll\tsee:  12,345.67 things\n\n\n  indented  ",
    "Grüße, naïve café — “quotes” … 日本語のテキスト 한국어 עברית العربية",
    "def f(x):\n    return x**2  # CamelCase snake_case UPPER\r\n",
    "😀👩‍👩‍👧 e\u0301 \u00a0\u2003\ufeff ½ ² <|endoftext|> <s></s> [CLS]",
    "",
    " ",
)
BERT_MAX_WORD_CHARACTERS = 200

Ids = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A batch of tokenized texts: all ids ``[tokens]``, and the number of ids of each text ``[texts]``."""

    ids: Ids
    lengths: npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What binarize and clean need of a tokenizer.

    Attributes:
        num_ids: one above the largest id that it can give, added tokens included.
    """

    num_ids: int

    def encode_batch(self, texts: Sequence[str], /) -> Encoded:
        """The ids of each text."""

    def token_id(self, token: str | None, /) -> int | None:
        """The id of a token of the vocabulary, or of the tokenizer's own end-of-document token for None."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What a tokenizer is made of."""

    kind: TokenizerType = TokenizerType.HUGGING_FACE
    model: Path | None = None
    vocab: Path | None = None
    merges: Path | None = None
    engine: Engine = Engine.AUTO


def import_or_extra(name: str, extra: str = "prep") -> Any:
    """Import an optional module; ``MissingExtraError`` names the extra that brings it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(name, extra) from error


def from_lists(encoded: Sequence[Sequence[int]]) -> Encoded:
    """A batch from one list of ids a text."""
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    total = int(lengths.sum())
    return Encoded(
        ids=np.fromiter(itertools.chain.from_iterable(encoded), dtype=np.int64, count=total), lengths=lengths
    )


def ids_of(definition: str, source: str) -> dict[str, int]:
    """Every token of a ``tokenizer.json`` and its id, added tokens included."""
    try:
        document = json.loads(definition)
        vocabulary = document["model"]["vocab"]
        added = {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{source}: is no tokenizer.json: {error!r}") from error
    if isinstance(vocabulary, list):  # unigram: [piece, score] pairs in the order of their ids
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return {**vocabulary, **added}


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A ``tokenizer.json``: its text, where it came from, its tokens and the one that ends documents by default."""

    text: str
    source: str
    ids: dict[str, int]
    default_eod: str

    @property
    def num_ids(self) -> int:
        """One above the largest id."""
        return max(self.ids.values(), default=-1) + 1

    def token_id(self, token: str | None) -> int | None:
        """The id of a token, of the default end-of-document token for None."""
        return self.ids.get(self.default_eod if token is None else token)


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` run by the ``tokenizers`` library."""

    def __init__(self, definition: Definition) -> None:
        library = import_or_extra("tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_str(definition.text)
        except Exception as error:
            raise UsageError(f"{definition.source}: is nothing that the tokenizers library reads: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.num_ids = definition.num_ids
        self.token_id = definition.token_id

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, without the special tokens that a model's template would add."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return from_lists([one.ids for one in encoded])


def resident_bytes() -> int:
    """The memory of this process that is in RAM, in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as handle:
            return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class GigatokenTokenizer:
    """A BPE tokenizer run by gigatoken, which keeps every word that it met: it is made anew when it has grown."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self.num_ids = definition.num_ids
        self.token_id = definition.token_id
        self._renew()

    def _renew(self) -> None:
        self._encode = import_or_extra("gigatoken").Tokenizer.from_json(self._definition.text).encode
        self._limit = resident_bytes() + GROWTH_BYTES

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text."""
        arrays = [self._encode(text) for text in texts]
        if resident_bytes() > self._limit:
            self._renew()
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return Encoded(ids=np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint32), lengths=lengths)


def same_ids(first: Encoded, second: Encoded) -> bool:
    """Whether two batches are the same."""
    return np.array_equal(first.ids, second.ids) and np.array_equal(first.lengths, second.lengths)


def with_engine(definition: Definition, engine: Engine, *, trusted: bool = False) -> Tokenizer:
    """A tokenizer on the fastest library that gives the ids that ``tokenizers`` gives.

    Args:
        definition: the tokenizer.
        engine: which library is wanted.
        trusted: its rules are known to be the same in both, and are not probed.

    Raises:
        UsageError: the engine was named and cannot do it.
    """
    if engine is Engine.TOKENIZERS:
        return HuggingFaceTokenizer(definition)
    try:
        fast = GigatokenTokenizer(definition)
        if trusted or same_ids(fast.encode_batch(PROBES), HuggingFaceTokenizer(definition).encode_batch(PROBES)):
            return fast
        fault = "it gives other ids"
    except Exception as error:  # noqa: BLE001 - whatever gigatoken cannot do, tokenizers does
        fault = str(error)
    if engine is Engine.GIGATOKEN:
        raise UsageError(f"{definition.source}: gigatoken does not run it ({fault}); use --engine tokenizers")
    return HuggingFaceTokenizer(definition)


def _needed(path: Path | None, flag: str, kind: TokenizerType) -> Path:
    if path is None:
        raise UsageError(f"--tokenizer-type {kind.value} needs {flag}")
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(_text(path))
    except ValueError as error:
        raise UsageError(f"{path}: is no JSON: {error}") from error
    if not isinstance(vocabulary, dict) or not all(type(value) is int for value in vocabulary.values()):
        raise UsageError(f"{path}: must be an object of tokens and their ids")
    return vocabulary


def gpt2_definition(vocab: Path, merges: Path) -> Definition:
    """The ``tokenizer.json`` of GPT-2's two files; its end-of-text token is an entry, and never met in text."""
    ids = _vocabulary(vocab)
    lines = [line for line in _text(merges).split("\n") if line and not line.startswith("#version")]
    for number, line in enumerate(lines):
        pair = line.split(" ")
        if len(pair) != 2 or "".join(pair) not in ids:
            raise UsageError(f"{merges}: merge {number} is {line!r}, which makes no token of {vocab}")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": ids, "merges": lines},
    }
    return Definition(text=json.dumps(document), source=str(vocab), ids=ids, default_eod="<|endoftext|>")


def bert_definition(vocab: Path, *, lower: bool) -> Definition:
    """The ``tokenizer.json`` of a WordPiece vocabulary, one token a line; no token is special in text."""
    tokens = _text(vocab).rstrip("\n").split("\n")
    ids = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if "[UNK]" not in ids:
        raise UsageError(f"{vocab}: has no [UNK], which a WordPiece vocabulary needs")
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": lower,
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": BERT_MAX_WORD_CHARACTERS,
            "vocab": ids,
        },
    }
    return Definition(text=json.dumps(document), source=str(vocab), ids=ids, default_eod="[SEP]")


class SentencePieceTokenizer:
    """A SentencePiece model run by the ``sentencepiece`` library."""

    def __init__(self, model: Path, *, begin: bool) -> None:
        library = import_or_extra("sentencepiece")
        if not model.is_file():
            raise UsageError(f"{model}: no such file")
        try:
            self._model = library.SentencePieceProcessor(model_file=str(model))
        except (RuntimeError, OSError) as error:
            raise UsageError(f"{model}: is no SentencePiece model: {error}") from error
        self.num_ids: int = self._model.vocab_size()
        self.begin_id: int | None = self._model.bos_id() if begin else None

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, behind the model's begin token where the type has one."""
        return from_lists(
            self._model.encode(list(texts), out_type=int, add_bos=self.begin_id is not None, num_threads=1)
        )

    def token_id(self, token: str | None) -> int | None:
        """The id of a piece, or of the model's end token for None; None where there is none."""
        found: int = self._model.eos_id() if token is None else self._model.piece_to_id(token)
        if found < 0 or (token is not None and self._model.id_to_piece(found) != token):
            return None
        return found


class FastSentencePieceTokenizer:
    """A SentencePiece BPE model run by gigatoken, checked against ``sentencepiece``."""

    def __init__(self, model: Path, reference: SentencePieceTokenizer) -> None:
        self._tokenizer = import_or_extra("gigatoken").Tokenizer.from_sentencepiece(model)
        self._reference = reference
        self._model = model
        self.num_ids = reference.num_ids
        self._limit = resident_bytes() + GROWTH_BYTES

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text."""
        encoded = self._tokenizer.encode_batch_list(list(texts), parallel=False)
        if resident_bytes() > self._limit:
            self._tokenizer = import_or_extra("gigatoken").Tokenizer.from_sentencepiece(self._model)
            self._limit = resident_bytes() + GROWTH_BYTES
        begin = self._reference.begin_id
        return from_lists(encoded if begin is None else [[begin, *ids] for ids in encoded])

    def token_id(self, token: str | None) -> int | None:
        """The id of a piece, or of the model's end token for None."""
        return self._reference.token_id(token)


def _sentence_piece(files: TokenizerFiles) -> Tokenizer:
    model = _needed(files.model, "--tokenizer-model", files.kind)
    reference = SentencePieceTokenizer(model, begin=files.kind is TokenizerType.LLAMA)
    if files.engine is Engine.TOKENIZERS:
        return reference
    try:
        fast = FastSentencePieceTokenizer(model, reference)
        if same_ids(fast.encode_batch(PROBES), reference.encode_batch(PROBES)):
            return fast
    except Exception as error:
        if files.engine is Engine.GIGATOKEN:
            raise UsageError(f"{model}: gigatoken does not run it ({error}); use --engine tokenizers") from error
    return reference


class WhitespaceTokenizer:
    """Words between white space, looked up in a JSON vocabulary; ``<unk>`` for others."""

    def __init__(self, vocab: Path) -> None:
        self._vocabulary = _vocabulary(vocab)
        unknown = self._vocabulary.get("<unk>")
        if unknown is None:
            raise UsageError(f"{vocab}: has no <unk>, which stands for unknown words")
        self._unknown = unknown
        self.num_ids = max(self._vocabulary.values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text."""
        get, unknown = self._vocabulary.get, self._unknown
        return from_lists([[get(word, unknown) for word in text.split()] for text in texts])

    def token_id(self, token: str | None) -> int | None:
        """The id of a word, ``<|endoftext|>`` for None."""
        return self._vocabulary.get("<|endoftext|>" if token is None else token)


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer that these files make.

    Raises:
        UsageError: a file is missing, unreadable or of another kind.
    """
    kind = files.kind
    if kind is TokenizerType.HUGGING_FACE:
        path = _needed(files.model, "--tokenizer", kind)
        text = _text(path)
        definition = Definition(text=text, source=str(path), ids=ids_of(text, str(path)), default_eod="<|endoftext|>")
        return with_engine(definition, files.engine)
    if kind is TokenizerType.GPT2:
        vocab, merges = _needed(files.vocab, "--vocab-file", kind), _needed(files.merges, "--merge-file", kind)
        return with_engine(gpt2_definition(vocab, merges), files.engine, trusted=True)
    if kind in (TokenizerType.SENTENCE_PIECE, TokenizerType.LLAMA):
        return _sentence_piece(files)
    vocab = _needed(files.vocab, "--vocab-file", kind)
    if kind is TokenizerType.WHITESPACE:
        return WhitespaceTokenizer(vocab)
    return HuggingFaceTokenizer(bert_definition(vocab, lower=kind is TokenizerType.BERT_LOWER))
