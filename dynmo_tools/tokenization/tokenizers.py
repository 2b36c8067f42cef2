"""Tokenizers with one interface: texts in, one flat array of ids and the length of each text out.

Nothing uses the network. BPE runs on gigatoken if that library can load the tokenizer and returns the ids of
``tokenizers`` or ``sentencepiece`` for a set of probes, and on those libraries otherwise. Libraries differ in the
treatment of special tokens in a text, such as a literal ``</s>``. If they do, only texts with such tokens are encoded
by the slower library. So are texts with characters that Unicode has had for a few years only: the libraries have tables
of different versions, and a letter of one table is unknown to the other.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._common.document import check_regular
from .._common.errors import MissingExtraError, UsageError
from .._common.protobuf import protobuf_fields
from .._common.special_tokens import end_of_document
from ..config.settings import Engine
from ..config.tokenizer_paths import TokenizerType
from .definitions import Definition, bert_definition, gpt2_definition, read_definition, read_vocabulary

# Growth of the process after which gigatoken is renewed: its cache of words has no limit.
GROWTH_BYTES = 96 << 20
# Where rules of tokenizers differ: contractions, digits, runs of white space, scripts, joined emoji, combining
# characters, unusual spaces, special tokens, empty texts.
PROBES = (
    "It's 2024, and they'll\tsee:  12,345.67 things\n\n\n  indented  ",
    "Grüße, naïve café — “quotes” … 日本語のテキスト 한국어 עברית العربية",
    "def f(x):\n    return x**2  # CamelCase snake_case UPPER\r\n",
    "😀👩‍👩‍👧 e\u0301 \u00a0\u2003\ufeff ½ ² <|endoftext|> <s></s> [CLS]",
    "",
    " ",
)
SPACE_MARK = "\u2581"
NORMAL_PIECE = 1
SPECIAL_KINDS = (2, 3, 4, 5)  # unknown, control, user-defined, unused
OTHER_IDS = "it returns other ids"

Ids = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A batch of tokenized texts.

    Attributes:
        ids: ids of all texts, concatenated ``[tokens]``.
        lengths: ids per text ``[texts]``, int64.
    """

    ids: Ids
    lengths: npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        num_ids: one more than the largest id, including added tokens.
    """

    num_ids: int

    def encode_batch(self, texts: Sequence[str], /) -> Encoded:
        """Encode texts."""

    def token_id(self, token: str | None, /) -> int | None:
        """The id of a token, or of the default end-of-document token for None; None if it does not exist."""

    def vocabulary(self) -> Mapping[str, int]:
        """All tokens and their ids, including added tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer, and its engine.

    Attributes:
        kind: type of the tokenizer, which determines the files that it needs.
        model: ``tokenizer.json``, or a SentencePiece model.
        vocab: vocabulary.
        merges: merges of GPT-2.
        engine: library that runs a BPE tokenizer.
    """

    kind: TokenizerType = TokenizerType.HUGGING_FACE
    model: Path | None = None
    vocab: Path | None = None
    merges: Path | None = None
    engine: Engine = Engine.AUTO


def import_or_extra(name: str, extra: str = "prep") -> Any:
    """Import an optional module.

    Raises:
        MissingExtraError: the module is not installed; names the extra that contains it.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(name, extra) from error


def from_lists(encoded: Sequence[Sequence[int]]) -> Encoded:
    """A batch from one list of ids per text."""
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    total = int(lengths.sum())
    return Encoded(
        ids=np.fromiter(itertools.chain.from_iterable(encoded), dtype=np.int64, count=total), lengths=lengths
    )


