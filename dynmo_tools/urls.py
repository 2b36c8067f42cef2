"""Which URLs are worth fetching: the rules of Megatron's ``blacklist_urls``, in its order, offline.

Two faults of the original are gone: the endings ``.7z`` and ``.ai`` are told apart, and a ``#fragment`` no longer hides
an ending. The kept URLs keep the order of the input.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .compression import open_read, wrap_write
from .errors import MissingExtraError, UsageError

MIN_CHARACTERS = 9
PAGE = re.compile(
    r"^https?://"
    r"(?:(?:[A-Z0-9](?:[A-Z0-9-]{0,61}[A-Z0-9])?\.)+(?:[A-Z]{2,6}\.?|[A-Z0-9-]{2,}\.?)|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::\d+)?(?:/?|[/?]\S+)$",
    re.IGNORECASE,
)
IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
REASONS = ("domain", "ending", "short", "malformed", "duplicate")


def read_list(path: Path) -> frozenset[str]:
    """The entries of a list: one a line, lower-cased, ``#`` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return frozenset(entry for line in lines if (entry := line.partition("#")[0].strip().lower()))


def built_in_list(name: str) -> frozenset[str]:
    """One of the lists that come with the program."""
    with resources.as_file(resources.files(__package__) / "lists" / f"{name}.txt") as path:
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


def judge(url: str, domains: frozenset[str], endings: tuple[str, ...]) -> str | None:
    """Why a URL is left out (of ``REASONS``), or None; the first rule that fires counts."""
    if domain_label(host_of(url)) in domains:
        return "domain"
    if url.partition("#")[0].partition("?")[0].lower().endswith(endings):
        return "ending"
    if len(url) < MIN_CHARACTERS:
        return "short"
    return None if PAGE.match(url) else "malformed"


@dataclass
class UrlCounts:
    """What happened to the URLs."""

    urls_in: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))


def expand_folder(names: Sequence[str]) -> list[str]:
    """Folders become a pattern of their ``.txt`` files, as the classic tool takes them."""
    return [f"{name}/*.txt" if Path(name).is_dir() else name for name in names]


def read_urls(paths: Sequence[Path]) -> list[str]:
    """The URLs of some files, one a line, each once, in order."""
    found: dict[str, None] = {}
    for path in paths:
        with open_read(path) as handle:
            found.update(dict.fromkeys(url for line in handle if (url := line.decode("utf-8", "replace").strip())))
    return list(found)


def filter_urls(
    paths: Sequence[Path], domains: frozenset[str], endings: frozenset[str], tick: Callable[[float], None]
) -> Iterator[tuple[str, str | None]]:
    """Each URL of the files with the reason to leave it out, or None.

    A URL counts as seen by a 128-bit digest, 16 bytes of content each, so its length does not matter to memory.
    """
    seen: set[bytes] = set()
    ends = tuple(sorted(endings))
    for path in paths:
        with open_read(path) as handle:
            for line in handle:
                tick(len(line))
                url = line.decode("utf-8", "replace").strip()
                if not url:
                    continue
                reason = judge(url, domains, ends)
                if reason is None:
                    digest = hashlib.blake2b(url.encode(), digest_size=16).digest()
                    if digest in seen:
                        reason = "duplicate"
                    seen.add(digest)
                yield url, reason


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
    from .wholefile import whole_file

    counts = UrlCounts()
    with whole_file(output) as kept_file, whole_file(dropped) as dropped_file:
        kept, left = wrap_write(kept_file, output.suffix), wrap_write(dropped_file, dropped.suffix if dropped else "")
        for url, reason in filter_urls(paths, domains, endings, tick):
            counts.urls_in += 1
            if reason is None:
                counts.kept += 1
                kept.write(f"{url}\n".encode())
            else:
                counts.dropped[reason] += 1
                left.write(f"{reason}\t{url}\n".encode())
        for writer, handle in ((kept, kept_file), (left, dropped_file)):
            if writer is not handle:
                writer.close()
    return counts
