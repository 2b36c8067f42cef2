"""Signatures, texts and names of documents as arrays on disk, for one run or saved for later runs.

A folder of saved fingerprints has ``header.json`` and the four files that a slice has. Nothing is pickled.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.document import DocumentError, short_repr
from .._common.errors import UsageError
from ..config.settings import MatchSettings
from ..formats.int_columns import drop_first, map_file
from ..formats.workfiles import FINGERPRINTS
from ..io.concat_files import append_files
from .doc_ids import map_bytes
from .minhash import SCHEME, band_keys
from .shingles import U32, U64

SIGNATURES, TEXTS, OFFSETS, NAMES = "signatures.u32", "texts.bin", "offsets.i64", "names.jsonl"
BLOCK_DOCUMENTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SignaturePart:
    """The files of the signatures of some documents.

    Attributes:
        folder: folder of the files.
        stem: prefix of the file names.
        count: number of documents.
    """

    folder: Path
    stem: str
    count: int

    def path(self, kind: str) -> Path:
        """The path of one of the four files."""
        return self.folder / f"{self.stem}{kind}"


def rules_of(settings: MatchSettings) -> dict[str, Any]:
    """The parameters that two sets of fingerprints must share to be comparable."""
    return {
        "scheme": SCHEME,
        "num_seeds": settings.num_seeds,
        "seed": settings.seed,
        "shingle_characters": settings.shingle_characters,
    }


def load_part(folder: Path, settings: MatchSettings) -> SignaturePart:
    """Open a folder of saved fingerprints.

    Raises:
        UsageError: it is not such a folder, or its parameters differ; the message has both values.
    """
    try:
        header = FINGERPRINTS.read(folder / "header.json")
    except DocumentError as error:
        raise UsageError(f"{error}; name a folder written by --save-fingerprints") from error
    for name, expected in rules_of(settings).items():
        if header.get(name) != expected:
            raise UsageError(
                f"{folder}: {name} is {short_repr(header.get(name))}, but {expected!r} in this run; "
                "use the same settings, or save the fingerprints again"
            )
    part = SignaturePart(folder=folder, stem="", count=header["documents"])
    found = part.path(SIGNATURES).stat().st_size
    if found != part.count * settings.num_seeds * 4:
        raise UsageError(
            f"{folder}: {SIGNATURES} has {found} bytes, not those of {part.count} documents; save them again"
        )
    return part


def save_parts(parts: Sequence[SignaturePart], folder: Path, settings: MatchSettings) -> None:
    """Save the documents of all parts as one folder; the header is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    # Without a header, an interrupted save is not mistaken for a complete folder.
    (folder / "header.json").unlink(missing_ok=True)
    for kind in (SIGNATURES, TEXTS, NAMES):
        with open(folder / kind, "wb") as target:
            append_files(target, [part.path(kind) for part in parts])
    with open(folder / OFFSETS, "wb") as target:
        target.write(np.zeros(1, dtype=np.int64).tobytes())
        before = 0
        for part in parts:
            for block in drop_first(map_file(part.path(OFFSETS), "<i8")).blocks():
                target.write((block + before).tobytes())
            before += part.path(TEXTS).stat().st_size
    FINGERPRINTS.write(folder / "header.json", {**rules_of(settings), "documents": sum(part.count for part in parts)})


class SignatureStore:
    """Signatures and texts of all parts, concatenated; read from disk on access.

    Args:
        parts: the parts.
        num_seeds: values per signature.
    """

    def __init__(self, parts: Sequence[SignaturePart], num_seeds: int) -> None:
        self.first = [0, *itertools.accumulate(part.count for part in parts)]
        # Mapped: a task reads the columns of few bands, and the kernel can evict the pages.
        self._signatures: list[U32] = [
            np.asarray(np.memmap(part.path(SIGNATURES), dtype=np.uint32, mode="r", shape=(part.count, num_seeds)))
            if part.count
            else np.zeros((0, num_seeds), dtype=np.uint32)
            for part in parts
        ]
        self._offsets: list[npt.NDArray[np.int64]] = [
            np.asarray(np.memmap(part.path(OFFSETS), dtype=np.int64, mode="r")) for part in parts
        ]
        self._texts = [map_bytes(part.path(TEXTS)) for part in parts]

    @property
    def count(self) -> int:
        """Number of documents."""
        return self.first[-1]

    def text(self, index: int) -> str:
        """The text of the document with the number ``index``, over all parts."""
        part = bisect.bisect_right(self.first, index) - 1
        at = index - self.first[part]
        begin, end = self._offsets[part][at : at + 2].tolist()
        return self._texts[part][begin:end].decode()

    def signature(self, index: int) -> U32:
        """The signature of the document with the number ``index``, over all parts: ``[num_seeds]``."""
        part = bisect.bisect_right(self.first, index) - 1
        return np.asarray(self._signatures[part][index - self.first[part]])

    def key_blocks(self, band: int, num_bands: int) -> Iterator[U64]:
        """The keys of all documents in one band.

        Args:
            band: index of the band, from 0.
            num_bands: number of bands; must divide the number of values per signature.

        Yields:
            Keys in document order, in blocks ``[documents]``, uint64.
        """
        for signatures in self._signatures:
            for begin in range(0, len(signatures), BLOCK_DOCUMENTS):
                yield band_keys(signatures[begin : begin + BLOCK_DOCUMENTS], band, num_bands)
