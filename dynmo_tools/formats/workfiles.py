"""Documents of ``dynmo-prep`` itself: task manifest, task markers, summaries, headers of fingerprints.

No other package reads them. Each format has one rule. A document is checked against it before it is written, and
again when a resumed run reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from .._common.checks import ENVELOPE, Check, anything, array, boolean, integer, mapping, nullable, number, obj, string
from .._common.document import (
    MAX_SIZE,
    MAX_TABLE_BYTES,
    DocumentError,
    Problem,
    WriterError,
    encode_json,
    envelope,
    envelope_problems,
    parse_json,
    read_json,
    write_whole,
)


def undated_header(format_name: str, version: int) -> dict[str, Any]:
    """The envelope of an output whose bytes do not depend on the time.

    Args:
        format_name: name of the format.
        version: version of the format, from 1.
    """
    fields = envelope(format_name, version, f"dynmo-prep {__version__}")
    del fields["created_utc"]
    return fields


@dataclass(frozen=True, kw_only=True)
class WorkFormat:
    """A format of a document.

    Attributes:
        name: name of the format.
        version: version of the format.
        rule: check of the fields.
        is_dated: documents have their creation time.
    """

    name: str
    version: int
    rule: Check
    is_dated: bool = True

    def _problems(self, document: Any) -> list[Problem]:
        problems = envelope_problems(document, self.name, self.version)
        if not problems:
            self.rule(document, "", problems)
        return problems

    def read(self, path: Path) -> dict[str, Any]:
        """Read a document.

        Raises:
            DocumentError: the document cannot be read, or violates the rule.
        """
        document = read_json(path, MAX_TABLE_BYTES)
        if problems := self._problems(document):
            raise DocumentError(str(path), problems)
        return dict(document)

    def write(self, path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write a document with its envelope; returns the document.

        Raises:
            WriterError: the document violates the rule; nothing is written.
            OSError: as ``write_whole``.
        """
        header = undated_header(self.name, self.version)
        if self.is_dated:
            header = envelope(self.name, self.version, f"dynmo-prep {__version__}")
        document = {**header, **fields}
        payload = encode_json(document)
        # The bytes are parsed again and checked: what a resumed run refuses must fail here, in the run that writes it.
        try:
            problems = self._problems(parse_json(payload, MAX_TABLE_BYTES))
        except ValueError as error:
            raise WriterError(str(path), [Problem("", "json", str(error))]) from error
        if problems:
            raise WriterError(str(path), problems)
        write_whole(path, payload)
        return document


_COUNTS = mapping(integer())
_TALLY = {
    "documents_in": integer(),
    "bytes_in": integer(),
    "documents_out": integer(),
    "bytes_out": integer(),
    "blank_lines": integer(),
    "lines": integer(),
    "changed": integer(),
    "dropped": _COUNTS,
    "rejected": _COUNTS,
}
_UNDATED = {name: check for name, check in ENVELOPE.items() if name != "created_utc"}
MANIFEST = WorkFormat(
    name="dynmo.prep-manifest",
    version=1,
    rule=obj(
        {
            **ENVELOPE,
            "step": string(),
            "digest": string(),
            "output": string(),
            "settings": mapping(anything()),
            "limits": mapping(anything()),
            # Times before 1970 are negative; some archives set them.
            "sources": array(obj({"path": string(), "size_bytes": integer(), "mtime_ns": integer(-(1 << 63))})),
            "tasks": array(
                obj(
                    {"path": string(), "begin": integer(), "end": nullable(integer())},
                    {"frame": integer(), "frame_end": nullable(integer())},
                )
            ),
        }
    ),
)
TASK = WorkFormat(
    name="dynmo.prep-task",
    version=1,
    rule=obj(
        {
            **_UNDATED,
            "task": string(),
            "digest": string(),
            "outputs": mapping(integer()),
            "tally": obj(_TALLY),
            "result": mapping(anything()),
            "facts": mapping(anything()),
            "seconds": number(0),
        }
    ),
    is_dated=False,
)
_SUMMARY = {
    "step": string(),
    "inputs": array(string(), 1),
    "output": string(),
    **_TALLY,
    "seconds": number(0),
    "megabytes_per_second": number(0),
    "facts": mapping(anything()),
}
SUMMARY = WorkFormat(name="dynmo.prep-summary", version=1, rule=obj({**ENVELOPE, **_SUMMARY}))
PIPELINE = WorkFormat(
    name="dynmo.prep-pipeline",
    version=1,
    rule=obj(
        {
            **ENVELOPE,
            "recipe": string(),
            "documents_in": integer(),
            "bytes_in": integer(),
            "documents_out": integer(),
            "documents_rejected": integer(),
            "tokens": nullable(integer()),
            "data_prefix": nullable(string()),
            "tokenizer": nullable(string()),
            "seconds": number(0),
            "steps": array(obj({"name": string(), **_SUMMARY, "reused": boolean()}), 1),
        }
    ),
)
FINGERPRINTS = WorkFormat(
    name="dynmo.fingerprints",
    version=1,
    rule=obj(
        {
            **_UNDATED,
            "scheme": string(),
            "num_seeds": integer(1, MAX_SIZE),
            "seed": integer(),
            "shingle_characters": integer(1, MAX_SIZE),
            "documents": integer(),
        },
        {"created_utc": string()},  # in folders of earlier versions
    ),
    is_dated=False,
)
