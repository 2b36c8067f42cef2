"""Filters URLs before fetching, by the rules and in the order of Megatron's ``blacklist_urls``, offline.

Two errors of Megatron's tool are fixed: the endings ``.7z`` and ``.ai`` are separate, and a ``#fragment`` does not hide
an ending. Accepted URLs keep their order.
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

# Constants and pattern of Megatron's blacklist_urls: URLs of at most 8 characters are short. The pattern excludes hosts
# with other characters than ASCII, user names, IPv6 addresses and localhost.
MIN_CHARACTERS = 9
PAGE = re.compile(
    r"^https?://"
    r"(?:(?:[A-Z0-9](?:[A-Z0-9-]{0,61}[A-Z0-9])?\.)+(?:[A-Z]{2,6}\.?|[A-Z0-9-]{2,}\.?)|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::\d+)?(?:/?|[/?]\S+)$",
    re.IGNORECASE,
)
UNSENDABLE = re.compile(r"[\x00-\x20\x7f-\x9f\ufffd]")  # control characters, spaces, invalid UTF-8
IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
# In the order of the tests, which is Megatron's: the first one that applies is counted.
REASONS = ("domain", "ending", "short", "malformed", "duplicate")
VERDICTS = (None, *REASONS)
BLOCK_CODES = 1 << 20


def read_list(path: Path) -> frozenset[str]:
    """The entries of a list, one per line, lower-cased; ``#`` starts a comment."""
    return frozenset(
        entry for line in read_text(path).splitlines() if (entry := line.partition("#")[0].strip().lower())
    )


def built_in_list(name: str) -> frozenset[str]:
    """One of the built-in lists."""
    with resources.as_file(resources.files(__package__) / f"{name}.txt") as path:
        return read_list(path)


@functools.lru_cache(maxsize=1)
def _suffixes() -> Any:
    try:
        from publicsuffixlist import PublicSuffixList
    except ImportError as error:
        raise MissingExtraError("publicsuffixlist", "prep") from error
    # Without private suffixes, as Megatron's tldextract: the label of ``name.github.io`` is ``github``.
    return PublicSuffixList(accept_unknown=False, only_icann=True)


# Lists name the same hosts many times, often one after another.
@functools.lru_cache(maxsize=1 << 16)
def domain_label(host: str) -> str:
    """The registered label: ``amazon`` for ``www.amazon.co.uk``; the address of an IPv4 host."""
    host = host.rstrip(".")
    if IPV4.fullmatch(host):
        return host
    registered = _suffixes().privatesuffix(host)
    return str(registered).partition(".")[0] if registered else host.rpartition(".")[2]


def host_of(url: str) -> str:
    """The host of a URL, lower-cased; empty if it has none."""
    try:
        return (urlsplit(url if "//" in url else f"//{url}").hostname or "").lower()
    except ValueError:
        return ""


def drop_reason(url: str, domains: frozenset[str], endings: tuple[str, ...]) -> str | None:
    """The first of ``REASONS`` that applies to a URL, except ``duplicate``; None if it is accepted.

    Args:
        url: the URL.
        domains: blocked labels of registered domains.
        endings: blocked endings of the path, lower-case.
    """
    if domain_label(host_of(url)) in domains:
        return "domain"
    if url.partition("#")[0].partition("?")[0].lower().endswith(endings):
        return "ending"
    if len(url) < MIN_CHARACTERS:
        return "short"
    return None if PAGE.match(url) and not UNSENDABLE.search(url) else "malformed"


@dataclass
class UrlCounts:
    """Numbers of URLs."""

    urls_in: int = 0
    urls_out: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))


def expand_folder(names: Sequence[str]) -> list[str]:
    """Replace folders by the pattern of their ``.txt`` files, as Megatron's tool reads them."""
    return [f"{glob.escape(name)}/*.txt" if Path(name).is_dir() else name for name in names]


