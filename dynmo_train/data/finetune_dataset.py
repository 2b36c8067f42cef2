"""Fine-tuning samples of BERT: pairs of texts with a label (MNLI), and questions with choices (RACE).

As Megatron builds them. A sample is one or more rows of tokens, all of one length, and a label.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._common.document import MAX_TABLE_BYTES, DocumentError, parse_any_json, read_text, short_repr
from .._common.errors import UsageError
from ..formats.os_errors import reason
from ..models.bert_tasks import NO_LABEL, TaskHead
from .tokenizer import Tokenizer
from .vocabulary import make_vocabulary

Int64Array = npt.NDArray[np.int64]
MNLI_LABELS: Mapping[str, int] = {"contradiction": 0, "entailment": 1, "neutral": 2}
RACE_CHOICES = 4
QUESTION_TOKENS = 128
# Columns of the GLUE files, where a header names none of these.
_GLUE_COLUMNS = {"sentence1": 8, "sentence2": 9}
_TEST_COLUMNS = 10


@dataclass(frozen=True, kw_only=True)
class Text:
    """A row before it is cut into tokens: what stands before the separator, and what behind it."""

    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sample: its rows, and which class, or which row, is right."""

    rows: tuple[Text, ...]
    label: int


def clean_text(text: str) -> str:
    """White space as single spaces, and no space before the end of a sentence."""
    text = re.sub(r"\s+", " ", text.replace("\n", " "))
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, MAX_TABLE_BYTES).split("\n")
    except DocumentError as error:
        raise UsageError(f"{path}: cannot be read: {reason(error)}") from error


def read_mnli(path: Path) -> list[Example]:
    """The pairs of a tab-separated file of GLUE: a header, texts by their names, else in columns 8 and 9, label last.

    A file of ten columns has no labels (GLUE's test); they count as contradictions then, as in Megatron.

    Raises:
        UsageError: the file cannot be read, or a line has too few columns or another label; names the line.
    """
    rows = [row for row in csv.reader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    if len(rows) < 2:
        raise UsageError(f"{path}: holds no pairs; a header and tab-separated lines are expected")
    header = rows[0]
    at = {name: header.index(name) if name in header else column for name, column in _GLUE_COLUMNS.items()}
    labelled = len(header) != _TEST_COLUMNS
    examples = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) <= max(at.values()):
            raise UsageError(
                f"{path}:{number}: has {len(row)} columns; the texts are in the columns {at['sentence1']} and"
                f" {at['sentence2']}, counted from 0"
            )
        label = row[-1].strip() if labelled else "contradiction"
        if label not in MNLI_LABELS:
            raise UsageError(f"{path}:{number}: the label must be one of {', '.join(MNLI_LABELS)}; is {label[:40]!r}")
        pair = Text(first=clean_text(row[at["sentence1"]]), second=clean_text(row[at["sentence2"]]))
        examples.append(Example(rows=(pair,), label=MNLI_LABELS[label]))
    return examples


def read_race(path: Path) -> list[Example]:
    """The questions of a directory of RACE: files ``*.txt``, in order of name, with a JSON object a line.

    Raises:
        UsageError: no such directory or files, or a line that is no such object; names the line.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else []
    if not files:
        raise UsageError(f"{path}: must be a directory of RACE, with files *.txt")
    examples: list[Example] = []
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            if line.strip():
                examples += _race_examples(line, f"{file}:{number}")
    return examples


def _race_examples(line: str, where: str) -> list[Example]:
    try:
        document = parse_any_json(line)
        article = clean_text(document["article"])
        asked = list(zip(document["questions"], document["options"], document["answers"], strict=True))
        examples = []
        for question, options, answer in asked:
            if len(options) != RACE_CHOICES or answer not in "ABCD" or len(answer) != 1:
                raise ValueError(f"a question has {len(options)} options and the answer {short_repr(answer)}")
            full = (question.replace("_", each) if "_" in question else f"{question} {each}" for each in options)
            rows = tuple(Text(first=clean_text(each), second=article) for each in full)
            examples.append(Example(rows=rows, label="ABCD".index(answer)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{where}: must be a JSON object with article, questions, options (four each) and answers (A to D): {error}"
        ) from error
    return examples


@dataclass(frozen=True, kw_only=True)
class TaskFormat:
    """A task's head and its data: how a path is read, and how many tokens of a row's first text count at most.

    ``class_names`` are the labels in the order of the logits; empty for choices, which have no names.
    """

    head: TaskHead
    read: Callable[[Path], list[Example]]
    first_tokens: int | None = None
    class_names: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of a sample."""
        return self.head.num_classes if self.head.kind == "multichoice" else 1


