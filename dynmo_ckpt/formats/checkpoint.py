"""The manifest of a checkpoint (``manifest.json``, format ``dynmo.checkpoint``): its fields, checksum and parser.

Specification: ``checkpoint.md``; machine-readable form: ``checkpoint.schema.json``; rules across fields:
``checkpoint_rules.py``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from .._common.document import (
    MAX_ALL_EXPERTS,
    MAX_TABLE_BYTES,
    DocumentError,
    Problem,
    WriterError,
    encode_json,
    envelope_problems,
    parse_json,
)
from .checkpoint_fields import DOCUMENT, MODEL
from .checkpoint_rules import cross_field_problems

FORMAT = "dynmo.checkpoint"
VERSION = 1
# The CRC-32 is in the file that it covers. So it is computed with its own digits blanked, and has a fixed length.
BLANK_SEAL = "0" * 8
_SEAL_FIELD = re.compile(rb'"manifest_crc32"\s*:\s*"([0-9a-f]{8})"')


def model_check(value: Any, path: str, problems: list[Problem]) -> None:
    """Check the ``model`` of a manifest; other fields ``moe_*`` belong to the run and are scalars."""
    before = len(problems)
    MODEL(value, path, problems)
    if len(problems) == before:
        problems += expert_problems(value, path)


def expert_problems(model: Mapping[str, Any], path: str) -> list[Problem]:
    """The problem of a model whose total number of experts is above the limit; empty elsewhere."""
    if model["num_layers"] * model.get("num_experts", 0) <= MAX_ALL_EXPERTS:
        return []
    where = f"{path}.num_experts" if path else "num_experts"
    return [Problem(where, "range", f"times num_layers must be at most {MAX_ALL_EXPERTS:,}")]


def manifest_problems(value: Any) -> list[Problem]:
    """Every problem of a manifest except its checksum; rules across fields are checked when all fields are valid."""
    problems = envelope_problems(value, FORMAT, VERSION)
    if not problems:
        DOCUMENT(value, "", problems)
    return problems or expert_problems(value["model"], "model") or cross_field_problems(value)


def seal(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of ``manifest.json``, with ``manifest_crc32`` filled in.

    Raises:
        WriterError: the manifest breaks its own format.
    """
    # What a reader will parse: JSON turns tuples into lists, and keys into strings.
    if problems := manifest_problems(json.loads(encode_json({**manifest, "manifest_crc32": BLANK_SEAL}))):
        raise WriterError("manifest.json", problems)
    blank = encode_json({**manifest, "manifest_crc32": BLANK_SEAL})
    at = _seal_offset(blank, "manifest")
    return blank[:at] + f"{zlib.crc32(blank):08x}".encode() + blank[at + 8 :]


def parse_manifest(payload: bytes, source: str) -> dict[str, Any]:
    """The manifest in ``payload``.

    Args:
        payload: the bytes of ``manifest.json``.
        source: the file, for messages.

    Raises:
        DocumentError: another checksum, or every problem of the fields.
    """
    # Before the JSON is parsed: any altered byte is then reported as such, and not as a broken rule.
    at = _seal_offset(payload, source)
    recorded = payload[at : at + 8].decode()
    found = f"{zlib.crc32(payload[:at] + BLANK_SEAL.encode() + payload[at + 8 :]):08x}"
    if recorded != found:
        message = f"is {recorded}; the CRC-32 of the file is {found}: the file was altered"
        raise DocumentError(source, [Problem("manifest_crc32", "crc32", message)])
    try:
        value = parse_json(payload, MAX_TABLE_BYTES)
    except ValueError as error:
        raise DocumentError(source, [Problem("", "json", str(error))]) from error
    problems = manifest_problems(value)
    if problems:
        raise DocumentError(source, problems)
    manifest: dict[str, Any] = value
    return manifest


def _seal_offset(payload: bytes, source: str) -> int:
    """Offset of the eight digits, which must occur exactly once."""
    found = [match.start(1) for match in _SEAL_FIELD.finditer(payload)]
    if len(found) != 1:
        message = f"must occur once, as 8 lower-case hexadecimal digits; found {len(found)} times"
        raise DocumentError(source, [Problem("manifest_crc32", "crc32", message)])
    return found[0]
