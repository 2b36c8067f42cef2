"""Reads the sidecar of an indexed dataset, ``PREFIX.dataset.json``; ``dynmo_tools`` owns the format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.document import (
    DocumentError,
    Problem,
    envelope_problems,
    read_json,
)
from .dataset_fields import DOCUMENT

FORMAT = "dynmo.dataset"
VERSION = 1


def read_sidecar(prefix: str) -> dict[str, Any] | None:
    """Return the sidecar of a dataset; None where it has none.

    Raises:
        DocumentError: It breaks a rule of the format, or belongs to another ``.bin`` and ``.idx``.
    """
    path = Path(f"{prefix}.dataset.json")
    if not path.exists():
        return None
    document = read_json(path)
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    if not problems:
        problems = _size_problems(document, prefix)
    if problems:
        raise DocumentError(str(path), problems)
    return dict(document)


def _size_problems(document: Mapping[str, Any], prefix: str) -> list[Problem]:
    """Check the rules across fields and the sizes of the files; ``dynmo-prep verify`` checks their bytes."""
    problems = []
    tokenizer, eod_id = document["tokenizer"], document["eod_id"]
    if tokenizer is not None and eod_id is not None and eod_id >= tokenizer["vocab_size"]:
        rule = f"is {eod_id}; the vocabulary has {tokenizer['vocab_size']} ids"
        problems.append(Problem("eod_id", "reference", rule))
    stated = {"bin": sum(piece["bytes"] for piece in document["bin"]["pieces"]), "idx": document["idx"]["bytes"]}
    for ending, size in stated.items():
        file = Path(f"{prefix}.{ending}")
        if file.exists() and file.stat().st_size != size:
            words = f"is of a file of {size} bytes; {file} has {file.stat().st_size}: remove the sidecar if it is old"
            problems.append(Problem(ending, "length", words))
    return problems


def digest_vocabulary(ids: Mapping[str, int]) -> str:
    """Return the SHA-256 of a vocabulary: of the JSON array of [id, token], in ascending order, in ASCII."""
    pairs = sorted((number, token) for token, number in ids.items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()
