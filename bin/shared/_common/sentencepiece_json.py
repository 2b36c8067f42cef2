"""A SentencePiece model as a ``tokenizer.json``, which finds special tokens in a text: what chat templates need.

    tokenizer.model, tokenizer_config.json ─> tokenizer_document ─> the tokenizers library

SentencePiece reads ``<s>`` in a text as five characters, and knows no token that was added to a model. The document has
the ids of transformers' tokenizers of the same directory, which are BPE with a fallback to bytes:

    LlamaTokenizer    a space before the text (``legacy``: before each text between special tokens)
    GemmaTokenizer    none

Without a ``tokenizer_config.json`` that names one, the model's own ``add_dummy_prefix`` decides. The order of merges is
that of the ids of their results, as ``sentencepiece`` merges by descending score.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chat_template import SPECIAL_TOKENS, read_tokenizer_config
from .document import MAX_TABLE_BYTES, read_bytes, short_repr
from .errors import UsageError
from .protobuf import protobuf_fields

SPACE_MARK = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
BPE = 2
LLAMA, GEMMA = "LlamaTokenizer", "GemmaTokenizer"
GEMMA_TOKENS = ("<pad>", "<mask>")
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
# Fields of the protobuf messages, by the numbers of sentencepiece_model.proto.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
ALGORITHM, BYTE_FALLBACK, IDS_OF_NAMES = 3, 35, {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2)}
CHARSMAP, DUMMY_PREFIX = 2, 3
REMEDY = 'give a tokenizer.json: transformers writes it by AutoTokenizer.from_pretrained("DIR").save_pretrained("DIR")'


def is_sentencepiece(path: Path) -> bool:
    """Whether a tokenizer's file is a SentencePiece model, by its name."""
    return path.suffix == ".model"


def tokenizer_file_of(path: Path) -> Path:
    """The tokenizer's file in a directory: ``tokenizer.json``, else a SentencePiece model; another path itself."""
    if not path.is_dir():
        return path
    document, model = path / "tokenizer.json", path / "tokenizer.model"
    return model if model.is_file() and not document.is_file() else document


def read_tokenizer_document(model: Path, config: Path | None) -> tuple[SentencePieceModel, dict[str, Any]]:
    """A model file, and its ``tokenizer.json``.

    Args:
        model: ``tokenizer.model``.
        config: ``tokenizer_config.json``, or None.

    Raises:
        UsageError: a file cannot be read, or the tokenizer has no such form.
    """
    try:
        parsed = parse_sentencepiece(read_bytes(model, MAX_TABLE_BYTES))
    except ValueError as error:
        raise UsageError(f"{model}: not a SentencePiece model: {error}") from error
    return parsed, tokenizer_document(parsed, {} if config is None else read_tokenizer_config(config), str(model))


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """What a tokenizer file of SentencePiece states.

    Attributes:
        pieces: pieces and their kinds, by id.
        algorithm: ``BPE``, or another number.
        byte_fallback: whether unknown characters become tokens of their bytes.
        charsmap: whether texts are normalized.
        dummy_prefix: whether a space is put before a text.
        names: ids of special tokens by name.
    """

    pieces: tuple[tuple[str, int], ...]
    algorithm: int
    byte_fallback: bool
    charsmap: bool
    dummy_prefix: bool
    names: Mapping[str, int]

    def special_tokens(self) -> dict[str, str]:
        """The special tokens of the model by name, as templates read them."""
        return {name: self.pieces[at][0] for name, at in self.names.items() if 0 <= at < len(self.pieces)}


