"""The steps ``find-duplicates``, ``dedup`` and ``remove-duplicates``.

    documents ─ sign ─> signatures.u32, texts.bin, names.jsonl      one task per slice
                 │
               bands ─> members.i64, sizes.i64    buckets of documents with an equal band (lsh)
                 │
              connect ─> groups.int               connected components of the buckets (union_find)
                 │
               verify ─> verified.pairs           exact Jaccard index within each component (verify)
                 ├─ find-duplicates: names, list, join ─> pairs ─> group-duplicates ─> remove-duplicates
                 └─ dedup:           mark, remove, join ─> documents without duplicates

MinHash only selects candidates; the exact Jaccard index of the character shingles decides. Documents of different
components share no band and are never compared, so the verify tasks are independent. Signatures, keys, texts and pairs
are on disk; memory holds 4 or 8 bytes per document for the components and one byte for the marks.

Documents are numbered in input order, after those of ``--load-fingerprints``. Pairs and groups are ordered by these
numbers, so the first document of a group survives and the result does not depend on the number of tasks. ``dedup``
removes a document only if it is similar to one that stays; pairs that connect a group by a chain do not (``verify``).
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config.settings import DedupSettings, Grouping, MatchSettings, RemoveDuplicatesSettings
from ..io.atomic_write import open_atomic
from ..io.jsonl import Row, exact_integer
from ..runner.parts import DroppedWriter, join_parts, join_records, records_ending, records_kind
from ..runner.registry import MISSING_NAMES
from ..runner.task import Phase, Task, read_marker
from ..runner.task_manifest import TaskManifest
from .doc_ids import LineIndex, NamePart, NameTable, name_line, pair_lines, repeated_digests, write_name_index
from .fingerprints import NAMES, OFFSETS, SIGNATURES, TEXTS, SignaturePart, SignatureStore, load_part, save_parts
from .lsh import MEMBERS, SIZES, StoredBuckets, buckets, connect, groups_in_range, partition_groups
from .minhash import BLOCK_SHINGLES, permutations, sign
from .sorted_pairs import PAIR, SortedPairs, read_pairs
from .union_find import UnionFind, number_type
from .verify import Pair, ShingleCache, SimilarEstimate, match_group, match_to_survivors

LINES, REPEATED = "lines.rows", "repeated.u64"
FOUND = "found.i64"
GROUPS, VERIFIED, REMOVED, SURVIVORS = "groups.int", "verified.pairs", "removed.u8", "survivors.rows"
SURVIVOR = np.dtype([("kept", "<i8"), ("jaccard", "<f8")])
# Tasks per slice, and limits. From the manifest, never from the number of workers: the phases of a resumed run must be
# those of the interrupted one. Components differ in size, so more verify tasks balance the workers.
BAND_TASKS, MAX_BAND_TASKS = 2, 10
VERIFY_TASKS, MAX_VERIFY_TASKS = 4, 512
DOCUMENT_CHARACTERS = 64  # overhead of the objects of one buffered document, in characters


def _match_phases(manifest: TaskManifest) -> list[Phase]:
    """Phases that sign the documents, find candidates and write verified pairs."""
    count = len(manifest.tasks)
    return [
        Phase(name="sign", run="dedup.steps:sign_documents", tasks=count, reads=True),
        Phase(name="bands", run="dedup.steps:bucket_bands", tasks=_num_band_tasks(manifest)),
        Phase(name="connect", run="dedup.steps:connect_buckets", tasks=1),
        Phase(name="verify", run="dedup.steps:verify_groups", tasks=_num_verify_tasks(manifest)),
    ]


def _num_band_tasks(manifest: TaskManifest) -> int:
    return min(BAND_TASKS * len(manifest.tasks), MAX_BAND_TASKS)


def _num_verify_tasks(manifest: TaskManifest) -> int:
    return min(VERIFY_TASKS * len(manifest.tasks), MAX_VERIFY_TASKS)


def find_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``find-duplicates``."""
    return [
        *_match_phases(manifest),
        Phase(name="names", run="dedup.steps:find_repeated_names", tasks=1),
        Phase(name="list", run="dedup.steps:list_pairs", tasks=len(manifest.tasks)),
        Phase(name="join", run="dedup.steps:join_pairs", tasks=1),
    ]


def dedup_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``dedup``."""
    return [
        *_match_phases(manifest),
        Phase(name="mark", run="dedup.steps:mark_duplicate_documents", tasks=1),
        Phase(name="remove", run="dedup.steps:remove_marked", tasks=len(manifest.tasks)),
        Phase(name="join", run="runner.parts:join_records", tasks=1),
    ]


def remove_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``remove-duplicates``."""
    return [
        Phase(name="map", run="dedup.steps:remove_named", tasks=len(manifest.tasks), reads=True),
        Phase(name="join", run="dedup.steps:join_remaining", tasks=1),
    ]


