"""Deduplication: sign every document, match the signatures, leave the later duplicates out."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .joining import records_kind
from .matching import ShingleCache, match
from .minhash import BLOCK_SHINGLES, band_keys, permutations, sign
from .plan import Plan
from .settings import DedupSettings
from .shingles import U32, U64
from .tasks import Phase, Task, marker_of
from .unionfind import UnionFind

SIGNATURES, TEXTS, OFFSETS, REMOVED = "signatures.u32", "texts.bin", "offsets.i64", "removed.u8"


def dedup_phases(plan: Plan) -> list[Phase]:
    """The phases of ``dedup``."""
    count = len(plan.tasks)
    return [
        Phase(name="sign", run="duplicates:sign_slice", tasks=count, reads=True),
        Phase(name="match", run="duplicates:match_all", tasks=1),
        Phase(name="remove", run="duplicates:remove_slice", tasks=count),
        Phase(name="join", run="joining:join_records", tasks=1),
    ]


def sign_slice(task: Task) -> None:
    """Task function: the signatures, texts and text offsets of one slice."""
    settings: DedupSettings = task.job.settings
    perms = permutations(settings.num_seeds, settings.seed)
    signatures, texts = task.create(task.part(SIGNATURES)), task.create(task.part(TEXTS))
    ends = [0]
    waiting: list[str] = []
    size = 0
    for _, text in task.documents(settings.json_key):
        encoded = text.encode()
        texts.write(encoded)
        ends.append(ends[-1] + len(encoded))
        waiting.append(text)
        size += len(text)
        if size >= 4 * BLOCK_SHINGLES:
            signatures.write(sign(waiting, settings.shingle_characters, perms).tobytes())
            waiting, size = [], 0
    if waiting:
        signatures.write(sign(waiting, settings.shingle_characters, perms).tobytes())
    task.create(task.part(OFFSETS)).write(np.asarray(ends, dtype=np.int64).tobytes())
    task.result["documents"] = len(ends) - 1


class SignedDocuments:
    """The signatures and texts of all slices, read from disk as they are asked for."""

    def __init__(self, folder: Path, counts: Sequence[int], num_seeds: int) -> None:
        self.first = np.cumsum([0, *counts])
        self._signatures: list[U32] = []
        self._offsets: list[Any] = []
        self._texts: list[mmap.mmap | bytes] = []
        for index, count in enumerate(counts):
            path = folder / f"{index:05d}-"
            self._signatures.append(
                np.memmap(f"{path}{SIGNATURES}", dtype=np.uint32, mode="r", shape=(count, num_seeds))
                if count
                else np.zeros((0, num_seeds), dtype=np.uint32)
            )
            self._offsets.append(np.fromfile(f"{path}{OFFSETS}", dtype=np.int64))
            with open(f"{path}{TEXTS}", "rb") as handle:
                filled = handle.seek(0, 2) > 0
                self._texts.append(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if filled else b"")

    @property
    def count(self) -> int:
        """The number of documents."""
        return int(self.first[-1])

    def text(self, index: int) -> str:
        """The text of a document."""
        part = int(np.searchsorted(self.first, index, side="right")) - 1
        at = index - int(self.first[part])
        begin, end = self._offsets[part][at : at + 2]
        return self._texts[part][begin:end].decode()

    def band_keys(self, band: int, num_bands: int) -> U64:
        """The keys of all documents in one band."""
        return np.concatenate([band_keys(signatures, band, num_bands) for signatures in self._signatures])


def slice_counts(task: Task, phase: str) -> list[int]:
    """The number of documents that each slice's task of an earlier phase found."""
    return [marker_of(task, phase, index)["result"]["documents"] for index in range(len(task.plan.tasks))]


def match_all(task: Task) -> None:
    """Task function: which documents of the whole input are later duplicates, one byte each."""
    settings: DedupSettings = task.job.settings
    documents = SignedDocuments(task.job.work / "parts", slice_counts(task, "sign"), settings.num_seeds)
    sets = UnionFind(documents.count)
    cache = ShingleCache(documents.text, settings.shingle_characters)
    pairs = sum(
        1
        for _ in match(
            lambda band: documents.band_keys(band, settings.num_bands),
            settings.num_bands,
            lambda first, second: cache.jaccard(first, second, settings.jaccard.value),
            sets,
            threshold=settings.threshold,
        )
    )
    removed = np.zeros(documents.count, dtype=np.uint8)
    groups = list(sets.groups())
    for group in groups:
        removed[group[1:]] = 1
    task.create(task.part(REMOVED)).write(removed.tobytes())
    largest = max(groups, key=len, default=[])
    task.facts.update(pairs=pairs, groups=len(groups), largest_group=len(largest))


def remove_slice(task: Task) -> None:
    """Task function: one slice without its later duplicates."""
    settings: DedupSettings = task.job.settings
    counts = slice_counts(task, "sign")
    begin = sum(counts[: task.index])
    removed = np.fromfile(task.part(REMOVED, 0), dtype=np.uint8, offset=begin, count=counts[task.index])
    writer = task.create(task.part(records_kind(task)))
    for drop, (row, _) in zip(removed, task.documents(settings.json_key), strict=True):
        if drop:
            task.tally.drop("duplicate")
        else:
            task.keep(writer, row.raw)