def parse_sentencepiece(model: bytes) -> SentencePieceModel:
    """The contents of a model file that matter for a ``tokenizer.json``.

    Raises:
        ValueError: the bytes are not a SentencePiece model.
    """
    pieces: list[tuple[str, int]] = []
    settings: dict[int, dict[int, int | bytes]] = {TRAINER: {}, NORMALIZER: {}}
    for number, value in protobuf_fields(model):
        if number == PIECES and isinstance(value, bytes):
            fields = dict(protobuf_fields(value))
            piece, kind = fields.get(1, b""), fields.get(3, NORMAL)
            if not isinstance(piece, bytes) or not isinstance(kind, int):
                raise ValueError(f"piece {len(pieces):,} has fields of other types")
            pieces.append((piece.decode(), kind))
        elif number in settings and isinstance(value, bytes):
            settings[number].update(protobuf_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    trainer, normalizer = settings[TRAINER], settings[NORMALIZER]
    names = {name: _signed(trainer.get(field, default)) for name, (field, default) in IDS_OF_NAMES.items()}
    return SentencePieceModel(
        pieces=tuple(pieces),
        algorithm=_signed(trainer.get(ALGORITHM, 1)),
        byte_fallback=bool(trainer.get(BYTE_FALLBACK, 0)),
        charsmap=bool(normalizer.get(CHARSMAP, b"")),
        dummy_prefix=bool(normalizer.get(DUMMY_PREFIX, 1)),
        names=names,
    )


def _signed(value: int | bytes) -> int:
    """An integer of protobuf, whose negative values have 64 bits.

    Raises:
        ValueError: it is not an integer.
    """
    if isinstance(value, bytes):
        raise ValueError("a field of the settings has another type")
    return struct.unpack("<q", struct.pack("<Q", value))[0] if value < 1 << 64 else -1


def merges_of(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of a BPE vocabulary: all pairs of tokens whose concatenation is a token, in the order of its id."""
    found = [
        (number, at, len(piece) - at, piece[:at], piece[at:])
        for piece, number in ids.items()
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    # Of one token by the ids of its parts: stable, and the lengths above decide first.
    found.sort(key=lambda each: (ids[each[3]], ids[each[4]]))
    found.sort(key=lambda each: each[:3])
    return [(first, second) for *_, first, second in found]


def tokenizer_document(model: SentencePieceModel, config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The ``tokenizer.json`` of a model.

    Args:
        model: the model.
        config: contents of ``tokenizer_config.json``; empty without.
        origin: path of the model, for messages.

    Raises:
        UsageError: the tokenizer has no such form, or the configuration is invalid.
    """
    kind = _kind_of(model, config, origin)
    if model.algorithm != BPE or not model.byte_fallback:
        what = "is not BPE" if model.algorithm != BPE else "has no byte fallback"
        raise UsageError(
            f"{origin}: {what}, so that a chat template's special tokens cannot be found in text; {REMEDY}"
        )
    if model.charsmap:
        raise UsageError(f"{origin}: normalizes texts, which would change a chat template's; {REMEDY}")
    ids = {piece: number for number, (piece, _) in enumerate(model.pieces)}
    if len(ids) < len(model.pieces):
        raise UsageError(f"{origin}: not a SentencePiece model: a piece occurs twice")
    mark = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    decoder: list[dict[str, Any]] = [mark, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizer, before = None, "never"
    if kind == GEMMA:
        normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
        splitter: dict[str, Any] = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
    else:
        if config.get("add_prefix_space") in (None, True):
            before = "always" if config.get("legacy") else "first"
            decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        splitter = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": before, "split": False}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(model, config, ids, kind, origin),
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": {
            "type": "BPE",
            "unk_token": model.special_tokens().get("unk_token"),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [list(pair) for pair in merges_of(ids)],
        },
    }


def _kind_of(model: SentencePieceModel, config: Mapping[str, Any], origin: str) -> str:
    """The tokenizer class whose rules apply.

    Raises:
        UsageError: the configuration names another one.
    """
    name = config.get("tokenizer_class")
    if name is None:
        return LLAMA if model.dummy_prefix else GEMMA
    kind = str(name).removesuffix("Fast")
    if kind not in (LLAMA, GEMMA):
        raise UsageError(
            f"{origin}: tokenizer_class {short_repr(name)} is not one of {LLAMA} and {GEMMA}, whose rules for special"
            f" tokens in text are known; {REMEDY}"
        )
    return kind


def _added_tokens(
    model: SentencePieceModel, config: Mapping[str, Any], ids: Mapping[str, int], kind: str, origin: str
) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is split, by id.

    Raises:
        UsageError: the configuration is invalid, or a token has another id than the model has.
    """
    found: dict[int, dict[str, Any]] = {}
    # A list in the configuration stands for that of the model.
    if not any(config.get(name) for name in SPECIAL_LISTS):
        found = {
            number: _token({"content": piece, "special": type_ == CONTROL}, number)
            for number, (piece, type_) in enumerate(model.pieces)
            if type_ in (CONTROL, USER_DEFINED)
        }
    stated = config.get("added_tokens_decoder") or {}
    if not isinstance(stated, Mapping):
        raise UsageError(f"{origin}: added_tokens_decoder of tokenizer_config.json must be an object")
    for key, value in stated.items():
        number = int(key) if str(key).isascii() and str(key).isdecimal() and len(str(key)) < 10 else -1
        if number < 0 or not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
            raise UsageError(
                f"{origin}: added_tokens_decoder of tokenizer_config.json has no token for {short_repr(key)}"
            )
        found[number] = _token(value, number)
    known = {token["content"]: token for token in found.values()}
    for value in _named(model, config, kind, origin):
        content = value["content"]
        if content in known:
            known[content]["special"] = True
            continue
        number = ids.get(content, max(len(ids), max(found, default=-1) + 1))
        found[number] = known[content] = _token({**value, "special": True}, number)
    tokens = [found[number] for number in sorted(found)]
    beyond = [token["id"] for token in tokens if token["id"] >= len(ids)]
    if beyond != list(range(len(ids), len(ids) + len(beyond))):
        raise UsageError(f"{origin}: the ids of added tokens must follow the {len(ids):,} of the model without a gap")
    for token in tokens:
        expected = ids.get(token["content"], token["id"] if token["id"] >= len(ids) else None)
        if expected != token["id"]:
            raise UsageError(
                f"{origin}: the token {short_repr(token['content'])} has the id {token['id']:,} in"
                f" tokenizer_config.json, and {'none' if expected is None else f'{expected:,}'} in the model"
            )
    return tokens


def _named(model: SentencePieceModel, config: Mapping[str, Any], kind: str, origin: str) -> Iterator[Mapping[str, Any]]:
    """The special tokens that a configuration names, and those of the model where it names none.

    Raises:
        UsageError: one is not a token.
    """
    defaults = model.special_tokens()
    pieces = {piece for piece, _ in model.pieces}
    defaults |= {f"{name[1:-1]}_token": name for name in GEMMA_TOKENS if kind == GEMMA and name in pieces}
    for name in SPECIAL_TOKENS:
        yield from _content_of(config.get(name, defaults.get(name)), name, origin)
    for name in SPECIAL_LISTS:
        values = config.get(name) or ()
        values = list(values.values()) if isinstance(values, Mapping) else values
        if not isinstance(values, list | tuple):
            raise UsageError(f"{origin}: {name} of tokenizer_config.json must be a list, is {short_repr(values)}")
        for value in values:
            yield from _content_of(value, name, origin)


def _content_of(value: Any, name: str, origin: str) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, str):
        value = {"content": value}
    if value is None:
        return
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str) or not value["content"]:
        raise UsageError(f"{origin}: {name} of tokenizer_config.json must be a text, is {short_repr(value)}")
    yield value


def _token(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    special = bool(value.get("special", False))
    flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    return {
        "id": number,
        "content": value["content"],
        **flags,
        "normalized": bool(value.get("normalized", False)),
        "special": special,
    }
