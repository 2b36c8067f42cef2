"""Fine-tuning samples of BERT, as Megatron builds them: pairs of texts with a label (MNLI), questions (RACE).

A sample is one row of tokens (MNLI), or one row per choice (RACE), and a label.
Shapes in names: N samples, R = N * rows per sample, T tokens.
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
from ..models.families.bert_tasks import NO_LABEL, TaskHead
from .tokenizer import Tokenizer
from .vocabulary import make_vocabulary

Int64Array = npt.NDArray[np.int64]
MNLI_LABELS: Mapping[str, int] = {"contradiction": 0, "entailment": 1, "neutral": 2}
RACE_CHOICES = 4
QUESTION_TOKENS = 128
# Default columns of GLUE files, where the header does not name these.
_GLUE_COLUMNS = {"sentence1": 8, "sentence2": 9}
_TEST_COLUMNS = 10


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """The two texts of a row, before and after the separator token."""

    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sample: its rows, and the index of the correct class or row."""

    rows: tuple[TextPair, ...]
    label: int


def clean_text(text: str) -> str:
    """Collapse white space, and remove the space before a full stop."""
    text = re.sub(r"\s+", " ", text.replace("\n", " "))
    # Three times as in Megatron: consecutive stops share a space, of which one pass replaces every second.
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, MAX_TABLE_BYTES).split("\n")
    except DocumentError as error:
        raise UsageError(f"{path}: cannot be read: {reason(error)}") from error


def read_mnli(path: Path) -> list[Example]:
    """Read the pairs of a tab-separated GLUE file: the texts by header, else columns 8 and 9; the label is last.

    A file of ten columns has no labels (GLUE's test set); as in Megatron, the label is then ``contradiction``.

    Raises:
        UsageError: the file cannot be read, or a line has too few columns or an unknown label; names the line.
    """
    # Without quoting: GLUE has unbalanced quotation marks in its texts.
    reader = csv.reader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: {error}") from error
    if len(rows) < 2:
        raise UsageError(f"{path}: contains no pairs; must have a header and tab-separated lines")
    header = rows[0]
    at = {name: header.index(name) if name in header else column for name, column in _GLUE_COLUMNS.items()}
    labelled = len(header) != _TEST_COLUMNS
    examples = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) <= max(at.values()):
            raise UsageError(
                f"{path}:{number}: has {len(row)} columns; the texts must be in columns {at['sentence1']} and"
                f" {at['sentence2']}, counted from 0"
            )
        label = row[-1].strip() if labelled else "contradiction"
        if label not in MNLI_LABELS:
            raise UsageError(f"{path}:{number}: the label must be one of {', '.join(MNLI_LABELS)}; is {label[:40]!r}")
        pair = TextPair(first=clean_text(row[at["sentence1"]]), second=clean_text(row[at["sentence2"]]))
        examples.append(Example(rows=(pair,), label=MNLI_LABELS[label]))
    return examples


def read_race(path: Path) -> list[Example]:
    """Read the questions of a RACE directory: files ``*.txt``, sorted by name, with one JSON object per line.

    Raises:
        UsageError: there are no such files, or a line is not such an object; names the line.
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
        questions = list(zip(document["questions"], document["options"], document["answers"], strict=True))
        examples = []
        for question, options, answer in questions:
            if len(options) != RACE_CHOICES or answer not in "ABCD" or len(answer) != 1:
                raise ValueError(f"a question has {len(options)} options and the answer {short_repr(answer)}")
            full = (question.replace("_", each) if "_" in question else f"{question} {each}" for each in options)
            rows = tuple(TextPair(first=clean_text(each), second=article) for each in full)
            examples.append(Example(rows=rows, label="ABCD".index(answer)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{where}: must be a JSON object with article, questions, options (four each) and answers (A to D): {error}"
        ) from error
    return examples


@dataclass(frozen=True, kw_only=True)
class TaskFormat:
    """A fine-tuning task.

    Attributes:
        head: the model's head.
        read: reads a data set.
        first_tokens: limit of the tokens of a row's first text, None for unlimited.
        class_names: labels in the order of the logits; empty for multiple choice.
    """

    head: TaskHead
    read: Callable[[Path], list[Example]]
    first_tokens: int | None = None
    class_names: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows per sample."""
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
    """Encode ``[CLS] first [SEP] second [SEP]``, truncated or padded to ``length`` tokens; a separator always ends it.

    Args:
        first: token ids of the first text.
        second: token ids of the second text.
        length: tokens of the row.
        cls: id of the first token.
        sep: id of the separator.
        pad: id of the padding.

    Returns:
        Token ids, token types and attention mask, int64 ``[length]`` each.
    """
    tokens = [cls, *first, sep, *second]
    types = [0] * (len(first) + 2) + [1] * len(second)
    # The separator is added after the cut: a row always ends with one, as in Megatron.
    tokens, types = [*tokens[: length - 1], sep], [*types[: length - 1], 1]
    rows = np.zeros((3, length), np.int64)
    rows[0] = rows[1] = pad
    for row, values in zip(rows, (tokens, types, [1] * len(tokens)), strict=True):
        row[: len(values)] = values
    return rows[0], rows[1], rows[2]


