"""``run.json``: what a run is. The specification is ``run.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._document import (
    ENVELOPE,
    DocumentError,
    Problem,
    anything,
    array,
    envelope_problems,
    integer,
    mapping,
    obj,
    read_json,
    string,
)

FORMAT = "dynmo.run"
VERSION = 1
_SOURCE = string("default", "derived", "file", "flag", "command")
_DOCUMENT = obj(
    {
        **ENVELOPE,
        "run_id": string(),
        "segment": integer(),
        "world_size": integer(1),
        "hosts": array(string(), 1),
        "command_line": array(string()),
        "versions": mapping(string()),
        "engine": mapping(anything()),
        "config": mapping(mapping(anything())),
        "config_sources": mapping(mapping(_SOURCE)),
    }
)
_GROW = obj({"workers": integer(1)})


def read_run(path: Path) -> dict[str, Any]:
    """Read a ``run.json``; raises ``DocumentError`` where it cannot be read or breaks a rule."""
    document = read_json(path)
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        _DOCUMENT(document, "", problems)
    if not problems:
        names, origins = (
            {(concern, name) for concern, values in document[part].items() for name in values}
            for part in ("config", "config_sources")
        )
        lone = sorted(".".join(pair) for pair in names ^ origins)
        problems += [Problem(f"config.{name}", "reference", "must be in config and in config_sources") for name in lone]
    if problems:
        raise DocumentError(str(path), problems)
    return dict(document)


def read_grow_request(path: Path) -> int:
    """The number of workers in a ``grow.json``; raises ``DocumentError`` where it is not ``{"workers": N}``."""
    document = read_json(path)
    problems: list[Problem] = []
    _GROW(document, "", problems)
    if problems:
        raise DocumentError(str(path), problems)
    return int(document["workers"])
