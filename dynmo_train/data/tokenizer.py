"""Reads tokenizers from their own files (Hugging Face, GPT-2 BPE, WordPiece, SentencePiece, words)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.chat_template import read_tokenizer_config
from .._common.document import (
    MAX_SIZE,
    MAX_TABLE_BYTES,
    DocumentError,
    read_any_json,
    read_bytes,
)
from .._common.errors import MissingExtraError, UsageError
from .._common.protobuf import protobuf_fields
from .._common.sentencepiece_json import read_tokenizer_document
from .._common.special_tokens import DOCUMENT_ENDS, end_of_document
from ..config.sections.data import default_tokenizer_type
from ..formats.os_errors import reason

UNKNOWN_WORD = "<unk>"
UNKNOWN_TEXT = "\U0010ffff"
"""A character that no text has."""
# File name in a checkpoint's ``tokenizer`` folder -> option, by tokenizer type; identifies the type of a folder.
FOLDER_NAMES = {
    "HuggingFaceTokenizer": {"tokenizer.json": "--tokenizer-model"},
    "GPT2BPETokenizer": {"vocab.json": "--vocab-file", "merges.txt": "--merge-file"},
    "BertWordPieceLowerCase": {"vocab-lower.txt": "--vocab-file"},
    "BertWordPieceCase": {"vocab.txt": "--vocab-file"},
    "SentencePieceTokenizer": {"tokenizer.model": "--tokenizer-model"},
    "Llama2Tokenizer": {"tokenizer.model": "--tokenizer-model"},
    "WhitespaceVocab": {"words.json": "--vocab-file"},
    "NullTokenizer": {},
}

SENTENCE_PIECE = ("SentencePieceTokenizer", "Llama2Tokenizer")
# Files next to those of a tokenizer that describe how it is used: special tokens, and the chat templates.
SETTINGS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
FURTHER_TEMPLATES = "additional_chat_templates"
# The same tokenizer for other programs, next to tokenizer.json: llama.cpp needs the model of SentencePiece.
OTHER_FORMS = ("tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer.

    Attributes:
        kind: the tokenizer type, a key of ``FOLDER_NAMES``.
        files: file name in a checkpoint -> path.
    """

    kind: str
    files: Mapping[str, Path]

    @property
    def stored_files(self) -> dict[str, Path]:
        """What a checkpoint has of the tokenizer: its files, and the settings next to them, by their names there."""
        names = [*SETTINGS, *(OTHER_FORMS if self.kind == "HuggingFaceTokenizer" else ())]
        folders = sorted({path.parent for path in self.files.values()})
        settings = {name: folder / name for folder in folders for name in names if (folder / name).is_file()}
        further = [path for folder in folders for path in sorted((folder / FURTHER_TEMPLATES).glob("*.jinja"))]
        return {**settings, **{f"{FURTHER_TEMPLATES}/{path.name}": path for path in further}, **self.files}

    @staticmethod
    def of(values: Mapping[str, Any]) -> TokenizerFiles | None:
        """The tokenizer of the options ``tokenizer_type``, ``tokenizer_model``, ...; None where they name no file.

        Raises:
            UsageError: a file that the type needs is not named, or only files are that it does not read.
        """
        kind = values.get("tokenizer_type") or default_tokenizer_type(values)
        named = {name: values[flag[2:].replace("-", "_")] for name, flag in FOLDER_NAMES[kind].items()}
        if not any(named.values()):
            if kind == "HuggingFaceTokenizer" and values["vocab_file"]:
                raise UsageError(
                    f"--vocab-file {values['vocab_file']}: several tokenizer types read such a file; give --merge-file"
                    " too (GPT2BPETokenizer), or --tokenizer-type BertWordPieceLowerCase, BertWordPieceCase or"
                    " WhitespaceVocab"
                )
            return None
        for name, flag in FOLDER_NAMES[kind].items():
            if not named[name]:
                raise UsageError(f"--tokenizer-type {kind} needs {flag} FILE")
        paths = {name: Path(path) for name, path in named.items()}
        # A model's directory is as good as its tokenizer.json.
        return TokenizerFiles(kind=kind, files={name: _within(path, name) for name, path in paths.items()})

    @staticmethod
    def of_folder(folder: Path) -> TokenizerFiles:
        """The tokenizer in a folder, such as a checkpoint's.

        Raises:
            UsageError: there is none.
        """
        for kind, names in FOLDER_NAMES.items():
            if names and all((folder / name).is_file() for name in names):
                return TokenizerFiles(kind=kind, files={name: folder / name for name in names})
        raise UsageError(f"no tokenizer in {folder}; give the path of a tokenizer.json with --tokenizer-model")


