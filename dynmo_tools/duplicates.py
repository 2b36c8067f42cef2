"""Near-duplicates: sign every document, match the signatures; then list the pairs, or leave the later ones out."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import UsageError
from .fingerprints import (
    NAMES,
    OFFSETS,
    SIGNATURES,
    TEXTS,
    SignedDocuments,
    SignedPart,
    load_part,
    save_parts,
    write_name,
)
from .joining import map_phases, records_kind
from .matching import Pair, Seen, ShingleCache, match
from .minhash import BLOCK_SHINGLES, permutations, sign
from .plan import Plan
from .records import Row
from .settings import MatchSettings, RemoveDuplicatesSettings
from .spilling import NameTable, SortedPairs
from .tasks import Phase, Task, marker_of
from .unionfind import UnionFind

REMOVED = "removed.u8"
DOCUMENT_CHARACTERS = 64  # what the objects of a waiting document weigh beside its characters


def find_phases(plan: Plan) -> list[Phase]:
    """The phases of ``find-duplicates``."""
    return [
        Phase(name="sign", run="duplicates:sign_slice", tasks=len(plan.tasks), reads=True),
        Phase(name="match", run="duplicates:list_pairs", tasks=1),
    ]


def dedup_phases(plan: Plan) -> list[Phase]:
    """The phases of ``dedup``."""
    count = len(plan.tasks)
    return [
        Phase(name="sign", run="duplicates:sign_slice", tasks=count, reads=True),
        Phase(name="match", run="duplicates:mark_later_ones", tasks=1),
        Phase(name="remove", run="duplicates:remove_marked", tasks=count),
        Phase(name="join", run="joining:join_records", tasks=1),
    ]


def remove_phases(plan: Plan) -> list[Phase]:
    """The phases of ``remove-duplicates``."""
    return map_phases(plan, "duplicates:remove_named")


def name_of(value: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """A document's name: the first of ``keys`` that it has, as text."""
    for key in keys:
        found = value.get(key)
        if isinstance(found, str | int) and not isinstance(found, bool):
            return str(found)
    return None


def place_of(path: Path, row: Row) -> str:
    """Where a document stands: ``FILE@OFFSET`` in bytes of its decompressed text, or ``FILE@ROW`` in parquet."""
    return f"{path}@{row.line if path.suffix == '.parquet' else row.offset}"


def check_bands(settings: MatchSettings) -> None:
    """``UsageError`` where the permutations do not divide into the bands."""
    if settings.num_bands < 1 or settings.num_seeds % settings.num_bands:
        raise UsageError(
            f"{settings.num_seeds} permutations do not divide into {settings.num_bands} bands; choose a divisor"
        )


def sign_slice(task: Task) -> None:
    """Task function: the signatures, texts, text offsets and names of one slice."""
    settings: MatchSettings = task.job.settings
    check_bands(settings)
    perms = permutations(settings.num_seeds, settings.seed)
    kinds = (SIGNATURES, TEXTS, OFFSETS, NAMES)
    signatures, texts, offsets, names = (task.create(task.part(kind)) for kind in kinds)
    offsets.write(np.zeros(1, dtype=np.int64).tobytes())
    waiting: list[str] = []
    ends: list[int] = []
    size = end = documents = 0

    def flush() -> None:
        signatures.write(sign(waiting, settings.shingle_characters, perms).tobytes())
        offsets.write(np.asarray(ends, dtype=np.int64).tobytes())
        waiting.clear()
        ends.clear()

    for row, text in task.documents(settings.json_key):
        encoded = text.encode()
        texts.write(encoded)
        write_name(names, name_of(row.value, settings.id_key), place_of(task.slice.path, row))
        end += len(encoded)
        documents += 1
        ends.append(end)
        waiting.append(text)
        size += len(text) + DOCUMENT_CHARACTERS
        if size >= 4 * BLOCK_SHINGLES:
            flush()
            size = 0
    if waiting:
        flush()
    task.result["documents"] = documents
    if task.job.step == "find-duplicates":  # dedup counts what it writes
        task.tally.documents_kept += documents