def name_of(row: Row, keys: Sequence[str]) -> str | None:
    """A document's name: the first of ``keys`` that is present, a string or an integer of any size, as text."""
    for key in keys:
        found = row.value.get(key)
        name = found if isinstance(found, str) else exact_integer(row, key)
        if name is not None:
            return str(name)
    return None


def location_of(path: Path, row: Row) -> str:
    """The location of a document: ``FILE@OFFSET`` in decompressed bytes, or ``FILE@ROW`` in parquet."""
    return f"{path}@{row.line if path.suffix == '.parquet' else row.offset}"


def sign_documents(task: Task) -> None:
    """Task function: signatures, texts, text offsets and names of one slice."""
    settings: MatchSettings = task.job.settings
    perms = permutations(settings.num_seeds, settings.seed)
    kinds = (SIGNATURES, TEXTS, OFFSETS, NAMES, LINES)
    signatures, texts, offsets, names, lines = (task.create(task.part(kind)) for kind in kinds)
    index = LineIndex(lines)
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
        # The texts are stored: the verify tasks read them in another order, and inputs may be compressed.
        encoded = text.encode()
        texts.write(encoded)
        name = name_of(row, settings.id_key)
        index.add(name, names.write(name_line(name, location_of(task.slice.path, row))))
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
    index.flush()
    task.result["documents"] = documents
    if task.job.step == "find-duplicates":  # dedup counts the documents that it writes
        task.counts.documents_out += documents


def _parts(task: Task) -> tuple[list[SignaturePart], int]:
    """Loaded fingerprints and the slices of this run, and the number of loaded documents."""
    settings: MatchSettings = task.job.settings
    loaded = [load_part(folder, settings) for folder in settings.load_fingerprints]
    folder = task.job.work / "parts"
    own = [
        SignaturePart(folder=folder, stem=f"{index:05d}-", count=_count(task, index))
        for index in range(len(task.manifest.tasks))
    ]
    return [*loaded, *own], sum(part.count for part in loaded)


def _count(task: Task, index: int) -> int:
    count: int = read_marker(task, "sign", index)["result"]["documents"]
    return count


def _documents(task: Task) -> SignatureStore:
    return SignatureStore(_parts(task)[0], task.job.settings.num_seeds)


