"""Test sets of lm-evaluation-harness from local files: finds and checks them, and writes them in its task format.

A task's file may be in the format in which its authors publish it.
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
    """How a task of the harness reads local data.

    Attributes:
        yaml: the task's description in the harness's directory of tasks.
        split: the split that the task evaluates on.
        files: accepted paths of the data, the preferred one first.
        columns: required keys of a row.
        row: converts a published row to the format of the harness; None leaves it unchanged.
    """

    yaml: str
    split: str
    files: tuple[str, ...]
    columns: tuple[str, ...]
    row: Callable[[Row], Row] | None = None


def _hellaswag(row: Row) -> Row:
    """The published rows have two context columns, and the label as a number."""
    return {name: row[name] for name in ("ctx_a", "ctx_b", "activity_label", "endings")} | {"label": str(row["label"])}


def _piqa(row: Row) -> Row:
    return {name: row[name] for name in ("goal", "sol1", "sol2")} | {"label": int(row["label"])}


def _race(row: Row) -> Row:
    """The harness expects all questions of an article in one ``problems`` string; RACE publishes parallel lists."""
    if "problems" in row:
        problems = row["problems"]
        return {"article": row["article"], "problems": problems if isinstance(problems, str) else repr(problems)}
    questions = zip(row["questions"], row["options"], row["answers"], strict=True)
    problems = [{"question": q, "options": o, "answer": a} for q, o, a in questions]
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
    """Split the names of ``--tasks``, separated by commas; each is returned once.

    Raises:
        UsageError: a name is unknown, or there are none; lists the tasks.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise UsageError(f"--tasks {text!r}: unknown {', '.join(unknown) or 'task'}; the tasks are {', '.join(TASKS)}")
    return list(dict.fromkeys(names))


def find_data(task: str, folder: Path) -> Path:
    """The path of a task's data in ``folder``.

    Raises:
        UsageError: there is none; names the accepted paths.
    """
    for name in TASKS[task].files:
        if (folder / name).exists():
            return folder / name
    raise UsageError(f"--task-data {folder}: contains no data of {task}; add {' or '.join(TASKS[task].files)}")


def _documents(path: Path) -> list[tuple[str, Any]]:
    """The objects of a JSON lines file, a JSON list, or a directory of such files, each with its location."""
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
    """The rows of a task's data, in the format of the harness.

    Raises:
        UsageError: a row lacks a column, or there are no rows; names the line.
    """
    spec, rows = TASKS[task], []
    for where, row in _documents(path):
        missing = [name for name in spec.columns if not isinstance(row, dict) or name not in row]
        if missing:
            raise UsageError(f"{where}: {task} needs {', '.join(spec.columns)}; lacks {', '.join(missing)}")
        try:
            rows.append(spec.row(row) if spec.row is not None else row)
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise UsageError(f"{where}: is not a row of {task}: {error}") from error
    if not rows:
        raise UsageError(f"{path}: contains no rows; {task} needs {', '.join(spec.columns)}")
    return rows


def write_task(task: str, rows: Sequence[Row], folder: Path, harness_tasks: Path) -> str:
    """Write the data and the description of a task for the harness into ``folder``; returns the task's local name.

    Args:
        task: a key of ``TASKS``.
        rows: the data.
        folder: directory to write to.
        harness_tasks: the harness's directory of tasks; the description includes the task's own and replaces the data.
    """
    spec = TASKS[task]
    data, name = folder / f"{task}.jsonl", f"local_{task}"
    # A copy in the harness's format, so that its loader of data sets reads a local file and nothing from the network.
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # Keys that are null here replace those of the included description, which name a data set on the network.
    lines = [
        f"include: {json.dumps(str(harness_tasks / spec.yaml))}",
        f"task: {name}",
        "tag: null",
        "dataset_path: json",
        "dataset_name: null",
        f"dataset_kwargs: {json.dumps({'data_files': {spec.split: str(data)}})}",
        "training_split: null",
        f"validation_split: {spec.split if spec.split == 'validation' else 'null'}",
        f"test_split: {spec.split if spec.split == 'test' else 'null'}",
    ]
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return name
