"""The step ``decontaminate``: remove text of downstream tasks, by the rules of Megatron's ``filter_ngrams``.

    task files ─ dictionary ─> n-grams ─ count ─> documents per n-gram ─ threshold ─> rare n-grams
    documents ─ split ─> text before a hit, text after it (searched again) ─ join ─> output

The first pass counts the documents of each n-gram; n-grams of many documents are common phrases and are removed from
the dictionary. The second pass splits each document around the remaining n-grams. Texts and names are those of
Megatron's tool.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, parse_any_json
from .._common.errors import UsageError
from ..config.settings import DecontaminateSettings, parse_task
from ..formats.workfiles import undated_header
from ..io.atomic_write import open_atomic
from ..io.codecs import open_read
from ..io.json_edit import replace_value
from ..io.jsonl import MAX_KEYS, Row, encode_text, exact_integer, path_of, read_objects
from ..runner.parts import records_kind, with_value
from ..runner.task import Phase, Task, read_marker
from ..runner.task_manifest import TaskManifest
from ..tokenization.scripts import ends_clause, has_spaces
from .ngrams import NgramSizes, ScriptFinder, ngrams_of, split_spans, split_words

FORMAT, VERSION = "dynmo.ngrams", 1
# Within the value of a task's key: answers of some task files are objects around the text.
TEXT_KEYS = ("text", "input_text", "question")


def texts_under(value: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """All texts under one of ``keys``, at any depth of lists and objects."""
    if isinstance(value, list):
        for element in value:
            yield from texts_under(element, keys)
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _texts(element) if key in keys else texts_under(element, keys)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for element in value:
            yield from _texts(element)
    elif isinstance(value, dict):
        for key in TEXT_KEYS:
            if key in value:
                yield from _texts(value[key])


def read_task(path: Path, keys: tuple[str, ...]) -> Iterator[str]:
    """The texts of a task's file: one JSON document, or JSON lines.

    Raises:
        UsageError: the file has neither form, or none of the keys.
    """
    try:
        with open_read(path) as handle:
            payload = handle.read()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    try:
        documents = [parse_any_json(payload, MAX_TABLE_BYTES)]
    except ValueError:
        try:
            documents = [parse_any_json(line) for line in payload.split(b"\n") if line.strip()]
        except ValueError as error:
            raise UsageError(f"{path}: neither a JSON document nor JSON lines: {error}") from error
    found = list(texts_under(documents, keys))
    if not found:
        there = ", ".join(next((list(one)[:MAX_KEYS] for one in documents if isinstance(one, dict)), [])) or "none"
        raise UsageError(
            f"{path}: no text under {' or '.join(keys)}; its keys are {there}; state one with --task NAME=FILE:KEY"
        )
    yield from found


def split_around(text: str, start: int, length: int, margin: int) -> tuple[str, str]:
    """The text before and after an n-gram, without the sentences within ``margin`` characters of it.

    Args:
        text: the document.
        start: offset of the n-gram, in characters.
        length: characters of the n-gram.
        margin: minimum characters to remove on each side.
    """
    # Megatron's rule: from the margin outwards to a sentence end, whose sign stays on the left only.
    at = start - margin
    while at > 0 and not ends_clause(text, at):
        at -= 1
    left = text[: at + 1] if at > 0 else ""
    at = start + length + margin
    while at < len(text) and not ends_clause(text, at):
        at += 1
    return left, text[at + 1 :]


def clean_pieces(text: str, finder: ScriptFinder, margin: int, min_characters: int) -> list[str]:
    """The pieces of ``text`` without n-grams, each longer than ``min_characters`` unless it is the complete text.

    Args:
        text: the document.
        finder: the dictionary.
        margin: minimum characters to remove on each side of an n-gram.
        min_characters: pieces of at most this number of characters are dropped.

    Returns:
        The pieces in order; ``[text]`` if there is no n-gram, empty if nothing remains.
    """
    waiting = text
    pieces: list[str] = []
    while waiting:
        hit = finder.first(split_words(waiting))
        if hit is None:
            return [*pieces, waiting]
        spans = split_spans(waiting)
        left, right = split_around(waiting, spans[hit.word][0], hit.length(spans), margin)
        if len(left) > min_characters:
            pieces.append(left)
        waiting = right if len(right) > min_characters else ""
    return pieces if pieces or text else [""]


def find_all(text: str, finder: ScriptFinder) -> set[str]:
    """The n-grams in ``text``; the search resumes after each one."""
    found = set()
    waiting = text
    while waiting:
        hit = finder.first(split_words(waiting))
        if hit is None:
            break
        found.add(hit.ngram)
        spans = split_spans(waiting)
        # One character more is the space after it, as in Megatron's tool; other scripts have none.
        waiting = waiting[spans[hit.word][0] + hit.length(spans) + has_spaces(hit.ngram.split(" ")) :]
    return found


def decontaminate_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``decontaminate``."""
    count = len(manifest.tasks)
    return [
        Phase(name="dictionary", run="decontaminate.steps:make_dictionary", tasks=1),
        Phase(name="count", run="decontaminate.steps:count_hits", tasks=count, reads=True),
        Phase(name="threshold", run="decontaminate.steps:drop_common", tasks=1),
        Phase(name="split", run="decontaminate.steps:split_slice", tasks=count),
        Phase(name="join", run="runner.parts:join_records", tasks=1),
    ]


