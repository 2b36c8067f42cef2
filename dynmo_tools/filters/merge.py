"""Merge files of documents into one, and give documents numbers: both touch no text."""

from __future__ import annotations

from .._common.errors import UsageError
from ..config.settings import AddIdSettings
from ..io.jsonl import encode_text
from ..runner.parts import map_phases, records_kind, with_value
from ..runner.task import Phase, Task, read_marker
from ..runner.task_manifest import TaskManifest


def merge_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``merge``."""
    return map_phases(manifest, "filters.merge:copy_rows")


def copy_rows(task: Task) -> None:
    """Task function: the documents of one slice as they are, each ended by a newline."""
    writer = task.create(task.part(records_kind(task)))
    for row in task.rows():
        task.write_row(writer, row.raw)


def add_id_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``add-id``: count each slice, so that every slice knows its first number."""
    return [
        Phase(name="count", run="filters.merge:count_rows", tasks=len(manifest.tasks), reads=True),
        Phase(name="number", run="filters.merge:number_rows", tasks=len(manifest.tasks)),
        Phase(name="join", run="runner.parts:join_records", tasks=1),
    ]


def count_rows(task: Task) -> None:
    """Task function: the number of documents of one slice.

    Raises:
        UsageError: a document has a number already, and ``rewrite`` is not set.
    """
    settings: AddIdSettings = task.job.settings
    count = 0
    for row in task.rows():
        if settings.id_key in row.value and not settings.rewrite:
            raise UsageError(
                f"{task.slice.path}: the document at byte {row.offset} has the key {settings.id_key!r} already; "
                "--rewrite replaces it, --id-key names another one"
            )
        count += 1
    task.result["documents"] = count


def number_rows(task: Task) -> None:
    """Task function: the documents of one slice with their numbers, from 1 on over all inputs."""
    settings: AddIdSettings = task.job.settings
    number = sum(read_marker(task, "count", index)["result"]["documents"] for index in range(task.index))
    writer = task.create(task.part(records_kind(task)))
    for row in task.rows():
        number += 1
        name = encode_text(f"{settings.id_prefix}-{number:010d}")
        task.write_row(writer, with_value(row, settings.id_key, name))