TASKS: Mapping[str, TaskFormat] = {
    "mnli": TaskFormat(
        head=TaskHead(kind="classification", num_classes=len(MNLI_LABELS)),
        read=read_mnli,
        class_names=tuple(sorted(MNLI_LABELS, key=MNLI_LABELS.__getitem__)),
    ),
    "race": TaskFormat(
        head=TaskHead(kind="multichoice", num_classes=RACE_CHOICES), read=read_race, first_tokens=QUESTION_TOKENS
    ),
}


def pair_tokens(
    first: Sequence[int], second: Sequence[int], length: int, *, cls: int, sep: int, pad: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """``[CLS] first [SEP] second [SEP]``, cut behind ``length`` tokens or filled up to them: ids, types, 1 for tokens.

    A cut sequence ends in a separator as well.
    """
    tokens = [cls, *first, sep, *second]
    types = [0] * (len(first) + 2) + [1] * len(second)
    tokens, types = [*tokens[: length - 1], sep], [*types[: length - 1], 1]
    rows = np.zeros((3, length), np.int64)
    rows[0] = rows[1] = pad
    for row, values in zip(rows, (tokens, types, [1] * len(tokens)), strict=True):
        row[: len(values)] = values
    return rows[0], rows[1], rows[2]


@dataclass(frozen=True, kw_only=True, eq=False)
class PairData:
    """A data set of a task as tensors: ids, types and presence ``[samples * rows, T]``, labels ``[samples]``."""

    name: str
    ids: Int64Array
    types: Int64Array
    seen: Int64Array
    labels: Int64Array
    rows: int

    def __len__(self) -> int:
        return len(self.labels)

    def tensors(self, samples: Sequence[int], size: int | None = None) -> dict[str, torch.Tensor]:
        """The named tensors of some samples; filled up to ``size`` with the first one, without a label."""
        wanted = np.asarray([*samples, *[0] * ((size or len(samples)) - len(samples))], np.int64)
        at = (wanted[:, None] * self.rows + np.arange(self.rows)).reshape(-1)
        labels = self.labels[wanted]
        labels[len(samples) :] = NO_LABEL
        return {
            "ids": torch.from_numpy(self.ids[at]),
            "types": torch.from_numpy(self.types[at]),
            "seen": torch.from_numpy(self.seen[at]).bool(),
            "labels": torch.from_numpy(labels),
        }


def build_pairs(task: str, path: str, tokenizer: Tokenizer, length: int) -> PairData:
    """Read a data set of ``task`` and cut it into tokens.

    Raises:
        UsageError: the data is not of the task's form, or the tokenizer has not the special tokens of BERT.
    """
    form = TASKS[task]
    examples = form.read(Path(path))
    vocabulary = make_vocabulary("the tokenizer", tokenizer.vocabulary(), tokenizer.vocab_size)
    cls, sep, pad = vocabulary.special("cls", "sep", "pad")
    known: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        if text not in known:
            known[text] = tokenizer.encode(text)
        return known[text]

    made = [
        pair_tokens(encode(row.first)[: form.first_tokens], encode(row.second), length, cls=cls, sep=sep, pad=pad)
        for example in examples
        for row in example.rows
    ]
    ids, types, seen = (np.stack(parts) for parts in zip(*made, strict=True))
    labels = np.array([example.label for example in examples], np.int64)
    return PairData(name=data_name(task, path), ids=ids, types=types, seen=seen, labels=labels, rows=form.rows)


def join_pairs(parts: Sequence[PairData]) -> PairData:
    """Several data sets as one."""
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "types", "seen", "labels")
    }
    return PairData(name=" ".join(part.name for part in parts), rows=parts[0].rows, **arrays)


def data_name(task: str, path: str) -> str:
    """What Megatron calls a data set in its log: what stands in its path behind the task's own folder."""
    tail = path.split(task.upper())[-1].removesuffix(".tsv").strip("/")
    return tail.replace("_" if task == "mnli" else "/", "-")
