"""Parts of an output: written by the tasks of a phase, concatenated in task order by the last phase."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.document import ESCAPED
from .._common.errors import DynmoError
from ..io.codecs import is_compressed
from ..io.concat_files import append_files
from ..io.json_edit import append_entry, replace_value
from ..io.jsonl import Row, encode_text, has_surrogates, path_of
from .registry import find_step
from .task import Phase, Task
from .task_manifest import TaskManifest


def join_parts(task: Task, kind: str, output: Path) -> None:
    """Concatenate the slices' parts of one kind to ``output``; a single part is renamed instead of copied.

    Args:
        task: task of the last phase.
        kind: name of the parts, without their number.
        output: file to write; with the compression of the parts.
    """
    # In task order, which is input order: the output is the same for any number of workers.
    parts = [task.part(kind, index) for index in range(len(task.manifest.tasks))]
    # A rename works within one file system only.
    if len(parts) == 1 and os.stat(parts[0]).st_dev == os.stat(output.parent).st_dev:
        task.rename_part(parts[0], output)
        return
    # Plain: the parts are compressed already, and concatenated streams are a valid stream.
    append_files(task.create(output, plain=True), parts)


def records_ending(output: Path) -> str:
    """The extension of the parts of ``output``, with its compression."""
    return ".jsonl" + (output.suffix if is_compressed(output) else "")


def records_kind(task: Task) -> str:
    """The name of a slice's part of the documents."""
    return "records" + records_ending(task.job.output)


def dropped_kind(output: Path) -> str:
    """The name of a slice's part of the dropped documents."""
    return "dropped" + records_ending(output)


def join_records(task: Task) -> None:
    """Task function: concatenate the documents, and the dropped documents if the step writes them."""
    join_parts(task, records_kind(task), task.job.output)
    dropped: Path | None = getattr(task.job.settings, "save_dropped", None)
    if dropped is not None:
        join_parts(task, dropped_kind(dropped), dropped)


DROP_REASON = "drop_reason"
"""Key of the reason in the documents of ``--save-dropped``."""


class DroppedWriter:
    """Writes the dropped documents of a slice to ``--save-dropped``, if it is set."""

    def __init__(self, task: Task) -> None:
        dropped: Path | None = getattr(task.job.settings, "save_dropped", None)
        self._writer = None if dropped is None else task.create(task.part(dropped_kind(dropped)))

    def write(self, row: Row, reason: str, more: Mapping[str, Any] | None = None) -> None:
        """Write a document with its reason, and further entries."""
        if self._writer is None:
            return
        for key, value in {DROP_REASON: reason, **(more or {})}.items():
            encoded = json.dumps(value, ensure_ascii=False).encode("utf-8", ESCAPED)
            row = row._replace(raw=with_value(row, key, encoded))
        self._writer.write(row.raw + b"\n")


class MapWriter:
    """Writes the documents of a slice: kept ones to the output, dropped ones to ``--save-dropped``."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._writer = task.create(task.part(records_kind(task)))
        self._dropped = DroppedWriter(task)

    def drop(self, row: Row, reason: str) -> None:
        """Drop a document."""
        self._task.counts.drop(reason)
        self._dropped.write(row, reason)

    def write(self, row: Row, key: str, before: str, after: str) -> None:
        """Write a document; if its text changed, only the bytes of the text are replaced.

        A text with lone surrogates is rejected: UTF-8 cannot encode them.

        Args:
            row: the document.
            key: key of its text; dots address nested objects.
            before: text of the row.
            after: text to write.
        """
        if has_surrogates(after):
            self._task.reject(row.line, row.offset, "surrogate", row.raw)
        elif before == after:
            self._task.write_row(self._writer, row.raw)
        else:
            self._task.counts.changed += 1
            self._task.write_row(self._writer, replace_value(row.raw, path_of(row.value, key), encode_text(after)))


def with_value(row: Row, key: str, encoded: bytes) -> bytes:
    """The bytes of a row with a new value under a key; the entry is appended if the row has no such key."""
    if key in row.value:
        return replace_value(row.raw, (key,), encoded)
    return append_entry(row.raw, key, encoded)


def map_phases(manifest: TaskManifest, run: str) -> list[Phase]:
    """The phases of a step that maps the documents of each slice.

    Args:
        manifest: the task manifest.
        run: task function ``folder.module:function`` that writes the documents of one slice.
    """
    return [
        Phase(name="map", run=run, tasks=len(manifest.tasks), reads=True),
        Phase(name="join", run="runner.parts:join_records", tasks=1),
    ]


def filter_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of every filter."""
    return map_phases(manifest, "runner.parts:run_filter")


def run_filter(task: Task) -> None:
    """Task function: one slice of documents through the filter of the job's step.

    Raises:
        DynmoError: the filter raised an exception; the message has its step, package and document.
    """
    step, settings = find_step(task.job.step), task.job.settings
    document_filter = step.load_filter()(settings)
    writer = MapWriter(task)
    for row, text in task.documents(settings.json_key, allow_surrogates=document_filter.repairs_surrogates):
        try:
            result = document_filter.apply(text, row.value)
            after, reason = result.text, result.drop_reason
        except DynmoError:
            raise
        # The code of another package may raise anything; the message must name the package and the document.
        except Exception as error:
            place = f"{task.slice.path}, line {row.line} of the slice, byte {row.offset}"
            raise DynmoError(f"{place}: the {step.description} raised {type(error).__name__}: {error}") from error
        if reason is not None:
            writer.drop(row, reason)
        else:
            writer.write(row, settings.json_key, text, after)