def bucket_bands(task: Task) -> None:
    """Task function: the buckets of some bands, concatenated."""
    settings: MatchSettings = task.job.settings
    documents = _documents(task)
    members, sizes = (task.create(task.part(kind)) for kind in (MEMBERS, SIZES))
    # Proportional bounds: all bands are covered once for any number of tasks, also more tasks than bands.
    first, last = (settings.num_bands * at // task.phase.tasks for at in (task.index, task.index + 1))
    for band in range(first, last):
        keys = documents.key_blocks(band, settings.num_bands)
        for block, counts in buckets(keys, documents.count, task.job.work / "parts"):
            members.write(block.tobytes())
            sizes.write(counts.tobytes())


def _stored_buckets(task: Task) -> list[StoredBuckets]:
    tasks = range(_num_band_tasks(task.manifest))
    return [StoredBuckets(members=task.part(MEMBERS, index), sizes=task.part(SIZES, index)) for index in tasks]


def connect_buckets(task: Task) -> None:
    """Task function: the connected component of each document, and the division of components among verify tasks."""
    stored = _stored_buckets(task)
    sets = connect(stored, sum(part.count for part in _parts(task)[0]))
    task.create(task.part(GROUPS)).write(sets.parents.tobytes())
    task.result["cuts"] = partition_groups(stored, sets.parents, _num_verify_tasks(task.manifest))


def verify_groups(task: Task) -> None:
    """Task function: the pairs of some components whose Jaccard index reaches the threshold, sorted."""
    settings: MatchSettings = task.job.settings
    documents = _documents(task)
    cache = ShingleCache(documents.text, settings.shingle_characters)
    first, last = read_marker(task, "connect", 0)["result"]["cuts"][task.index : task.index + 2]
    roots = np.fromfile(task.part(GROUPS, 0), dtype=number_type(documents.count))
    divisor, threshold, rounds = settings.jaccard.value, settings.threshold, settings.heuristic_iter

    def similarity(one: int, other: int) -> float:
        return cache.jaccard(one, other, divisor)

    def pairs(group: list[list[int]]) -> Iterator[Pair]:
        if _grouping(settings) is Grouping.SIMILAR:
            estimate = SimilarEstimate(documents.signature, threshold, divisor)
            return match_to_survivors(group, similarity, estimate, threshold=threshold, rounds=rounds)
        # dedup needs groups only: pairs within a group that is known are not compared.
        all_pairs = task.job.step == "find-duplicates"
        return match_group(group, similarity, threshold=threshold, rounds=rounds, all_pairs=all_pairs)

    with SortedPairs(task.job.work / "parts") as found:
        for group in groups_in_range(_stored_buckets(task), roots, first, last):
            for pair in pairs(group):
                found.add(pair.main, pair.other, pair.jaccard)
        writer = task.create(task.part(VERIFIED))
        for block in found.blocks():
            writer.write(block.tobytes())


def _grouping(settings: MatchSettings) -> Grouping | None:
    """The groups of ``dedup``; None for ``find-duplicates``, which lists pairs."""
    return settings.grouping if isinstance(settings, DedupSettings) else None


def mark_duplicate_documents(task: Task) -> None:
    """Task function: one byte per document of this run, 1 for documents to remove."""
    settings: DedupSettings = task.job.settings
    parts, before = _parts(task)
    count = sum(part.count for part in parts)
    verified = (
        np.fromfile(task.part(VERIFIED, index), dtype=PAIR) for index in range(_num_verify_tasks(task.manifest))
    )
    mark = _mark_similar if settings.grouping is Grouping.SIMILAR else _mark_connected
    if settings.save_dropped is None or not count:
        removed, groups, largest = mark(verified, count, None)
    else:
        _write_repeated_names(task)
        # Mapped: 16 bytes per document on disk, not in memory. Such a file must be open for reading, too.
        path = task.part(SURVIVORS)
        with open(path, "w+b") as handle:
            handle.truncate(count * SURVIVOR.itemsize)
            survivor_of = np.memmap(handle, dtype=SURVIVOR, mode="r+", shape=(count,))
            removed, groups, largest = mark(verified, count, survivor_of)
            survivor_of.flush()
            os.fsync(handle.fileno())
    task.create(task.part(REMOVED)).write(removed[before:].tobytes())
    if settings.save_fingerprints is not None:
        save_parts(parts, settings.save_fingerprints, settings)
    task.facts.update(groups=groups, largest_group=largest)
    if before:
        task.facts["earlier_documents"] = before


def _mark_similar(
    verified: Iterable[npt.NDArray[np.void]], count: int, survivor_of: npt.NDArray[np.void] | None
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The documents to remove, of pairs of a kept and a removed one; the number of groups, and the largest."""
    removed = np.zeros(count, dtype=np.uint8)
    groups = largest = 0
    for pairs in verified:
        removed[pairs["other"]] = 1
        if survivor_of is not None:
            survivor_of["kept"][pairs["other"]] = pairs["main"]
            survivor_of["jaccard"][pairs["other"]] = pairs["jaccard"]
        # Each group is in one file: components are verified as a whole.
        _, sizes = np.unique(pairs["main"], return_counts=True)
        groups += len(sizes)
        largest = max(largest, int(sizes.max(initial=-1)) + 1)
    return removed, groups, largest


def _mark_connected(
    verified: Iterable[npt.NDArray[np.void]], count: int, survivor_of: npt.NDArray[np.void] | None
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """As ``_mark_similar``, of pairs that connect the documents of a group."""
    sets = UnionFind(count)
    for pairs in verified:
        sets.union_pairs(pairs["main"], pairs["other"])
    found = sets.non_first_members()
    if survivor_of is not None:
        survivor_of["kept"], survivor_of["jaccard"] = sets.parents, np.nan  # the index of this pair was not computed
    return found


def remove_marked(task: Task) -> None:
    """Task function: one slice without the marked documents, which go to ``--save-dropped``."""
    settings: DedupSettings = task.job.settings
    begin = sum(_count(task, index) for index in range(task.index))
    count = _count(task, task.index)
    removed = np.fromfile(task.part(REMOVED, 0), dtype=np.uint8, offset=begin, count=count)
    writer = task.create(task.part(records_kind(task)))
    with contextlib.ExitStack() as opened:
        dropped = None
        if settings.save_dropped is not None:
            dropped = DroppedWriter(task)
            first = _parts(task)[1] + begin
            survivor_of = np.fromfile(task.part(SURVIVORS, 0), SURVIVOR, count, offset=first * SURVIVOR.itemsize)
            repeated = np.fromfile(task.part(REPEATED, 0), dtype=np.uint64)
            names = opened.enter_context(NameTable(_named_parts(task), repeated))
        # strict: the inputs are read a second time, and must still have the documents that were signed.
        for number, (drop, (row, _)) in enumerate(zip(removed, task.documents(settings.json_key), strict=True)):
            if not drop:
                task.write_row(writer, row.raw)
                continue
            task.counts.drop("duplicate")
            if dropped is not None:
                survivor = survivor_of[number]
                more: dict[str, Any] = {"duplicate_of": names.name(int(survivor["kept"]))}
                if not np.isnan(survivor["jaccard"]):
                    more["jaccard"] = round(float(survivor["jaccard"]), 6)
                dropped.write(row, "duplicate", more)


def _named_parts(task: Task) -> list[NamePart]:
    """Names of loaded fingerprints, whose line indices follow those of the slices, then names of the slices."""
    parts, _ = _parts(task)
    slices = len(task.manifest.tasks)
    numbers = [*range(slices, len(parts)), *range(slices)]
    return [
        NamePart(names=part.path(NAMES), lines=task.part(LINES, number))
        for part, number in zip(parts, numbers, strict=True)
    ]


def find_repeated_names(task: Task) -> None:
    """Task function: the names that several documents share."""
    settings: MatchSettings = task.job.settings
    task.facts["repeated_names"] = _write_repeated_names(task)
    if settings.save_fingerprints is not None:
        save_parts(_parts(task)[0], settings.save_fingerprints, settings)


def _write_repeated_names(task: Task) -> int:
    """Write the digests of the names that several documents share; returns their number."""
    parts = _named_parts(task)
    loaded = len(parts) - len(task.manifest.tasks)
    for part in parts[:loaded]:
        with open_atomic(part.lines) as target:
            write_name_index(part.names, target)
    repeated = repeated_digests([part.lines for part in parts])
    task.create(task.part(REPEATED)).write(repeated.tobytes())
    return len(repeated)


def list_pairs(task: Task) -> None:
    """Task function: lines ``{main: [{other: J}, ...]}`` for a range of main documents."""
    count = sum(part.count for part in _parts(task)[0])
    first, last = (count * at // task.phase.tasks for at in (task.index, task.index + 1))
    verified = (task.part(VERIFIED, index) for index in range(_num_verify_tasks(task.manifest)))
    # Each file is sorted, and components are disjoint: merged, the pairs are in the order of their main documents.
    found = heapq.merge(*(read_pairs(path, first, last) for path in verified))
    writer = task.create(task.part(_pairs_kind(task)))
    task.facts["pairs"] = 0
    with NameTable(_named_parts(task), np.fromfile(task.part(REPEATED, 0), dtype=np.uint64)) as names:
        for line, pairs in pair_lines(found, names):
            writer.write(line)
            task.facts["pairs"] += pairs


def _pairs_kind(task: Task) -> str:
    return "pairs" + records_ending(task.job.output)


def join_pairs(task: Task) -> None:
    """Task function: concatenate the pairs of all tasks."""
    join_parts(task, _pairs_kind(task), task.job.output)


def remove_named(task: Task) -> None:
    """Task function: one slice without the documents that a group names after its first one."""
    from .groups import read_removal_set

    settings: RemoveDuplicatesSettings = task.job.settings
    removals = read_removal_set(settings.groups)
    writer = task.create(task.part(records_kind(task)))
    dropped = DroppedWriter(task)
    # Once per slice: resolving a path reads the links of all its folders.
    real_file = os.path.realpath(task.slice.path)
    found: set[int] = set()
    unnamed = 0
    for row in task.rows():
        name = name_of(row, settings.id_key)
        unnamed += name is None
        number = removals.find(name, location_of(task.slice.path, row), real_file)
        if number is None:
            task.write_row(writer, row.raw)
        else:
            found.add(number)
            task.counts.drop("duplicate")
            dropped.write(row, "duplicate")
    task.create(task.part(FOUND)).write(np.fromiter(found, dtype=np.int64, count=len(found)).tobytes())
    task.facts["without_name"] = unnamed


def join_remaining(task: Task) -> None:
    """Task function: the output, and the number of names of the groups that no input has."""
    from .groups import read_removal_set

    settings: RemoveDuplicatesSettings = task.job.settings
    join_records(task)
    found = [np.fromfile(task.part(FOUND, index), dtype=np.int64) for index in range(len(task.manifest.tasks))]
    names = np.unique(np.concatenate(found)).tolist()
    if missing := read_removal_set(settings.groups).num_missing(names):
        task.facts[MISSING_NAMES] = missing
