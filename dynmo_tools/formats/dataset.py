"""The sidecar of an indexed dataset, ``PREFIX.dataset.json``: its origin, and checksums of its bytes.

``dataset.md`` is the specification. The sidecar is optional.

    inputs ─> digest per slice ─┐
    tokens ─> digest per part ──┼─> PREFIX.dataset.json, renamed between PREFIX.bin and PREFIX.idx
    settings of all steps ──────┘

Checksums are per piece, the bytes of one task, because tasks hash their own tokens in parallel: one digest of the
complete ``.bin`` would need a second pass over it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from .._common.document import (
    DocumentError,
    Problem,
    encode_json,
    envelope_problems,
    read_json,
)
from .._common.errors import UsageError
from ..io.codecs import PIECE_BYTES
from .dataset_fields import DOCUMENT

FORMAT = "dynmo.dataset"
VERSION = 1

Piece = dict[str, Any]
"""``bytes`` and ``sha256`` of consecutive bytes."""


def sidecar_path(prefix: Path) -> Path:
    """The path of the sidecar."""
    return prefix.with_name(prefix.name + ".dataset.json")


def _problems(document: Any) -> list[Problem]:
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    # A rule across fields, which the schema cannot state; dataset_fields.py has the others.
    if not problems and document["tokenizer"] is not None and document["eod_id"] is not None:
        size = document["tokenizer"]["vocab_size"]
        if document["eod_id"] >= size:
            problems.append(Problem("eod_id", "reference", f"is {document['eod_id']}; the vocabulary has {size} ids"))
    return problems


def read_sidecar(prefix: Path) -> dict[str, Any] | None:
    """The sidecar of a dataset; None if it has none.

    Raises:
        DocumentError: the sidecar violates the format.
    """
    path = sidecar_path(prefix)
    if not path.exists():
        return None
    document = read_json(path)
    if problems := _problems(document):
        raise DocumentError(str(path), problems)
    return dict(document)


def encode_sidecar(document: Mapping[str, Any]) -> bytes:
    """The bytes of a sidecar.

    Raises:
        DocumentError: the document violates the format.
    """
    if problems := _problems(document):
        raise DocumentError("the sidecar of a dataset", problems)
    return encode_json(document)


def digest_vocabulary(ids: Mapping[str, int]) -> str:
    """The digest of a vocabulary: SHA-256 of the JSON array of [id, token], ascending, in ASCII."""
    # By id: the order of a dict is that of the tokenizer's file, which does not change the tokens of a dataset.
    pairs = sorted((number, token) for token, number in ids.items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def digest_settings(steps: list[dict[str, Any]]) -> str:
    """The digest of a recipe's steps: SHA-256 of their JSON text, keys ascending, in ASCII."""
    return hashlib.sha256(json.dumps(steps, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_file(path: Path, begin: int = 0, end: int | None = None) -> Piece:
    """Bytes and SHA-256 of a file, or of its bytes from ``begin`` to ``end``.

    Raises:
        UsageError: the file cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "rb") as handle:
            handle.seek(begin)
            while piece := handle.read(PIECE_BYTES if end is None else min(PIECE_BYTES, end - begin - size)):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return {"bytes": size, "sha256": digest.hexdigest()}


def copy_pieces(pieces: Iterable[bytes], target: IO[bytes]) -> Piece:
    """Write byte strings in sequence; returns the bytes and SHA-256 of all of them."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        target.write(piece)
        digest.update(piece)
        size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def content_problems(sidecar: Mapping[str, Any], tokens: Path, index: Path) -> list[Problem]:
    """Differences between the bytes of ``.bin`` and ``.idx`` and the checksums of the sidecar; reads both files."""
    problems: list[Problem] = []
    at, size = 0, tokens.stat().st_size
    for piece in sidecar["bin"]["pieces"]:
        end = at + piece["bytes"]
        if digest_file(tokens, at, end) != piece:
            problems.append(Problem(f"bin.bytes[{at}:{end}]", "checksum", "differ from the sidecar's SHA-256"))
        at = end
    if at != size:
        problems.append(Problem("bin", "length", f"has {size} bytes; the sidecar states {at}"))
    if digest_file(index) != sidecar["idx"]:
        problems.append(Problem("idx", "checksum", "differs from the sidecar's size or SHA-256"))
    return problems