def _within(path: Path, name: str) -> Path:
    """The file of a directory, such as a model's of Hugging Face; another path itself."""
    return path / name if path.is_dir() else path


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text to token ids, and decodes them.

    Attributes:
        to_ids: text to token ids, without special tokens.
        to_text: token ids to text, without special tokens.
        vocab_size: highest id + 1, with added tokens.
        eod: id of the end-of-document token; None where the tokenizer has none.
        vocabulary: returns the ids of all tokens.
        prefix: ids that a published model reads before a text, such as the beginning-of-sequence token.
    """

    to_ids: Callable[[str], list[int]]
    to_text: Callable[[list[int]], str]
    vocab_size: int
    eod: int | None
    vocabulary: Callable[[], Mapping[str, int]]
    prefix: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens."""
        return self.to_ids(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of ``text`` after ``prefix``, which a text that begins with it gets once."""
        ids, size = self.to_ids(text), len(self.prefix)
        return ids if tuple(ids[:size]) == self.prefix else [*self.prefix, *ids]

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Those of ``texts`` that are one special token each, which decoding leaves out, and their ids."""
        vocabulary = self.vocabulary() if texts else {}
        return {text: vocabulary[text] for text in texts if text in vocabulary and not self.to_text([vocabulary[text]])}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, without special tokens."""
        return self.to_text(list(ids))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a ``tokenizer.json``, a SentencePiece ``*.model``, or the files in a directory.

    Raises:
        UsageError: the file does not exist, or is not a tokenizer.
        MissingExtraError: the library of the tokenizer is not installed.
    """
    place = Path(path)
    if place.is_dir():
        return open_tokenizer(TokenizerFiles.of_folder(place))
    if place.suffix == ".model":
        return open_tokenizer(TokenizerFiles(kind="SentencePieceTokenizer", files={"tokenizer.model": place}))
    return open_tokenizer(TokenizerFiles(kind="HuggingFaceTokenizer", files={"tokenizer.json": place}))


def open_tokenizer(named: TokenizerFiles) -> Tokenizer:
    """Read the tokenizer of some files.

    Raises:
        UsageError: a file does not exist, or is not of its kind.
        MissingExtraError: the library of the tokenizer is not installed.
    """
    for path in named.files.values():
        if not path.is_file():
            raise UsageError(f"no tokenizer at {path}; {named.kind} reads {', '.join(FOLDER_NAMES[named.kind])}")
    if named.kind in SENTENCE_PIECE:
        return _sentence_piece(named.files["tokenizer.model"])
    if named.kind == "WhitespaceVocab":
        return _whitespace(named.files["words.json"])
    return _hugging_face(named)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "train") from error
    return tokenizers


def open_chat_tokenizer(named: TokenizerFiles) -> tuple[Tokenizer, Mapping[str, str]]:
    """Read a tokenizer that finds the special tokens of a chat template in text, and its special tokens by name.

    A SentencePiece model has those of the ``tokenizer_config.json`` next to it, too.

    Raises:
        UsageError: a file does not exist, or is not of its kind; or the tokenizer does not find them.
        MissingExtraError: the library of the tokenizer is not installed.
    """
    if named.kind not in SENTENCE_PIECE:
        return open_tokenizer(named), {}
    path = named.files["tokenizer.model"]
    config = path.with_name("tokenizer_config.json")
    model, document = read_tokenizer_document(path, config if config.is_file() else None)
    return _hugging_face(named, json.dumps(document)), model.special_tokens()


def _hugging_face(named: TokenizerFiles, text: str | None = None) -> Tokenizer:
    library, files = _library(), [str(named.files[name]) for name in FOLDER_NAMES[named.kind]]
    try:
        if text is not None:
            inner = library.Tokenizer.from_str(text)
        elif named.kind == "HuggingFaceTokenizer":
            inner = library.Tokenizer.from_file(files[0])
        elif named.kind == "GPT2BPETokenizer":
            inner = library.Tokenizer(library.models.BPE.from_file(*files))
            inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
            inner.decoder = library.decoders.ByteLevel()
        else:
            lower = named.kind == "BertWordPieceLowerCase"
            inner = library.Tokenizer(library.models.WordPiece.from_file(files[0], unk_token="[UNK]"))
            inner.normalizer = library.normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
            inner.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
            inner.decoder = library.decoders.WordPiece()
        # A model that cannot encode unknown characters reports it only then.
        inner.encode(UNKNOWN_TEXT, add_special_tokens=False)
    except BaseException as error:
        # The library raises bare Exception, and its panics are not of this class.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        kind = "tokenizer.json" if named.kind == "HuggingFaceTokenizer" else named.kind
        raise UsageError(f"{' and '.join(files)} is not a {kind}: {error}") from error
    # A tokenizer.json states those of its last use: they would cut long texts and pad short ones.
    inner.no_truncation()
    inner.no_padding()
    ids = inner.get_vocab(with_added_tokens=True)
    return Tokenizer(
        to_ids=lambda text: list(inner.encode(text, add_special_tokens=False).ids),
        to_text=lambda ids: str(inner.decode(ids, skip_special_tokens=True)),
        vocab_size=max(ids.values(), default=-1) + 1,
        eod=end_of_document(Path(files[0]).parent, ids),
        vocabulary=lambda: dict(inner.get_vocab(with_added_tokens=True)),
        prefix=_prefix_of(inner),
    )


