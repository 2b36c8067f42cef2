"""Test sets of lm-evaluation-harness from a person's own files: found, checked, and written in the form of its tasks.

Pure but for reading and writing files. A task's file may have the form in which its authors publish it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, DocumentError, parse_any_json, read_text
from .._common.errors import UsageError
from ..formats.os_errors import reason

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class HarnessTask:
    """How one task of the harness reads local data.

    Attributes:
        yaml: the harness's own description of the task, in its folder of tasks.
        split: of the data that the task is measured on.
        files: names under which the data may lie, the first one being ours.
        columns: what a line must have.
        row: a line in the form that the task reads, from one as published.
    """

    yaml: str
    split: str
    files: tuple[str, ...]
    columns: tuple[str, ...]
    row: Callable[[Row], Row] | None = None


def _hellaswag(row: Row) -> Row:
    """As published by its authors: the context in two parts, the label as a number."""
    return {name: row[name] for name in ("ctx_a", "ctx_b", "activity_label", "endings")} | {"label": str(row["label"])}


def _piqa(row: Row) -> Row:
    return {name: row[name] for name in ("goal", "sol1", "sol2")} | {"label": int(row["label"])}


def _race(row: Row) -> Row:
    """The questions of an article together, as the harness wants them; from the lists of RACE where it has those."""
    if "problems" in row:
        problems = row["problems"]
        return {"article": row["article"], "problems": problems if isinstance(problems, str) else repr(problems)}
    asked = zip(row["questions"], row["options"], row["answers"], strict=True)
    problems = [{"question": q, "options": o, "answer": a} for q, o, a in asked]
    return {"article": row["article"], "problems": repr(problems)}


TASKS: Mapping[str, HarnessTask] = {
    "lambada": HarnessTask(
        yaml="lambada/lambada_openai.yaml",
        split="test",
        files=("lambada.jsonl", "lambada_test.jsonl"),
        columns=("text",),
        row=lambda row: {"text": row["text"]},
    ),
    "hellaswag": HarnessTask(
        yaml="hellaswag/hellaswag.yaml",
        split="validation",
        files=("hellaswag.jsonl", "hellaswag_val.jsonl"),
        columns=("ctx_a", "ctx_b", "activity_label", "endings", "label"),
        row=_hellaswag,
    ),
    "piqa": HarnessTask(
        yaml="piqa/piqa.yaml",
        split="validation",
        files=("piqa.jsonl", "valid_labelled.jsonl", "piqa/valid_labelled.jsonl"),
        columns=("goal", "sol1", "sol2", "label"),
        row=_piqa,
    ),
    "mathqa": HarnessTask(
        yaml="mathqa/mathqa.yaml",
        split="test",
        files=("mathqa.jsonl", "mathqa.json", "mathqa/test.json"),
        columns=("Problem", "options", "correct"),
        row=lambda row: {name: row[name] for name in ("Problem", "options", "correct")},
    ),
    "winogrande": HarnessTask(
        yaml="winogrande/default.yaml",
        split="validation",
        files=("winogrande.jsonl", "winogrande/dev.jsonl"),
        columns=("sentence", "option1", "option2", "answer"),
        row=lambda row: {name: row[name] for name in ("sentence", "option1", "option2", "answer")},
    ),
    "race": HarnessTask(
        yaml="race/race.yaml",
        split="test",
        files=("race.jsonl", "RACE/test/high"),
        columns=("article",),
        row=_race,
    ),
}


def parse_tasks(text: str) -> list[str]:
    """Names between commas; raises ``UsageError`` naming those that are no task."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise UsageError(f"--tasks {text!r}: {', '.join(unknown) or 'none'}; the tasks are {', '.join(TASKS)}")
    return list(dict.fromkeys(names))


def find_data(task: str, folder: Path) -> Path:
    """Where the data of a task lie; raises ``UsageError`` with the names that were looked for."""
    for name in TASKS[task].files:
        if (folder / name).exists():
            return folder / name
    raise UsageError(f"--task-data {folder}: holds no data of {task}; put it there as {' or '.join(TASKS[task].files)}")


def _documents(path: Path) -> list[tuple[str, Any]]:
    """The objects of a file of JSON lines or of one JSON list, or of a folder of such, each with where it stands."""
    if path.is_dir():
        return [each for file in sorted(path.glob("*.txt")) for each in _documents(file)]
    try:
        text = read_text(path, MAX_TABLE_BYTES)
        if text.lstrip().startswith("["):
            return [
                (f"{path}, entry {number}", row) for number, row in enumerate(parse_any_json(text, MAX_TABLE_BYTES), 1)
            ]
        lines = enumerate(text.split("\n"), 1)
        return [(f"{path}:{number}", parse_any_json(line)) for number, line in lines if line.strip()]
    except (DocumentError, ValueError) as error:
        raise UsageError(f"{path}: is neither JSON lines nor a JSON list: {reason(error)}") from error


def read_rows(task: str, path: Path) -> list[Row]:
    """The rows of a task's data, in the form that the harness reads.

    Raises:
        UsageError: a row lacks a column, or none is there; names the line.
    """
    form, rows = TASKS[task], []
    for where, row in _documents(path):
        missing = [name for name in form.columns if not isinstance(row, dict) or name not in row]
        if missing:
            raise UsageError(f"{where}: {task} needs {', '.join(form.columns)}; has no {', '.join(missing)}")
        try:
            rows.append(form.row(row) if form.row is not None else row)
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(f"{where}: is no row of {task}: {error}") from error
    if not rows:
        raise UsageError(f"{path}: holds no rows of {task}")
    return rows


def write_task(task: str, rows: Sequence[Row], folder: Path, harness_tasks: Path) -> str:
    """Write the data of a task and its description for the harness into ``folder``; the task's name there.

    Args:
        harness_tasks: the harness's own folder of tasks, whose description is taken over but for the data.
    """
    form = TASKS[task]
    data, name = folder / f"{task}.jsonl", f"local_{task}"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines = [
        f"include: {json.dumps(str(harness_tasks / form.yaml))}",
        f"task: {name}",
        "tag: null",
        "dataset_path: json",
        "dataset_name: null",
        f"dataset_kwargs: {json.dumps({'data_files': {form.split: str(data)}})}",
        "training_split: null",
        f"validation_split: {form.split if form.split == 'validation' else 'null'}",
        f"test_split: {form.split if form.split == 'test' else 'null'}",
    ]
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return name
