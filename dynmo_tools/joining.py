"""The last phase of most steps: parts become one output by copying, in the order of the tasks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .compression import is_compressed
from .plan import Plan
from .tasks import Phase, Task

COPY_BYTES = 1 << 24


def copy_into(target: IO[bytes], parts: Sequence[Path]) -> None:
    """Append the bytes of ``parts`` to ``target``, by the kernel where it can."""
    target.flush()
    for part in parts:
        with open(part, "rb") as source:
            try:
                while os.sendfile(target.fileno(), source.fileno(), None, COPY_BYTES):
                    pass
            except OSError:
                shutil.copyfileobj(source, target, COPY_BYTES)
                target.flush()


def join_parts(task: Task, kind: str, output: Path) -> None:
    """Make ``output`` of the slices' parts of this kind; a single part is moved instead of copied."""
    parts = [task.part(kind, index) for index in range(len(task.plan.tasks))]
    if len(parts) == 1 and os.stat(parts[0]).st_dev == os.stat(output.parent).st_dev:
        task.adopt(parts[0], output)
        return
    copy_into(task.create(output, plain=True), parts)


def records_ending(output: Path) -> str:
    """The ending of the parts that ``output`` is joined of: that of its compression."""
    return ".jsonl" + (output.suffix if is_compressed(output) else "")


def records_kind(task: Task) -> str:
    """The name of a slice's part of the records."""
    return "records" + records_ending(task.job.output)


def join_records(task: Task) -> None:
    """Task function: the output of a step that maps documents to documents."""
    join_parts(task, records_kind(task), task.job.output)


def map_phases(plan: Plan, run: str) -> list[Phase]:
    """The phases of a step whose function ``run`` (``module:function``) writes each slice's documents."""
    return [
        Phase(name="map", run=run, tasks=len(plan.tasks), reads=True),
        Phase(name="join", run="joining:join_records", tasks=1),
    ]
