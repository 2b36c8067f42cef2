"""The steps ``merge`` and ``add-id``; both leave the texts unchanged."""

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
    """Task function: copy the rows of one slice, each with a newline."""
    writer = task.create(task.part(records_kind(task)))
    for row in task.rows():
        task.write_row(writer, row.raw)


def add_id_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``add-id``: the count of each slice determines the first number of the next."""
    return [
        Phase(name="count", run="filters.merge:count_rows", tasks=len(manifest.tasks), reads=True),
        Phase(name="number", run="filters.merge:number_rows", tasks=len(manifest.tasks)),
        Phase(name="join", run="runner.parts:join_records", tasks=1),
    ]


def count_rows(task: Task) -> None:
    """Task function: count the documents of one slice.

    Raises:
        UsageError: a document has an id already, and ``rewrite`` is not set.
    """
    settings: AddIdSettings = task.job.settings
    count = 0
    for row in task.rows():
        if settings.id_key in row.value and not settings.rewrite:
            raise UsageError(
                f"{task.slice.path}: the document at byte {row.offset} has the key {settings.id_key!r} already; "
                "use --rewrite to replace it, or --id-key for another key"
            )
        count += 1
    task.result["documents"] = count


def number_rows(task: Task) -> None:
    """Task function: number the documents of one slice."""
    settings: AddIdSettings = task.job.settings
    # Numbers follow from the counts of earlier slices, so slices are numbered in parallel, with the same numbers as one
    # process would give.
    number = sum(read_marker(task, "count", index)["result"]["documents"] for index in range(task.index))
    writer = task.create(task.part(records_kind(task)))
    for row in task.rows():
        number += 1
        # Ten digits, as in Megatron's add_id: the names sort in input order.
        name = encode_text(f"{settings.id_prefix}-{number:010d}")
        task.write_row(writer, with_value(row, settings.id_key, name))
