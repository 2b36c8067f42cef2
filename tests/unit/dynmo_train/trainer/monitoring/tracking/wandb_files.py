"""Reads the file that W&B's client writes offline: records of its protocol buffers in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7
FULL, LAST = 1, 4


def payloads(path: Path) -> Iterator[bytes]:
    """The records; a long one is in several parts, and none crosses a block."""
    content, at, record = path.read_bytes(), FILE_HEADER, b""
    assert content[:4] == b":W&B"
    while at + RECORD_HEADER <= len(content):
        if BLOCK - at % BLOCK < RECORD_HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        if kind in (FULL, LAST):
            yield record
            record = b""


def read_offline(path: Path) -> dict[str, Any]:
    """Id, names, options, rows of scalars and exit code of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"rows": [], "config": {}, "metrics": {}}
    for payload in payloads(path):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
            found |= {"entity": record.run.entity}
        elif kind == "config":
            found["config"] |= {each.key: json.loads(each.value_json) for each in record.config.update}
        elif kind == "history":
            row = {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item}
            found["rows"].append(row)
        elif kind == "metric":
            found["metrics"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found
