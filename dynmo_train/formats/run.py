"""Reads and writes ``run.json``, the description of a run, and ``resize.json``. The specification is ``run.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.checks import integer, nullable, obj
from .._common.document import (
    MAX_CONFIG_BYTES,
    DocumentError,
    Problem,
    encode_json,
    envelope_problems,
    own_document,
    read_json,
    write_whole,
)
from .private_text import HIDDEN
from .run_fields import DOCUMENT

FORMAT = "dynmo.run"
VERSION = 1
_RESIZE = obj({"workers": integer(1)})
_JOIN = obj({"processes": integer(1), "workers": nullable(integer(1))})


def write_run(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``run.json``.

    Raises:
        WriterError: The document breaks the format.
        OSError: The file cannot be written.
    """
    payload = encode_json(document)
    with own_document():
        # Of the bytes, as a reader gets them: JSON turns tuples into lists and keys into strings.
        parse_run(json.loads(payload), str(path))
    write_whole(path, payload)
    if HIDDEN.encode() in payload:
        # The names of hosts and buckets next to what was hidden are for the user alone.
        path.chmod(0o600)


def read_run(path: Path) -> dict[str, Any]:
    """Read a ``run.json``.

    Raises:
        DocumentError: It cannot be read or breaks a rule.
    """
    return parse_run(read_json(path), str(path))


def parse_run(document: Any, source: str) -> dict[str, Any]:
    """Return the content of a ``run.json``.

    Raises:
        DocumentError: It breaks a rule; with every problem.
    """
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    if not problems:
        names, origins = (
            {(concern, name) for concern, values in document[part].items() for name in values}
            for part in ("config", "config_sources")
        )
        lone = sorted(".".join(pair) for pair in names ^ origins)
        problems += [Problem(f"config.{name}", "reference", "must be in config and in config_sources") for name in lone]
    if problems:
        raise DocumentError(source, problems)
    return dict(document)


def read_resize_request(path: Path) -> int:
    """Return the number of workers in a ``resize.json``.

    Raises:
        DocumentError: The document is not ``{"workers": N}``.
    """
    document = read_json(path, MAX_CONFIG_BYTES)
    problems: list[Problem] = []
    _RESIZE(document, "", problems)
    if problems:
        raise DocumentError(str(path), problems)
    return int(document["workers"])


def take_resize_request(path: Path) -> int | None:
    """Return the number of workers in ``requests/resize.json`` and rename it to ``resize.taken.json``; None without it.

    Raises:
        DocumentError: The request is not ``{"workers": N}``.
    """
    request = path / "requests" / "resize.json"
    if not request.exists():
        return None
    workers = read_resize_request(request)
    request.replace(request.with_suffix(".taken.json"))
    return workers


def encode_join_request(processes: int, workers: int | None) -> bytes:
    """The request of a launcher to restart because nodes wait to join.

    Args:
        processes: number of processes after the restart.
        workers: number of pipeline ranks after the restart; None for that of the command.
    """
    return encode_json({"processes": processes, "workers": workers})


def read_join_request(path: Path) -> tuple[int, int | None]:
    """Return the number of processes and of pipeline ranks of a join request.

    Raises:
        DocumentError: The document is not a join request.
    """
    document = read_json(path, MAX_CONFIG_BYTES)
    problems: list[Problem] = []
    _JOIN(document, "", problems)
    if problems:
        raise DocumentError(str(path), problems)
    return document["processes"], document["workers"]


def refused_join_file(request: Path) -> Path:
    """The name of a join request after the trainer refused it."""
    return request.with_suffix(".refused.json")
