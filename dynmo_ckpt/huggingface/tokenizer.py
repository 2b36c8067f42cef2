"""The tokenizer of a Hugging Face directory: its files, copied byte for byte, and the ids of its special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, encode_json, parse_any_json, short_repr
from .._common.errors import UsageError
from .._common.protobuf import protobuf_fields
from .._common.special_tokens import ID_KEYS, MODEL_SETTINGS, TOKENIZER_SETTINGS, merged_settings, special_ids
from ..io.errors import CorruptError, short_name
from ..io.files import check_link, read_file
from ..native.checkpoint import NativeCheckpoint

# Copied byte for byte: loading and saving a tokenizer with transformers may drop metadata.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
TIKTOKEN = "*.tiktoken"
FURTHER_TEMPLATES = "additional_chat_templates"
MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
PIECES, PIECE_TEXT = 1, 1  # fields of the messages in a model of sentencepiece


@dataclass(frozen=True, kw_only=True)
class TokenizerCopy:
    """What an export has of a tokenizer.

    Attributes:
        files: contents by name.
        special: ids of special tokens, as of ``special_ids``.
        beyond: added tokens without a row of the model, such as those of images.
    """

    files: Mapping[str, bytes]
    special: Mapping[str, tuple[int, ...]]
    beyond: Sequence[str] = ()

    def id_of(self, name: str) -> int | None:
        """The first id of a special token; None without one."""
        return self.special.get(name, (None,))[0]


def tokenizer_folder(checkpoint: NativeCheckpoint, chosen: Path | None) -> Path:
    """The folder of a checkpoint's tokenizer: the one that was chosen, ``tokenizer``, or that of the weights."""
    inside = checkpoint.tokenizer or checkpoint.directory / "tokenizer"
    return chosen or (inside if inside.is_dir() else checkpoint.directory)


def carried_files(checkpoint: NativeCheckpoint, chosen: Path | None, folder: str) -> dict[str, bytes]:
    """The tokenizer and the configuration of the input by path, for formats that have no place for them.

    They are in ``tokenizer`` of an iteration, as those of Megatron-Bridge; the readers of such formats find them there.

    Args:
        checkpoint: the input.
        chosen: a directory with another tokenizer, or None.
        folder: the directory of the iteration; empty where that is the whole checkpoint.
    """
    prefix = f"{folder}/tokenizer" if folder else "tokenizer"
    place, source = tokenizer_folder(checkpoint, chosen), checkpoint.manifest.get("source") or {}
    files = {name: read_file(place / name, MAX_TABLE_BYTES) for name in tokenizer_names(place)}
    stated = {"config.json": source.get("config"), "generation_config.json": source.get("generation_config")}
    files |= {name: encode_json(contents) for name, contents in stated.items() if contents is not None}
    return {f"{prefix}/{name}": payload for name, payload in files.items()}


def tokenizer_names(directory: Path) -> list[str]:
    """Names of the tokenizer files in ``directory``, with those of further chat templates.

    Raises:
        UsageError: one is a link out of the directory.
    """
    further = sorted(path.name for path in (directory / FURTHER_TEMPLATES).glob("*.jinja") if path.is_file())
    tables = sorted(path.name for path in directory.glob(TIKTOKEN))
    names = [*TOKENIZER_FILES, *tables, *(f"{FURTHER_TEMPLATES}/{name}" for name in further)]
    found = [name for name in names if (directory / name).is_file() or (directory / name).is_symlink()]
    for name in found:
        check_link(directory / name, directory)
    return found