UNKNOWN_TEXT = "\U0010ffff"
"""A character that no text has."""


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` on the ``tokenizers`` library."""

    def __init__(self, definition: Definition) -> None:
        library = import_or_extra("tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_str(definition.text)
            # A model that cannot encode unknown characters reports it only then.
            self._tokenizer.encode(UNKNOWN_TEXT, add_special_tokens=False)
        except BaseException as error:
            # The library raises bare Exception, and its panics are not of this class.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UsageError(f"{definition.source}: the tokenizers library cannot read it: {error}") from error
        # A tokenizer.json may enable both for inference; a dataset needs every id and no padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.num_ids = definition.num_ids
        self.token_id = definition.token_id
        self.vocabulary = definition.vocabulary

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode texts, without the special tokens of a model's template."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return from_lists([one.ids for one in encoded])

    def encode_with_offsets(self, text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Encode a text, without the special tokens of a model's template.

        Returns:
            The ids ``[tokens]``, and the characters ``[begin, end)`` of each token ``[tokens, 2]``.
        """
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.int64), np.asarray(encoded.offsets, dtype=np.int64).reshape(-1, 2)


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as handle:
            return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class GigatokenTokenizer:
    """A BPE tokenizer on gigatoken. gigatoken caches every word, so it is recreated when its memory has grown."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self.num_ids = definition.num_ids
        self.token_id = definition.token_id
        self.vocabulary = definition.vocabulary
        self._renew()

    def _renew(self) -> None:
        self._encode = import_or_extra("gigatoken").Tokenizer.from_json(self._definition.text).encode
        self.limit_bytes = resident_bytes() + GROWTH_BYTES

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode texts."""
        arrays = [self._encode(text) for text in texts]
        if resident_bytes() > self.limit_bytes:
            self._renew()
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return Encoded(ids=np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint32), lengths=lengths)


def _agree(first: Tokenizer, second: Tokenizer, texts: Sequence[str]) -> bool:
    return same_ids(first.encode_batch(texts), second.encode_batch(texts))


def same_ids(first: Encoded, second: Encoded) -> bool:
    """Whether the batches ``first`` and ``second`` have equal ids ``[tokens]`` and lengths ``[texts]``."""
    return np.array_equal(first.ids, second.ids) and np.array_equal(first.lengths, second.lengths)


class LazyTokenizer:
    """A tokenizer on the ``tokenizers`` library that is made, and its library imported, for the first text."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._made: HuggingFaceTokenizer | None = None
        self.num_ids = definition.num_ids
        self.token_id = definition.token_id
        self.vocabulary = definition.vocabulary

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode texts."""
        if self._made is None:
            self._made = HuggingFaceTokenizer(self._definition)
        return self._made.encode_batch(texts)


@functools.cache
def _recent_code_points() -> npt.NDArray[np.bool_]:
    """For each code point, whether Unicode 14.0 has no character for it."""
    lines = (resources.files(__package__) / "unassigned.txt").read_text(encoding="ascii").splitlines()
    table = np.zeros(0x110000, dtype=np.bool_)
    for word in (word for line in lines if not line.startswith("#") for word in line.split()):
        first, _, last = word.partition("-")
        table[int(first, 16) : int(last or first, 16) + 1] = True
    return table


def has_recent_characters(text: str) -> bool:
    """Whether a text has code points without a character in Unicode 14.0."""
    # A table: a regular expression tests the ranges of such a class one after another.
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return bool(_recent_code_points()[codes].any())


class RoutedTokenizer:
    """Encodes texts that contain certain strings or recent characters with an exact tokenizer, others with a fast one.

    Args:
        fast: returns the same ids for other texts.
        exact: defines the ids.
        strings: the strings; U+2581 in them and in texts is a space, as in SentencePiece.
    """

    def __init__(self, fast: Tokenizer, exact: Tokenizer, strings: Iterable[str]) -> None:
        self.fast, self.exact = fast, exact
        spelled = list(strings)
        self._pattern = special_pattern(spelled) if spelled else None
        self.num_ids = exact.num_ids
        self.token_id = exact.token_id
        self.vocabulary = exact.vocabulary

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode texts."""
        special = [self._is_special(text) for text in texts]
        if not any(special):
            return self.fast.encode_batch(texts)
        encoded = []
        for is_exact, tokenizer in ((False, self.fast), (True, self.exact)):
            chosen = [text for text, is_special in zip(texts, special, strict=True) if is_special is is_exact]
            # Two batches instead of single calls; the arrays return in the order of the texts below.
            batch = tokenizer.encode_batch(chosen)
            encoded.append(iter(np.split(batch.ids, np.cumsum(batch.lengths)[:-1]) if chosen else []))
        arrays = [next(encoded[is_special]) for is_special in special]
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return Encoded(ids=np.concatenate(arrays).astype(np.int64), lengths=lengths)

    def _is_special(self, text: str) -> bool:
        if has_recent_characters(text):
            return True
        if self._pattern is None:
            return False
        # A model may prepend a space to each text, which can be part of a string of spaces.
        return self._pattern.search(" " + text.replace(SPACE_MARK, " ")) is not None


def special_pattern(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of some strings; empty strings are ignored, no strings match nothing."""
    spelled = {string.replace(SPACE_MARK, " ") for string in strings if string}
    return re.compile("|".join(map(re.escape, sorted(spelled))) or r"(?!)")


def plain_probes(strings: Iterable[str]) -> list[str]:
    """The probes with some strings replaced by a letter."""
    pattern = special_pattern(strings)
    probes = [pattern.sub("x", probe) for probe in PROBES]
    return [probe for probe in probes if pattern.search(" " + probe) is None]


def special_probes(strings: Iterable[str]) -> list[str]:
    """Texts with some strings in various positions."""
    return [text for s in strings for text in (s, f"a{s}b", f"a {s} b", f" {s}{s}", f"{s} \n{s.upper()}A")]


def with_engine(definition: Definition, engine: Engine, *, trusted: bool = False) -> Tokenizer:
    """The tokenizer on the fastest library that returns the ids of ``tokenizers``.

    Args:
        definition: the tokenizer.
        engine: requested library.
        trusted: its rules are known to be the same in both libraries; no probes.

    Raises:
        UsageError: the requested engine cannot run it.
    """
    if engine is Engine.TOKENIZERS:
        return HuggingFaceTokenizer(definition)
    try:
        fast = GigatokenTokenizer(definition)
        # Without probes, the tokenizers library is not imported before a text needs it.
        if trusted:
            return RoutedTokenizer(fast, LazyTokenizer(definition), ())
        exact, strings = HuggingFaceTokenizer(definition), definition.added
        if _agree(fast, exact, plain_probes(strings)):
            is_same = _agree(fast, exact, [*PROBES, *special_probes(strings)])
            return RoutedTokenizer(fast, exact, () if is_same else strings)
        fault = OTHER_IDS
    except Exception as error:  # noqa: BLE001 - tokenizers runs whatever gigatoken cannot
        fault = str(error)
    if engine is Engine.GIGATOKEN:
        raise UsageError(f"{definition.source}: gigatoken cannot run it ({fault}); use --engine tokenizers")
    return HuggingFaceTokenizer(definition)


def _needed(path: Path | None, flag: str, kind: TokenizerType) -> Path:
    if path is None:
        raise UsageError(f"--tokenizer-type {kind.value}: requires {flag}")
    check_regular(path)  # the libraries would block on a FIFO
    return path


def piece_kinds(model: bytes) -> Iterator[tuple[str, int]]:
    """The pieces of a SentencePiece model and their types; its Python library does not report user-defined ones."""
    for number, piece in protobuf_fields(model):
        if number == 1 and isinstance(piece, bytes):
            fields = dict(protobuf_fields(piece))
            name, kind = fields.get(1, b""), fields.get(3, NORMAL_PIECE)
            if isinstance(name, bytes) and isinstance(kind, int):
                yield name.decode("utf-8", "replace"), kind


class SentencePieceTokenizer:
    """A SentencePiece model on the ``sentencepiece`` library.

    Args:
        model: model file.
        begin: prepend the begin token to each text.

    Raises:
        UsageError: the model cannot be read.
    """

    def __init__(self, model: Path, *, begin: bool) -> None:
        library = import_or_extra("sentencepiece")
        if not model.is_file():
            raise UsageError(f"{model}: no such file")
        try:
            self._model = library.SentencePieceProcessor(model_file=str(model))
        except (RuntimeError, OSError) as error:
            raise UsageError(f"{model}: not a SentencePiece model: {error}") from error
        self._folder = model.parent
        self.num_ids: int = self._model.vocab_size()
        self.begin_id: int | None = self._model.bos_id() if begin else None

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode texts, with the model's begin token if the type has one."""
        return from_lists(
            self._model.encode(list(texts), out_type=int, add_bos=self.begin_id is not None, num_threads=1)
        )

    def special_pieces(self) -> list[str]:
        """The pieces that merges do not create: unknown, control, user-defined and unused ones."""
        return [piece for piece, kind in piece_kinds(self._model.serialized_model_proto()) if kind in SPECIAL_KINDS]

    def token_id(self, token: str | None) -> int | None:
        """The id of a piece, or of the end token for None; None if it does not exist."""
        if token is None:
            return end_of_document(self._folder, self.vocabulary(), self._model.eos_id())
        # sentencepiece returns the unknown id for a missing piece.
        found: int = self._model.piece_to_id(token)
        return found if found >= 0 and self._model.id_to_piece(found) == token else None

    def vocabulary(self) -> Mapping[str, int]:
        """All pieces and their ids."""
        try:
            return {self._model.id_to_piece(number): number for number in range(self.num_ids)}
        except UnicodeDecodeError as error:
            raise UsageError(f"not a SentencePiece model: a piece is not UTF-8: {error}") from error


class FastSentencePieceTokenizer:
    """A SentencePiece BPE model on gigatoken.

    Args:
        model: model file.
        reference: the same model on ``sentencepiece``.
    """

    def __init__(self, model: Path, reference: SentencePieceTokenizer) -> None:
        self._tokenizer = import_or_extra("gigatoken").Tokenizer.from_sentencepiece(model)
        self._reference = reference
        self._model = model
        self.num_ids = reference.num_ids
        self.limit_bytes = resident_bytes() + GROWTH_BYTES

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode texts."""
        # Not in parallel: tasks already run in parallel processes.
        encoded = self._tokenizer.encode_batch_list(list(texts), parallel=False)
        if resident_bytes() > self.limit_bytes:
            self._tokenizer = import_or_extra("gigatoken").Tokenizer.from_sentencepiece(self._model)
            self.limit_bytes = resident_bytes() + GROWTH_BYTES
        begin = self._reference.begin_id
        return from_lists(encoded if begin is None else [[begin, *ids] for ids in encoded])

    def token_id(self, token: str | None) -> int | None:
        """The id of a piece, or of the model's end token for None."""
        return self._reference.token_id(token)

    def vocabulary(self) -> Mapping[str, int]:
        """All pieces and their ids."""
        return self._reference.vocabulary()


def _sentence_piece(files: TokenizerFiles) -> Tokenizer:
    model = _needed(files.model, "--tokenizer-model", files.kind)
    exact = SentencePieceTokenizer(model, begin=files.kind is TokenizerType.LLAMA)
    if files.engine is Engine.TOKENIZERS:
        return exact
    try:
        strings = exact.special_pieces()
        fast = FastSentencePieceTokenizer(model, exact)
        if _agree(fast, exact, plain_probes(strings)):
            return RoutedTokenizer(fast, exact, strings)
        fault = OTHER_IDS
    except Exception as error:  # noqa: BLE001 - sentencepiece runs whatever gigatoken cannot
        fault = str(error)
    if files.engine is Engine.GIGATOKEN:
        raise UsageError(f"{model}: gigatoken cannot run it ({fault}); use --engine tokenizers")
    return exact


class WhitespaceTokenizer:
    """Words between white space, with ids of a JSON vocabulary; ``<unk>`` for unknown words.

    Raises:
        UsageError: the vocabulary has no ``<unk>``.
    """

    def __init__(self, vocab: Path) -> None:
        self._vocabulary = read_vocabulary(vocab)
        unknown = self._vocabulary.get("<unk>")
        if unknown is None:
            raise UsageError(f"{vocab}: <unk> is missing; it is required for unknown words")
        self._unknown = unknown
        self.num_ids = max(self._vocabulary.values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode texts."""
        get, unknown = self._vocabulary.get, self._unknown
        return from_lists([[get(word, unknown) for word in text.split()] for text in texts])

    def token_id(self, token: str | None) -> int | None:
        """The id of a word, or of the end token for None."""
        return end_of_document(None, self._vocabulary) if token is None else self._vocabulary.get(token)

    def vocabulary(self) -> Mapping[str, int]:
        """All words and their ids."""
        return self._vocabulary


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """Load the tokenizer of some files.

    Raises:
        UsageError: a file is missing, unreadable or of another kind.
    """
    kind = files.kind
    if kind is TokenizerType.HUGGING_FACE:
        return with_engine(read_definition(_needed(files.model, "--tokenizer", kind)), files.engine)
    if kind is TokenizerType.GPT2:
        vocab, merges = _needed(files.vocab, "--vocab-file", kind), _needed(files.merges, "--merge-file", kind)
        return with_engine(gpt2_definition(vocab, merges), files.engine, trusted=True)
    if kind in (TokenizerType.SENTENCE_PIECE, TokenizerType.LLAMA):
        return _sentence_piece(files)
    vocab = _needed(files.vocab, "--vocab-file", kind)
    if files.engine is Engine.GIGATOKEN:
        raise UsageError(f"--engine gigatoken: runs BPE only, and {kind.value} is not BPE; omit --engine")
    if kind is TokenizerType.WHITESPACE:
        return WhitespaceTokenizer(vocab)
    return HuggingFaceTokenizer(bert_definition(vocab, lower=kind is TokenizerType.BERT_LOWER))