def _prefix_of(inner: Any) -> tuple[int, ...]:
    """The ids that the post-processor of a tokenizer puts before a text."""
    text, whole = (tuple(inner.encode("a", add_special_tokens=each).ids) for each in (False, True))
    places = range(len(whole) - len(text) + 1) if text else ()
    return whole[: next((at for at in places if whole[at : at + len(text)] == text), 0)]


def _sentence_piece(path: Path) -> Tokenizer:
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingExtraError("sentencepiece", "prep") from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UsageError(f"{path} is not a SentencePiece model: {error}") from error
    end, size = model.eos_id(), model.vocab_size()
    return Tokenizer(
        to_ids=lambda text: list(model.encode(text, out_type=int)),
        # A model may have more rows: tokens that were added to it, and padding.
        to_text=lambda ids: str(model.decode([each for each in ids if each < size])),
        vocab_size=size,
        eod=end_of_document(path.parent, _pieces(model, path), end),
        vocabulary=lambda: _pieces(model, path),
        prefix=_sentence_piece_prefix(model.bos_id(), path.with_name("tokenizer_config.json")),
    )


def _sentence_piece_prefix(begin: int, config: Path) -> tuple[int, ...]:
    """The id ``begin`` where a tokenizer's configuration has ``add_bos_token``; the model's file does not state it."""
    if begin < 0 or not config.is_file():
        return ()
    return (begin,) if read_tokenizer_config(config).get("add_bos_token") is True else ()


def _pieces(model: Any, path: Path) -> dict[str, int]:
    """Ids by piece.

    Raises:
        UsageError: a piece is not UTF-8.
    """
    try:
        return {model.id_to_piece(number): number for number in range(model.vocab_size())}
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a SentencePiece model: {error}") from error


def read_vocabulary(path: Path) -> dict[str, int]:
    """Ids of a ``vocab.json`` by token.

    Raises:
        UsageError: the file is not a JSON object of tokens and ids of at least 0.
    """
    try:
        words = read_any_json(path, MAX_TABLE_BYTES)
    except DocumentError as error:
        raise UsageError(f"{path} is not a JSON vocabulary: {reason(error)}") from error
    if (
        not isinstance(words, dict)
        or not words
        or not all(type(value) is int and 0 <= value < MAX_SIZE for value in words.values())
    ):
        rule = f"must be an object of words and ids from 0 to {MAX_SIZE - 1:,}"
        raise UsageError(f"{path} is not a JSON vocabulary: {rule}")
    return words


def _whitespace(path: Path) -> Tokenizer:
    """Words separated by white space, with ids from a JSON vocabulary; unknown words get that of ``<unk>``."""
    ids = read_vocabulary(path)
    if UNKNOWN_WORD not in ids:
        raise UsageError(f"{path}: must have an id for {UNKNOWN_WORD}, the token of unknown words; add one")
    words = {number: word for word, number in ids.items()}
    return Tokenizer(
        to_ids=lambda text: [ids.get(word, ids[UNKNOWN_WORD]) for word in text.split()],
        to_text=lambda numbers: " ".join(
            words.get(number, UNKNOWN_WORD) for number in numbers if words.get(number) not in DOCUMENT_ENDS
        ),
        vocab_size=max(ids.values()) + 1,
        eod=end_of_document(None, ids),
        vocabulary=lambda: ids,
    )


def count_pieces(model: bytes) -> int:
    """Count the pieces of a SentencePiece model without its library: the entries of field 1 of the protobuf message.

    Args:
        model: bytes of the model file.

    Raises:
        ValueError: the bytes are not such a message.
    """
    pieces = sum(number == 1 and isinstance(value, bytes) for number, value in protobuf_fields(model))
    if not pieces:
        raise ValueError("it has no pieces")
    return pieces


def read_vocab_size(values: Mapping[str, Any]) -> int | None:
    """The number of ids of the tokenizer of the options, with the ids that ``--vocab-extra-ids`` appends.

    Returns:
        The number of ids; None where the options name no tokenizer.

    Raises:
        UsageError: the tokenizer cannot be read.
    """
    named = TokenizerFiles.of(values)
    if named is None:
        return None
    extra = values.get("vocab_extra_ids") or 0
    # T5's own vocabulary has the sentinels already.
    if extra and "<extra_id_0>" in open_tokenizer(named).vocabulary():
        extra = 0
    return _size(named) + extra


def _size(named: TokenizerFiles) -> int:
    if named.kind in SENTENCE_PIECE:
        path = named.files["tokenizer.model"]
        try:
            return count_pieces(read_bytes(path, MAX_TABLE_BYTES))
        except (DocumentError, ValueError) as error:
            raise UsageError(f"{path} is not a SentencePiece model: {reason(error)}") from error
    if named.kind == "GPT2BPETokenizer":
        return max(read_vocabulary(named.files["vocab.json"]).values()) + 1
    return open_tokenizer(named).vocab_size
