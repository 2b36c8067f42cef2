"""The task manifest: inputs divided into tasks once, stored in ``manifest.json``, and reused by a resumed run.

    inputs ─> Source (size, date) ─> cut ─> Slice, Slice, ... ─> one task each, in every phase that reads documents
    settings, limits, versions ─> digest_of ─> digest ─> equal: resume; different: refuse, or start from scratch

Slices are cut from sizes and line starts only, never from the number of workers: the same inputs and ``--task-bytes``
give the same tasks, and thereby the same parts, for any executor.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from .._common.document import check_regular
from .._common.errors import UsageError
from ..config.options import files_of, jsonable, outputs_of
from ..config.settings import MAX_TASKS
from ..formats.workfiles import MANIFEST
from ..io.codecs import PARQUET, PIECE_BYTES, is_compressed
from ..io.frames import LineFrame, line_frames
from ..io.jsonl import Slice
from ..io.mediawiki_dump import cut_points, is_dump

DEFAULT_TASK_BYTES = 64 << 20
DEFAULT_LINE_BYTES = 64 << 20
# A task of at least 1 MiB: smaller ones cost more for their files and markers than their balance saves.
END_SHARE, END_PIECES, MIN_PIECE_BYTES = 8, 16, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of dividing and reading inputs; part of the manifest.

    Attributes:
        task_bytes: bytes of text per slice, before it is moved to a line start or frame.
        max_line_bytes: maximum bytes of a line; longer lines are rejected.
        repair_utf8: replace invalid UTF-8 by U+FFFD instead of rejecting the line.
    """

    task_bytes: int = DEFAULT_TASK_BYTES
    max_line_bytes: int = DEFAULT_LINE_BYTES
    repair_utf8: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """An input file at the time of the manifest.

    Attributes:
        path: the file.
        size_bytes: its size in bytes.
        mtime_ns: its modification time, in nanoseconds since 1970; may be negative.
    """

    path: Path
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Source:
        """The current state of a file.

        Raises:
            UsageError: the file cannot be read, or is a FIFO or device.
        """
        try:
            status = os.stat(path)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
        check_regular(path)
        return cls(path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def as_json(self) -> dict[str, Any]:
        """The entry of the file in the manifest."""
        return {"path": str(self.path), "size_bytes": self.size_bytes, "mtime_ns": self.mtime_ns}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one step.

    Attributes:
        step: name of the step.
        inputs: input files.
        output: output file, or its prefix.
        work: work folder.
        settings: settings of the step.
        limits: limits of dividing and reading.
        package: name and version of the package of an outside filter; a run is not resumed with another version.
    """

    step: str
    inputs: tuple[Path, ...]
    output: Path
    work: Path
    settings: Any
    limits: Limits = Limits()
    package: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskManifest:
    """The tasks of a job, and what a resumed run must have in common with it.

    Attributes:
        digest: result of ``digest_of``.
        sources: the inputs, in order.
        tasks: one slice per task, in the order of the output.
    """

    digest: str
    sources: tuple[Source, ...]
    tasks: tuple[Slice, ...]

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs on disk."""
        return sum(source.size_bytes for source in self.sources)


def written_files(job: Job) -> list[Path]:
    """The files and folders that a job writes outside its work folder."""
    made = getattr(job.settings, "made_files", None)  # of a step whose output is a prefix
    own = [job.output] if made is None else made(job.output)
    return [*own, *outputs_of(job.settings)]


def _next_line_start(path: Path, offset: int) -> int:
    """The first line start at or after ``offset``, or the file size."""
    with open(path, "rb") as handle:
        # From the byte before: if that is a newline, a line starts at ``offset`` itself.
        handle.seek(offset - 1)
        at = offset - 1
        while piece := handle.read(PIECE_BYTES):
            found = piece.find(b"\n")
            if found >= 0:
                return at + found + 1
            at += len(piece)
    return at


def task_size(left: int, task_bytes: int, *, last: bool) -> int:
    """Bytes of the next task of a file.

    Tasks at the end of the last file become smaller, so that workers finish at about the same time (guided
    self-scheduling, Polychronopoulos and Kuck 1987): an eighth of the rest, at least a sixteenth of ``task_bytes``.

    Args:
        left: remaining bytes of the file.
        task_bytes: bytes of a regular task.
        last: the file is the last input.
    """
    smallest = task_bytes // END_PIECES
    return max(min(task_bytes, left // END_SHARE), smallest) if last and smallest >= MIN_PIECE_BYTES else task_bytes


def cut(source: Source, task_bytes: int, *, last: bool = False, has_lines: bool = True) -> list[Slice]:
    """Divide a plain file at line starts, a zstandard file at frames, a MediaWiki dump at its cut points.

    Other files are one slice.

    Args:
        source: the file.
        task_bytes: approximate bytes per slice.
        last: see ``task_size``.
        has_lines: the text of the file is lines; that of a dump is not.

    Returns:
        The slices in file order; together they have every byte of the file once.
    """
    if source.path.suffix == ".zst" and has_lines:
        return _cut_at_frames(source.path, task_bytes, last=last)
    size = source.size_bytes

    def step(at: int) -> int:
        """Bytes of the task that begins at byte ``at``."""
        return task_size(size - at, task_bytes, last=last)

    bounds = [0]
    if is_dump(source.path):
        bounds += cut_points(source.path, size, step)
    # Other compressed streams are read from their beginning, and parquet has its metadata at the end.
    elif is_compressed(source.path) or source.path.suffix == PARQUET:
        return [Slice(path=source.path)]
    else:
        while (at := bounds[-1] + step(bounds[-1])) < size:
            bounds.append(_next_line_start(source.path, at))
    if len(bounds) == 1:
        return [Slice(path=source.path)]
    if bounds[-1] < size:
        bounds.append(size)
    return [Slice(path=source.path, begin=a, end=b) for a, b in itertools.pairwise(bounds)]


def _cut_at_frames(path: Path, task_bytes: int, *, last: bool) -> list[Slice]:
    """Slices of about ``task_bytes`` of text, which begin with a frame and a line."""
    frames, size = line_frames(path)
    chosen = frames[:1]
    for frame in frames[1:]:
        at = chosen[-1].text
        # A frame without text would be a slice without lines.
        if at + task_size(size - at, task_bytes, last=last) <= frame.text < size:
            chosen.append(frame)
    if len(chosen) < 2:
        return [Slice(path=path)]
    return [
        Slice(path=path, begin=one.text, end=other.text, frame=one.stored, frame_end=other.stored)
        for one, other in itertools.pairwise([*chosen, LineFrame(os.path.getsize(path), size)])
    ]


def digest_of(job: Job, sources: Sequence[Source]) -> str:
    """The digest of everything that a resumed run must have in common with the stored one.

    Args:
        job: the job.
        sources: its inputs as they are now.

    Raises:
        UsageError: a file of the settings cannot be read.
    """
    # Sizes and dates stand for contents: hashing terabytes of inputs would take longer than most steps.
    files = [Source.of(path).as_json() for path in files_of(job.settings)]
    content = {
        "step": job.step,
        "settings": jsonable(job.settings, data_only=True),
        "limits": vars(job.limits),
        "sources": [source.as_json() for source in sources],
        "files": files,
        "output": str(job.output),
        # Another version may write other bytes, and one output must not mix parts of two versions.
        "program": __version__,
        "package": job.package,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_tasks(sources: Iterable[Source], task_bytes: int) -> None:
    """Refuse more than ``MAX_TASKS`` tasks: each task writes several files to the work folder.

    Args:
        sources: the inputs.
        task_bytes: bytes per task.

    Raises:
        UsageError: there would be more; the message has the smallest allowed ``--task-bytes``.
    """
    total = sum(source.size_bytes for source in sources)
    if total // task_bytes > MAX_TASKS:
        raise UsageError(
            f"--task-bytes {task_bytes}: {total:,} bytes of inputs would be more than {MAX_TASKS:,} tasks; "
            f"use at least {total // MAX_TASKS + 1}"
        )


def current_digest(job: Job) -> str:
    """The digest of a job and its inputs, as they are now.

    Raises:
        UsageError: an input or a file of the settings cannot be read.
    """
    return digest_of(job, tuple(Source.of(path) for path in job.inputs))


def make_manifest(job: Job) -> TaskManifest:
    """Divide the inputs, as they are now, into tasks.

    Raises:
        UsageError: an input or a file of the settings cannot be read.
    """
    sources = tuple(Source.of(path) for path in job.inputs)
    tasks = tuple(
        part
        for number, source in enumerate(sources, 1)
        for part in cut(
            source, job.limits.task_bytes, last=number == len(sources), has_lines=job.step != "extract-wiki"
        )
    )
    return TaskManifest(digest=digest_of(job, sources), sources=sources, tasks=tasks)


def store_manifest(job: Job, manifest: TaskManifest) -> None:
    """Write ``manifest.json`` to the work folder, atomically: a killed run leaves the old manifest or the new one."""
    fields = {
        "step": job.step,
        "digest": manifest.digest,
        "output": str(job.output),
        "settings": jsonable(job.settings),
        "limits": vars(job.limits),
        "sources": [source.as_json() for source in manifest.sources],
        "tasks": [_task_row(part) for part in manifest.tasks],
    }
    MANIFEST.write(job.work / "manifest.json", fields)


def _task_row(part: Slice) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(part.path), "begin": part.begin, "end": part.end}
    return row if part.frame is None else {**row, "frame": part.frame, "frame_end": part.frame_end}


def load_manifest(work: Path) -> TaskManifest:
    """Read ``manifest.json`` of a work folder.

    Raises:
        DocumentError: the document violates its format.
    """
    document = MANIFEST.read(work / "manifest.json")
    sources = (
        Source(path=Path(item["path"]), size_bytes=item["size_bytes"], mtime_ns=item["mtime_ns"])
        for item in document["sources"]
    )
    tasks = (Slice(**{**item, "path": Path(item["path"])}) for item in document["tasks"])
    return TaskManifest(digest=document["digest"], sources=tuple(sources), tasks=tuple(tasks))