def _parts(task: Task) -> tuple[list[SignedPart], int]:
    """Loaded fingerprints, then this run's slices; and the number of loaded documents."""
    settings: MatchSettings = task.job.settings
    loaded = [load_part(folder, settings) for folder in settings.load_fingerprints]
    folder = task.job.work / "parts"
    own = [
        SignedPart(folder=folder, stem=f"{index:05d}-", count=_count(task, index))
        for index in range(len(task.plan.tasks))
    ]
    return [*loaded, *own], sum(part.count for part in loaded)


def _count(task: Task, index: int) -> int:
    count: int = marker_of(task, "sign", index)["result"]["documents"]
    return count


def _pairs(documents: SignedDocuments, settings: MatchSettings, known: Callable[[int, int], bool]) -> Iterator[Pair]:
    cache = ShingleCache(documents.text, settings.shingle_characters)
    return match(
        lambda band: documents.band_keys(band, settings.num_bands),
        settings.num_bands,
        lambda first, second: cache.jaccard(first, second, settings.jaccard.value),
        known,
        threshold=settings.threshold,
        rounds=settings.heuristic_iter,
    )


def mark_later_ones(task: Task) -> None:
    """Task function: which documents of this run are later duplicates, one byte each."""
    settings: MatchSettings = task.job.settings
    parts, before = _parts(task)
    documents = SignedDocuments(parts, settings.num_seeds)
    sets = UnionFind(documents.count)
    for pair in _pairs(documents, settings, sets.together):
        sets.join(pair.main, pair.other)
    removed, groups, largest = sets.later_ones()
    task.create(task.part(REMOVED)).write(removed[before:].tobytes())
    if settings.save_fingerprints is not None:
        save_parts(parts, settings.save_fingerprints, settings)
    task.facts.update(groups=groups, largest_group=largest)
    if before:
        task.facts["earlier_documents"] = before


def remove_marked(task: Task) -> None:
    """Task function: one slice without its later duplicates."""
    settings: MatchSettings = task.job.settings
    begin = sum(_count(task, index) for index in range(task.index))
    count = _count(task, task.index)
    removed = np.fromfile(task.part(REMOVED, 0), dtype=np.uint8, offset=begin, count=count)
    writer = task.create(task.part(records_kind(task)))
    for drop, (row, _) in zip(removed, task.documents(settings.json_key), strict=True):
        if drop:
            task.tally.drop("duplicate")
        else:
            task.keep(writer, row.raw)


def _write_pairs(writer: IO[bytes], found: SortedPairs, names: NameTable) -> int:
    count = 0
    for main, pairs in itertools.groupby(found, key=itemgetter(0)):
        listed = [{names[other]: round(index, 6)} for _, other, index in pairs]
        writer.write(json.dumps({names[main]: listed}, ensure_ascii=False).encode() + b"\n")
        count += len(listed)
    return count


def list_pairs(task: Task) -> None:
    """Task function: ``{main: [{other: J}, ...]}`` for each document that has later near-duplicates."""
    settings: MatchSettings = task.job.settings
    parts, _ = _parts(task)
    documents = SignedDocuments(parts, settings.num_seeds)
    folder = task.job.work / "parts"
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(SortedPairs(folder))
        for pair in _pairs(documents, settings, Seen(documents.count)):
            found.add(pair.main, pair.other, pair.jaccard)
        names = stack.enter_context(NameTable([part.path(NAMES) for part in parts], documents.count, folder))
        count = _write_pairs(task.create(task.job.output), found, names)
    if settings.save_fingerprints is not None:
        save_parts(parts, settings.save_fingerprints, settings)
    task.facts.update(pairs=count, repeated_names=names.num_repeated)


def remove_named(task: Task) -> None:
    """Task function: one slice without the documents that a group names behind its first one."""
    from .groups import read_removals

    settings: RemoveDuplicatesSettings = task.job.settings
    removals = read_removals(settings.groups)
    writer = task.create(task.part(records_kind(task)))
    unnamed = 0
    for row in task.rows():
        name = name_of(row.value, settings.id_key)
        unnamed += name is None
        if name in removals or place_of(task.slice.path, row) in removals:
            task.tally.drop("duplicate")
        else:
            task.keep(writer, row.raw)
    task.facts["without_name"] = unnamed
