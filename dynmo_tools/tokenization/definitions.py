"""Tokenizers as text: the ``tokenizer.json`` of a library, made from the vocabulary files of other projects.

    tokenizer.json ─────────────── read_definition ──┐
    vocab.json, merges.txt ─────── gpt2_definition ──┼─> Definition ─> an engine of ``tokenizers.py``
    vocab.txt ──────────────────── bert_definition ──┤
    tokenizer.model ──── sentencepiece_definition ───┘   for chat templates

All engines then read one definition, so they can be compared. Files are only parsed here; no library is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, parse_any_json, read_text, short_repr
from .._common.errors import UsageError
from .._common.sentencepiece_json import SentencePieceModel, read_tokenizer_document
from .._common.special_tokens import end_of_document

# As in Megatron's BERT tokenizer; the default of the tokenizers library is 100, and longer words are [UNK].
BERT_MAX_WORD_CHARACTERS = 200
MAX_IDS = 1 << 20
MAX_IDS_PER_TOKEN = 8
"""An id is below the larger of ``MAX_IDS`` and this number per token: vocabularies have gaps, but not such."""


def check_ids(ids: Mapping[str, Any]) -> None:
    """Refuse ids that are not integers from 0 on, and ids far beyond the number of tokens.

    The libraries allocate memory up to the largest id: one token with the id 2**31 - 1 would take 32 GiB.

    Raises:
        ValueError: with the rule.
    """
    limit = max(MAX_IDS, MAX_IDS_PER_TOKEN * len(ids))
    for token, number in ids.items():
        if type(number) is not int or not 0 <= number < limit:
            raise ValueError(
                f"the id of {short_repr(token)} is {short_repr(number)}; must be an integer from 0 to {limit - 1:,}"
            )


def ids_of(definition: str, source: str) -> dict[str, int]:
    """All tokens of a ``tokenizer.json`` and their ids, including added tokens.

    Raises:
        UsageError: the text is not a ``tokenizer.json``.
    """
    return _ids_and_added(definition, source)[0]


def _ids_and_added(definition: str, source: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """As ``ids_of``, and the added tokens: a large document is parsed once."""
    try:
        document = parse_any_json(definition, MAX_TABLE_BYTES)
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [piece, score] pairs in the order of their ids
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
        ids = {**vocabulary, **added}
        check_ids(ids)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{source}: not a tokenizer.json: {error!r}") from error
    return ids, tuple(map(str, added))


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A ``tokenizer.json``.

    Attributes:
        text: its text.
        source: its origin, for messages.
        ids: its tokens and their ids.
        eod: id of the default end-of-document token; None where there is none.
        added: tokens that are matched in a text before it is split.
    """

    text: str
    source: str
    ids: dict[str, int]
    eod: int | None
    added: tuple[str, ...] = ()

    @property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values(), default=-1) + 1

    def token_id(self, token: str | None) -> int | None:
        """The id of a token, or of the default end-of-document token for None."""
        return self.eod if token is None else self.ids.get(token)

    def vocabulary(self) -> Mapping[str, int]:
        """All tokens and their ids."""
        return self.ids


def _text(path: Path) -> str:
    return read_text(path, MAX_TABLE_BYTES)


def read_definition(path: Path) -> Definition:
    """The definition in a ``tokenizer.json``.

    Raises:
        UsageError: the file cannot be read, or is not a ``tokenizer.json``.
    """
    text = _text(path)
    ids, added = _ids_and_added(text, str(path))
    return Definition(text=text, source=str(path), ids=ids, eod=end_of_document(path.parent, ids), added=added)


def sentencepiece_definition(path: Path, config: Path | None) -> tuple[Definition, SentencePieceModel]:
    """The definition of a SentencePiece model with the special tokens of its configuration, and the model.

    Args:
        path: ``tokenizer.model``.
        config: ``tokenizer_config.json``, or None.

    Raises:
        UsageError: a file cannot be read, or the tokenizer does not find special tokens in text.
    """
    model, document = read_tokenizer_document(path, config)
    text = json.dumps(document)
    ids, added = _ids_and_added(text, str(path))
    eod = end_of_document(path.parent, ids, model.names.get("eos_token"))
    return Definition(text=text, source=str(path), ids=ids, eod=eod, added=added), model


def read_vocabulary(path: Path) -> dict[str, int]:
    """Ids of a ``vocab.json`` by token.

    Raises:
        UsageError: the file is not a JSON object of tokens and integer ids.
    """
    try:
        vocabulary = parse_any_json(_text(path), MAX_TABLE_BYTES)
    except ValueError as error:
        raise UsageError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(vocabulary, dict):
        raise UsageError(f"{path}: must be a JSON object of tokens and integer ids")
    try:
        check_ids(vocabulary)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return vocabulary


def gpt2_definition(vocab: Path, merges: Path) -> Definition:
    """The ``tokenizer.json`` of GPT-2's two files; its end-of-text token is an entry that no text matches.

    Raises:
        UsageError: a file is invalid, or the merges do not match the vocabulary.
    """
    ids = read_vocabulary(vocab)
    lines = _merge_lines(_text(merges))
    for number, line in enumerate(lines):
        pair = line.split(" ")
        if len(pair) != 2 or "".join(pair) not in ids:
            raise UsageError(f"{merges}: merge {number}, {short_repr(line)}, is not a token of {vocab}")
    return _gpt2(ids, lines, str(vocab), vocab.parent)


def built_in_gpt2() -> Definition:
    """GPT-2's tokenizer from the built-in merges, which determine its vocabulary."""
    from importlib import resources

    name = "gpt2-merges.txt"
    lines = _merge_lines((resources.files(__package__) / name).read_text(encoding="utf-8"))
    # OpenAI's vocab.json has this order: characters of bytes, one token per merge, the end of text.
    tokens = [*sorted(characters_of_bytes()), *(line.replace(" ", "") for line in lines), "<|endoftext|>"]
    return _gpt2({token: at for at, token in enumerate(tokens)}, lines, name, None)


def characters_of_bytes() -> list[str]:
    """What GPT-2 writes for each byte: itself where it is printable in Latin-1, else one of the characters from 256."""
    others = iter(range(256, 512))
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _merge_lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line and not line.startswith("#version")]


def _gpt2(ids: dict[str, int], merges: list[str], source: str, folder: Path | None) -> Definition:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document: dict[str, Any] = {
        "version": "1.0",
        # Empty: Megatron's tokenizer reads a literal <|endoftext|> in a document as text.
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": ids, "merges": merges},
    }
    return Definition(text=json.dumps(document), source=source, ids=ids, eod=end_of_document(folder, ids))


def bert_definition(vocab: Path, *, lower: bool) -> Definition:
    """The ``tokenizer.json`` of a WordPiece vocabulary, one token per line; no token is special in texts.

    Raises:
        UsageError: the vocabulary has no ``[UNK]``.
    """
    tokens = _text(vocab).rstrip("\n").split("\n")
    ids = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if "[UNK]" not in ids:
        raise UsageError(f"{vocab}: [UNK] is missing; a WordPiece vocabulary requires it")
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
    return Definition(text=json.dumps(document), source=str(vocab), ids=ids, eod=ids.get("[SEP]"))
