"""Which URLs are worth fetching: the rules of Megatron's ``blacklist_urls``, in its order, offline.

Two faults of the original are gone: the endings ``.7z`` and ``.ai`` are told apart, and a ``#fragment`` no longer hides
an ending. The kept URLs keep the order of the input.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .._common.document import read_text
from .._common.errors import MissingExtraError, UsageError
from ..io.codecs import open_read, wrap_write
from ..io.digests import DigestBuckets

MIN_CHARACTERS = 9
PAGE = re.compile(
    r"^https?://"
    r"(?:(?:[A-Z0-9](?:[A-Z0-9-]{0,61}[A-Z0-9])?\.)+(?:[A-Z]{2,6}\.?|[A-Z0-9-]{2,}\.?)|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::\d+)?(?:/?|[/?]\S+)$",
    re.IGNORECASE,
)
UNSENDABLE = re.compile(r"[\x00-\x20\x7f-\x9f\ufffd]")  # control characters, spaces, what was no UTF-8
IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
REASONS = ("domain", "ending", "short", "malformed", "duplicate")
VERDICTS = (None, *REASONS)
BLOCK_CODES = 1 << 20


def read_list(path: Path) -> frozenset[str]:
    """The entries of a list: one a line, lower-cased, ``#`` begins a comment."""
    return frozenset(
        entry for line in read_text(path).splitlines() if (entry := line.partition("#")[0].strip().lower())
    )


def built_in_list(name: str) -> frozenset[str]:
    """One of the lists that come with the program."""
    with resources.as_file(resources.files(__package__) / f"{name}.txt") as path:
        return read_list(path)


@functools.lru_cache(maxsize=1)
def _suffixes() -> Any:
    try:
        from publicsuffixlist import PublicSuffixList
    except ImportError as error:
        raise MissingExtraError("publicsuffixlist", "prep") from error
    return PublicSuffixList(accept_unknown=False, only_icann=True)


@functools.lru_cache(maxsize=1 << 16)
def domain_label(host: str) -> str:
    """The label that was registered: ``amazon`` for ``www.amazon.co.uk``; the address for an IPv4 host."""
    host = host.rstrip(".")
    if IPV4.fullmatch(host):
        return host
    registered = _suffixes().privatesuffix(host)
    return str(registered).partition(".")[0] if registered else host.rpartition(".")[2]


def host_of(url: str) -> str:
    """The host of a URL, lower-cased; empty where it has none."""
    try:
        return (urlsplit(url if "//" in url else f"//{url}").hostname or "").lower()
    except ValueError:
        return ""


def drop_reason(url: str, domains: frozenset[str], endings: tuple[str, ...]) -> str | None:
    """Why a URL is left out (of ``REASONS``), or None; the first rule that fires counts."""
    if domain_label(host_of(url)) in domains:
        return "domain"
    if url.partition("#")[0].partition("?")[0].lower().endswith(endings):
        return "ending"
    if len(url) < MIN_CHARACTERS:
        return "short"
    return None if PAGE.match(url) and not UNSENDABLE.search(url) else "malformed"


@dataclass
class UrlCounts:
    """What happened to the URLs."""

    urls_in: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))


def expand_folder(names: Sequence[str]) -> list[str]:
    """Folders become a pattern of their ``.txt`` files, as the classic tool takes them."""
    return [f"{glob.escape(name)}/*.txt" if Path(name).is_dir() else name for name in names]


class DropReasonStore(contextlib.AbstractContextManager["DropReasonStore"]):
    """What befalls each URL, with the repeated ones found on disk: 25 bytes of it a URL, and of memory 0.3.

    Two URLs count as the same where 128 bits of their digests agree.

    Args:
        folder: where files without names hold the digests and verdicts.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._open = contextlib.ExitStack()
        self._codes = self._open.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - closed by __exit__
        self._digests = self._open.enter_context(DigestBuckets(folder))
        self._count = 0

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        self._open.close()

    def add(self, url: str, reason: str | None) -> None:
        """Note the next URL with the reason to leave it out, or None."""
        if reason is None:
            self._digests.add(url.encode("utf-8", "replace"), self._count)
        self._codes.write(bytes([VERDICTS.index(reason)]))
        self._count += 1

    def mark_duplicates(self) -> None:
        """Give every URL that came before the reason ``duplicate``."""
        self._codes.flush()
        duplicate = bytes([VERDICTS.index("duplicate")])
        for numbers, _ in self._digests.duplicates():
            for number in numbers.tolist():
                os.pwrite(self._codes.fileno(), duplicate, number)

    def __iter__(self) -> Iterator[str | None]:
        """The reason to leave out each URL, or None, in their order."""
        self._codes.seek(0)
        while block := self._codes.read(BLOCK_CODES):
            for code in block:
                yield VERDICTS[code]


def each_url(paths: Sequence[Path], tick: Callable[[float], None] | None = None) -> Iterator[str]:
    """The URLs of some files, one a line; ``tick`` hears of the bytes of each line."""
    for path in paths:
        with open_read(path) as handle:
            for line in handle:
                if tick is not None:
                    tick(len(line))
                if url := line.decode("utf-8", "replace").strip():
                    yield url


def filter_urls(
    paths: Sequence[Path],
    domains: frozenset[str],
    endings: frozenset[str],
    tick: Callable[[float], None],
    folder: Path,
) -> Iterator[tuple[str, str | None]]:
    """Each URL of the files with the reason to leave it out, or None; the files are read twice.

    Raises:
        UsageError: a file has another number of URLs when it is read again.
    """
    ends = tuple(sorted(endings))
    with DropReasonStore(folder) as seen:
        for url in each_url(paths, tick):
            seen.add(url, drop_reason(url, domains, ends))
        seen.mark_duplicates()
        try:
            yield from zip(each_url(paths), seen, strict=True)
        except ValueError as error:
            raise UsageError(
                "blacklist-urls reads its inputs twice, and they changed meanwhile (or one is a pipe); "
                "give files that nobody writes"
            ) from error


def write_urls(
    paths: Sequence[Path],
    output: Path,
    *,
    domains: frozenset[str],
    endings: frozenset[str],
    tick: Callable[[float], None],
    dropped: Path | None = None,
) -> UrlCounts:
    """Filter the URLs of ``paths`` into ``output``; the others go to ``dropped`` behind their reasons."""
    from ..io.atomic_write import open_atomic

    counts = UrlCounts()
    with open_atomic(output) as kept_file, open_atomic(dropped) as dropped_file:
        kept, pending = (
            wrap_write(kept_file, output.suffix),
            wrap_write(dropped_file, dropped.suffix if dropped else ""),
        )
        for url, reason in filter_urls(paths, domains, endings, tick, output.parent):
            counts.urls_in += 1
            if reason is None:
                counts.kept += 1
                kept.write(f"{url}\n".encode())
            else:
                counts.dropped[reason] += 1
                pending.write(f"{reason}\t{url}\n".encode())
        for writer, handle in ((kept, kept_file), (pending, dropped_file)):
            if writer is not handle:
                writer.close()
    return counts