def make_dictionary(task: Task) -> None:
    """Task function: the n-grams of all tasks, or of a saved dictionary.

    Raises:
        UsageError: no tasks, a file that is not a dictionary, or a task's file that cannot be read.
    """
    settings: DecontaminateSettings = task.job.settings
    if settings.load_dictionary is not None:
        header, *entries = read_objects(settings.load_dictionary)
        if header.get("format") != FORMAT or header.get("version", 0) > VERSION:
            raise UsageError(f"{settings.load_dictionary}: not a dictionary of --save-dictionary; name such a file")
        ngrams = [entry["ngram"] for entry in entries]
    elif settings.task:
        sizes = NgramSizes(min_words=settings.min_ngram_size, max_words=settings.max_ngram_size)
        chosen = [parse_task(text) for text in settings.task]
        found: dict[str, None] = {}  # distinct and in order: a set of strings has another order in every process
        num_short = 0
        for text in (text for _, path, keys in chosen for text in read_task(path, keys)):
            of_text = dict.fromkeys(ngrams_of(text, sizes))
            num_short += not of_text
            found |= of_text
        ngrams = list(found)
        if num_short:
            # Their copies stay in the documents.
            task.facts["short_texts"] = num_short
    else:
        raise UsageError("decontaminate: no tasks; use --task NAME=FILE, or --load-dictionary FILE")
    task.create(task.part("all-ngrams.json")).write(json.dumps(ngrams, ensure_ascii=False).encode())
    task.facts["ngrams"] = len(ngrams)


@functools.lru_cache(maxsize=1)
def _made_finder(encoded: bytes, max_words: int) -> ScriptFinder:
    return ScriptFinder(json.loads(encoded), max_words)


def _finder(task: Task, kind: str) -> ScriptFinder:
    """The dictionary of a part, built once per process; both passes share it if no n-gram is common."""
    return _made_finder(task.part(kind, 0).read_bytes(), task.job.settings.max_ngram_size)


def count_hits(task: Task) -> None:
    """Task function: the number of documents of one slice with each n-gram; not for saved dictionaries."""
    settings: DecontaminateSettings = task.job.settings
    counting = settings.load_dictionary is None
    finder = _finder(task, "all-ngrams.json") if counting else None
    counts: Counter[str] = Counter()
    documents = 0
    # Also without counting: the number of documents of each slice determines the names of the pieces of the next ones.
    for _, text in task.documents(settings.json_key):
        documents += 1
        if finder is not None:
            counts.update(find_all(text, finder))
    task.create(task.part("counts.json")).write(json.dumps(counts, ensure_ascii=False).encode())
    task.result["documents"] = documents


def drop_common(task: Task) -> None:
    """Task function: the dictionary without n-grams of at least ``key_threshold`` documents."""
    settings: DecontaminateSettings = task.job.settings
    total: Counter[str] = Counter()
    for index in range(len(task.manifest.tasks)):
        total.update(json.loads(task.part("counts.json", index).read_bytes()))
    encoded = task.part("all-ngrams.json", 0).read_bytes()
    num_common = 0
    if max(total.values(), default=0) >= settings.key_threshold:
        ngrams = json.loads(encoded)
        rare = [ngram for ngram in ngrams if total[ngram] < settings.key_threshold]
        num_common = len(ngrams) - len(rare)
        encoded = json.dumps(rare, ensure_ascii=False).encode()
    # otherwise the same bytes: _made_finder then reuses the dictionary of the first pass
    task.create(task.part("rare-ngrams.json")).write(encoded)
    if settings.save_dictionary is not None:
        with open_atomic(settings.save_dictionary) as target:
            header = {**undated_header(FORMAT, VERSION), "tasks": list(settings.task)}
            for entry in (header, *({"ngram": ngram, "count": total[ngram]} for ngram in json.loads(encoded))):
                target.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
    task.facts["common_ngrams"] = num_common


def split_slice(task: Task) -> None:
    """Task function: the documents of one slice, split around the n-grams, each piece with its ``split_id``."""
    settings: DecontaminateSettings = task.job.settings
    finder = _finder(task, "rare-ngrams.json")
    names = "-".join(settings.name or [parse_task(text)[0] for text in settings.task]) or "dictionary"
    # The number of the document in all inputs, so that names do not depend on slices.
    number = sum(read_marker(task, "count", index)["result"]["documents"] for index in range(task.index))
    writer = task.create(task.part(records_kind(task)))
    num_pieces = 0
    for row, text in task.documents(settings.json_key):
        number += 1
        pieces = clean_pieces(text, finder, settings.remove_char_each_side, settings.filter_text_char_len)
        if len(pieces) > settings.splits_count:
            task.counts.drop("pieces")
            continue
        if not pieces:
            task.counts.drop("contaminated")
        elif pieces != [text]:
            task.counts.changed += 1
        path, before = path_of(row.value, settings.json_key), _earlier_name(row)
        for part, piece in enumerate(pieces):
            # Unchanged text keeps its bytes: encoding it again could change escapes.
            cut = row.raw if piece == text else replace_value(row.raw, path, encode_text(piece))
            name = encode_text(f"{before}{names}-{number:010d}-{part:04d}")
            task.write_row(writer, with_value(row._replace(raw=cut), "split_id", name), documents=int(part == 0))
        num_pieces += len(pieces)
    task.facts["pieces"] = num_pieces


def _earlier_name(row: Row) -> str:
    """The ``split_id`` of an earlier run with a trailing dash; empty if there is none."""
    if "split_id" not in row.value:
        return ""
    exact = exact_integer(row, "split_id")
    return f"{row.value['split_id'] if exact is None else exact}-"