def copied_tokenizer(
    directory: Path, vocab_size: int, max_length: int, models: Sequence[Mapping[str, Any] | None] = ()
) -> TokenizerCopy:
    """Byte copies of the tokenizer files, with a configuration that AutoTokenizer opens, and the special tokens.

    Args:
        directory: the directory of the files; it may have none.
        vocab_size: the true vocabulary size of the model.
        max_length: number of positions of the model.
        models: the configurations of the model, those with precedence first.

    Raises:
        CorruptError: an invalid file.
        UsageError: the tokenizer has more tokens than the vocabulary of the model, or a file is a link elsewhere.
    """
    files = {name: read_file(directory / name, MAX_TABLE_BYTES) for name in tokenizer_names(directory)}
    settings = merged_settings(read_object(directory / name) for name in TOKENIZER_SETTINGS if name in files)
    base, added = _token_ids(directory, files, settings)
    last = max(base.values(), default=-1)
    # Such a token would be beyond the embedding, which has no padding rows here. Added tokens may be: that of images of
    # the small Gemma 3 has no row, and no text has it.
    if last >= vocab_size:
        raise UsageError(
            f"{directory}: the tokenizer has the token id {last}; the vocabulary of the model ends at {vocab_size - 1}"
        )
    near = [read_object(directory / name) for name in MODEL_SETTINGS if (directory / name).is_file()]
    ids = base | added
    special = special_ids(ids, settings, [*models, *near])
    if not ids:
        # Defaults of a configuration, such as those of GPT-2 with a small vocabulary, name no token of this model.
        special = {name: numbers for name, numbers in special.items() if numbers[0] < vocab_size}
    for name, numbers in special.items():
        if numbers[0] >= vocab_size:
            raise UsageError(
                f"{directory}: the {name} token has the id {numbers[0]}; the vocabulary of the model ends at "
                f"{vocab_size - 1}; this is the tokenizer of another model"
            )
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        tokens = {number: token for token, number in ids.items()}
        named = {f"{name}_token": tokens[special[name][0]] for name in ("bos", "eos", "unk") if name in special}
        if special and special.get("bos") == special["eos"]:
            named.setdefault("unk_token", named["eos_token"])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, **named}
        files["tokenizer_config.json"] = encode_json(config)
    beyond = tuple(short_name(token) for token, number in added.items() if number >= vocab_size)
    return TokenizerCopy(files=files, special=special, beyond=beyond)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CorruptError: it is none.
    """
    try:
        found = parse_any_json(read_file(path, MAX_TABLE_BYTES), MAX_TABLE_BYTES)
    except ValueError as error:
        raise CorruptError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{path}: must be a JSON object")
    return found


def _token_ids(
    directory: Path, files: Mapping[str, bytes], settings: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of the tokens of the vocabulary, and those of added tokens."""
    if "tokenizer.json" in files:
        return _ids_of_document(directory / "tokenizer.json", files["tokenizer.json"])
    name = next((name for name in (*MODELS, "vocab.json", "vocab.txt") if name in files), None)
    if name is None:
        return {}, {}
    try:
        base = _checked_ids(_vocabulary(name, files[name]))
    except ValueError as error:
        raise CorruptError(f"{directory / name}: not a vocabulary: {error}") from error
    added = read_object(directory / "added_tokens.json") if "added_tokens.json" in files else {}
    decoder = settings.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if number.isdecimal() and len(number) < 10 and isinstance(token, dict):
            added.setdefault(str(token.get("content")), int(number))
    try:
        return base, {token: at for token, at in _checked_ids(added).items() if token not in base}
    except ValueError as error:
        raise CorruptError(f"{directory / 'added_tokens.json'}: {error}") from error


def _vocabulary(name: str, payload: bytes) -> dict[str, Any]:
    """The tokens in a file of a vocabulary; a ``ValueError`` where it is not one."""
    if name in MODELS:
        pieces = [dict(protobuf_fields(piece)).get(PIECE_TEXT, b"") for piece in _pieces(payload)]
        return {piece.decode(errors="replace"): at for at, piece in enumerate(pieces) if isinstance(piece, bytes)}
    if name == "vocab.txt":
        lines = payload.decode(errors="replace").rstrip("\n").split("\n")
        return {line.rstrip("\r"): number for number, line in enumerate(lines)}
    found = parse_any_json(payload, MAX_TABLE_BYTES)
    if not isinstance(found, dict):
        raise ValueError("must be an object of tokens and ids")
    return found


def _pieces(payload: bytes) -> list[bytes]:
    return [value for field, value in protobuf_fields(payload) if field == PIECES and isinstance(value, bytes)]


def _ids_of_document(path: Path, payload: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of the tokens of a ``tokenizer.json``, and of its added tokens."""
    try:
        document = parse_any_json(payload, MAX_TABLE_BYTES)
        vocabulary = document["model"]["vocab"]
        named = dict(vocabulary) if isinstance(vocabulary, dict) else {row[0]: i for i, row in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in document.get("added_tokens") or []}
        return _checked_ids(named), _checked_ids(added)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CorruptError(f"{path}: not a tokenizer file: {error}") from error


def _checked_ids(ids: dict[str, Any]) -> dict[str, int]:
    for token, number in ids.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(
                f"the id of {short_repr(token)} must be a non-negative integer, found {short_repr(number)}"
            )
    return ids


def token_id_keys(tokenizer: TokenizerCopy, names: Sequence[str] = ID_KEYS) -> dict[str, int | list[int] | None]:
    """The keys of a configuration that state special tokens, such as ``eos_token_id``; several ids are a list."""
    stated: dict[str, int | list[int] | None] = {}
    for name in names:
        ids = tokenizer.special.get(name, ())
        stated[f"{name}_token_id"] = list(ids) if name == "eos" and len(ids) > 1 else tokenizer.id_of(name)
    return stated