@dataclass(frozen=True, kw_only=True, eq=False)
class PairData:
    """A tokenized data set of a task.

    Attributes:
        name: the data set, as Megatron's log names it.
        ids: token ids, int64 ``[R, T]``.
        types: token types, int64 ``[R, T]``.
        attention_mask: 1 for tokens, 0 for padding, int64 ``[R, T]``.
        labels: index of the correct class or row, int64 ``[N]``.
        rows: rows per sample.
    """

    name: str
    ids: Int64Array
    types: Int64Array
    attention_mask: Int64Array
    labels: Int64Array
    rows: int

    def __len__(self) -> int:
        return len(self.labels)

    def tensors(self, samples: Sequence[int], size: int | None = None) -> dict[str, torch.Tensor]:
        """The inputs of some samples, padded to ``size`` with unlabelled copies of the first sample of the data set.

        Args:
            samples: indices of samples.
            size: number of samples to return, N; by default all of ``samples``.

        Returns:
            ``ids``, ``types`` (int64) and ``attention_mask`` (bool), ``[N * rows, T]``; ``labels``, int64 ``[N]``.
        """
        chosen = np.asarray([*samples, *[0] * ((size or len(samples)) - len(samples))], np.int64)
        at = (chosen[:, None] * self.rows + np.arange(self.rows)).reshape(-1)
        labels = self.labels[chosen]
        labels[len(samples) :] = NO_LABEL
        return {
            "ids": torch.from_numpy(self.ids[at]),
            "types": torch.from_numpy(self.types[at]),
            "attention_mask": torch.from_numpy(self.attention_mask[at]).bool(),
            "labels": torch.from_numpy(labels),
        }


def build_pairs(task: str, path: str, tokenizer: Tokenizer, length: int) -> PairData:
    """Read and tokenize a data set of ``task``.

    Args:
        task: a key of ``TASKS``.
        path: file or directory.
        tokenizer: the model's.
        length: tokens of a row.

    Raises:
        UsageError: the data is not in the task's format, or the tokenizer lacks the special tokens of BERT.
    """
    task_format = TASKS[task]
    examples = task_format.read(Path(path))
    vocabulary = make_vocabulary("the tokenizer", tokenizer.vocabulary(), tokenizer.vocab_size)
    cls, sep, pad = vocabulary.special("cls", "sep", "pad")
    # RACE repeats an article for each choice of each question.
    cache: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        if text not in cache:
            cache[text] = tokenizer.encode(text)
        return cache[text]

    encoded = [
        pair_tokens(
            encode(row.first)[: task_format.first_tokens], encode(row.second), length, cls=cls, sep=sep, pad=pad
        )
        for example in examples
        for row in example.rows
    ]
    ids, types, mask = (np.stack(parts) for parts in zip(*encoded, strict=True))
    labels = np.array([example.label for example in examples], np.int64)
    return PairData(
        name=data_name(task, path), ids=ids, types=types, attention_mask=mask, labels=labels, rows=task_format.rows
    )


def join_pairs(parts: Sequence[PairData]) -> PairData:
    """Concatenate data sets."""
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("ids", "types", "attention_mask", "labels")
    }
    return PairData(name=" ".join(part.name for part in parts), rows=parts[0].rows, **arrays)


def data_name(task: str, path: str) -> str:
    """The name of a data set in Megatron's log: its path below the folder of the task, without extension."""
    tail = path.split(task.upper())[-1].removesuffix(".tsv").strip("/")
    return tail.replace("_" if task == "mnli" else "/", "-")