class DropReasonStore(contextlib.AbstractContextManager["DropReasonStore"]):
    """The drop reason of each URL, and duplicates; on disk with 25 bytes per URL, and 0.3 bytes of memory.

    Two URLs are equal if 128 bits of their digests are.

    Args:
        folder: folder of temporary files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._open = contextlib.ExitStack()
        self._codes = self._open.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - closed by __exit__
        self._digests = self._open.enter_context(DigestBuckets(folder))
        self._count = 0

    def __exit__(self, *_: object) -> None:
        """Delete the temporary files."""
        self._open.close()

    def add(self, url: str, reason: str | None) -> None:
        """Add the next URL with its drop reason, or None."""
        if reason is None:
            self._digests.add(url.encode("utf-8", "replace"), self._count)
        self._codes.write(bytes([VERDICTS.index(reason)]))
        self._count += 1

    def mark_duplicates(self) -> None:
        """Set the reason ``duplicate`` for every URL that occurred before."""
        self._codes.flush()
        duplicate = bytes([VERDICTS.index("duplicate")])
        for numbers, _ in self._digests.duplicates():
            for number in numbers.tolist():
                os.pwrite(self._codes.fileno(), duplicate, number)

    def __iter__(self) -> Iterator[str | None]:
        """The drop reason of each URL, or None, in order."""
        self._codes.seek(0)
        while block := self._codes.read(BLOCK_CODES):
            for code in block:
                yield VERDICTS[code]


def each_url(paths: Sequence[Path], tick: Callable[[float], None] | None = None) -> Iterator[str]:
    """The URLs of some files, one per line; ``tick`` receives the bytes of each line."""
    for path in paths:
        with open_read(path) as handle:
            for line in handle:
                if tick is not None:
                    tick(len(line))
                # Lists are concatenated with their byte-order marks.
                if url := line.decode("utf-8", "replace").lstrip("\ufeff").strip():
                    yield url


def filter_urls(
    paths: Sequence[Path],
    domains: frozenset[str],
    endings: frozenset[str],
    tick: Callable[[float], None],
    folder: Path,
) -> Iterator[tuple[str, str | None]]:
    """Each URL of the files with its drop reason, or None; the files are read twice.

    Raises:
        UsageError: the number of URLs changed between the two passes.
    """
    ends = tuple(sorted(endings))
    # Two passes: the list may be larger than memory, and the first of equal URLs must be known before any is written.
    with DropReasonStore(folder) as reasons:
        for url in each_url(paths, tick):
            reasons.add(url, drop_reason(url, domains, ends))
        reasons.mark_duplicates()
        try:
            yield from zip(each_url(paths), reasons, strict=True)
        except ValueError as error:
            raise UsageError(
                "blacklist-urls: an input changed between the two passes, or is a pipe; "
                "use files that no other process writes"
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
    """Write accepted URLs to ``output``, and dropped ones with their reasons to ``dropped``.

    Args:
        paths: files of URLs, one per line; regular files, which are read twice.
        output: file of the accepted URLs.
        domains: blocked labels of registered domains.
        endings: blocked endings.
        tick: receives the bytes of each line that was read.
        dropped: file of tab-separated reasons and URLs; None writes none.

    Raises:
        UsageError: see ``filter_urls``.
    """
    from ..io.atomic_write import open_atomic

    counts = UrlCounts()
    with open_atomic(output) as accepted_file, open_atomic(dropped) as dropped_file:
        accepted, rejected = (
            wrap_write(accepted_file, output.suffix),
            wrap_write(dropped_file, dropped.suffix if dropped else ""),
        )
        for url, reason in filter_urls(paths, domains, endings, tick, output.parent):
            counts.urls_in += 1
            if reason is None:
                counts.urls_out += 1
                accepted.write(f"{url}\n".encode())
            else:
                counts.dropped[reason] += 1
                rejected.write(f"{reason}\t{url}\n".encode())
        for writer, handle in ((accepted, accepted_file), (rejected, dropped_file)):
            if writer is not handle:
                writer.close()
    return counts
