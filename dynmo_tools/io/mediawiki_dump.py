"""Pages of a MediaWiki XML dump, read from slices: a slice has the pages that begin in it.

A plain dump may be divided anywhere. A bzip2 dump may be divided where a stream begins, which is at a byte (multistream
dumps have one stream per hundred pages). A page that extends beyond its slice is read to its end. ``<`` is an entity in
the texts of a dump, so tags in the bytes are always markup of the dump.
"""

from __future__ import annotations

import bz2
import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .codecs import PIECE_BYTES, open_read
from .jsonl import Slice

OPEN, CLOSE, END = b"<page>", b"</page>", b"</mediawiki>"
STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # headers of a stream and its first block; practically never random
HEAD_BYTES = 1 << 20
TAIL_BYTES = 64  # more than a tag and the white space after the last one
BASE = re.compile(r"<base>([^<]*)/[^</]*</base>")
NAMESPACE = re.compile(r"<namespace\b[^<>]*\bkey=\"(-?\d{1,9})\"[^<>]*>([^<]+)</namespace>")
# In this order: the attribute is optional, and a database is named after the language and the project.
LANGUAGE = (
    re.compile(r"<mediawiki\b[^<>]*\bxml:lang=\"([\w-]+)\""),
    re.compile(r"<dbname>([a-z_]+?)wik(?:i|tionary|ibooks|inews|iquote|isource|iversity|ivoyage)</dbname>"),
    re.compile(r"<base>https?://([a-z-]+)\.(?:m\.)?wik"),
)

Piece = tuple[bytes, bool]
"""Bytes of a dump, and whether they are in the slice, or after it."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a dump states about its wiki.

    Attributes:
        base: URL of the pages; empty if it is not stated.
        language: code of the language; empty if it is not stated.
        namespaces: names of the namespaces by number.
    """

    base: str
    language: str
    namespaces: Mapping[int, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a dump.

    Attributes:
        number: page id.
        revision: revision id.
        title: title.
        namespace: number of the namespace.
        redirect: the page is a redirect.
        markup: wikitext.
    """

    number: str
    revision: str
    title: str
    namespace: str
    redirect: bool
    markup: str


def is_dump(path: Path) -> bool:
    """Whether the file name is that of a dump that can be divided: ``.xml``, or ``.xml*.bz2``."""
    return path.suffix == ".xml" or (path.suffix == ".bz2" and ".xml" in path.name)


def next_stream(path: Path, offset: int) -> int | None:
    """The first offset at or after ``offset`` where a bzip2 stream begins."""
    length = len(b"BZh91AY&SY")
    with open(path, "rb") as handle:
        handle.seek(offset)
        buffer = b""
        while piece := handle.read(PIECE_BYTES):
            buffer += piece
            if found := STREAM.search(buffer):
                return offset + found.start()
            offset += max(len(buffer) - length + 1, 0)
            # A header may extend over two pieces.
            buffer = buffer[-length + 1 :]
    return None


def cut_points(path: Path, size: int, step: Callable[[int], int]) -> list[int]:
    """Offsets that divide a dump of ``size`` bytes, about ``step(offset)`` bytes apart."""
    points: list[int] = []
    at: int | None = 0
    while at is not None and (target := at + step(at)) < size:
        at = next_stream(path, target) if path.suffix == ".bz2" else target
        if at is not None:
            points.append(at)
    return points


def read_site(path: Path) -> Site:
    """What a dump states about its wiki.

    Raises:
        ElementTree.ParseError: the file is not a dump.
    """
    with open_read(path) as handle:
        head = handle.read(HEAD_BYTES)
    if b"<mediawiki" not in head:
        raise ElementTree.ParseError("it does not begin with <mediawiki>")
    text = head.partition(OPEN)[0].decode("utf-8", "replace")
    base = BASE.search(text)
    language = next((found[1] for pattern in LANGUAGE if (found := pattern.search(text))), "")
    namespaces: dict[int, list[str]] = {}
    for number, name in NAMESPACE.findall(text):
        namespaces.setdefault(int(number), []).append(html.unescape(name))
    return Site(base=base[1] if base else "", language=language.replace("_", "-").lower(), namespaces=namespaces)


def _plain_pieces(part: Slice) -> Iterator[Piece]:
    with open_read(part.path) as handle:
        if part.begin:
            handle.seek(part.begin)
        left = None if part.end is None else part.end - part.begin
        # After the slice, reading continues in pieces until the page that began in it ends.
        while piece := handle.read(PIECE_BYTES if not left else min(left, PIECE_BYTES)):
            yield piece, left is None or left > 0
            left = None if left is None else max(left - len(piece), 0)


def _bzip2_pieces(part: Slice) -> Iterator[Piece]:
    """As ``_plain_pieces``; a stream that begins in the slice belongs to it completely."""
    decoder = bz2.BZ2Decompressor()
    with open(part.path, "rb") as handle:
        handle.seek(part.begin)
        consumed, begun = part.begin, part.begin
        buffer = b""
        while piece := buffer or handle.read(PIECE_BYTES):
            made = decoder.decompress(piece)
            buffer = decoder.unused_data
            consumed += len(piece) - len(buffer)
            if made:
                yield made, part.end is None or begun < part.end
            if decoder.eof:
                decoder, begun = bz2.BZ2Decompressor(), consumed
        if consumed != begun:
            raise EOFError("the last bzip2 stream is incomplete")


def _raw_pages(pieces: Iterator[Piece], *, whole: bool) -> Iterator[bytes]:
    buffer, num_own, at, total = b"", 0, 0, 0
    for piece, is_own in pieces:
        total += len(piece)
        buffer, num_own, at = buffer[at:] + piece, num_own - at + (len(piece) if is_own else 0), 0
        while True:
            begin = buffer.find(OPEN, at)
            if begin < 0:
                # A tag may extend over two pieces.
                at = max(at, len(buffer) - TAIL_BYTES)
                break
            # The page begins after the slice: it belongs to the next task.
            if begin >= num_own:
                return
            end = buffer.find(CLOSE, begin)
            if end < 0:
                at = begin
                break
            at = end + len(CLOSE)
            yield buffer[begin:at]
        if not is_own and at >= num_own:
            return
    # The end of a short last slice was checked by the slice before it.
    if (whole or total >= TAIL_BYTES) and not buffer[at:].rstrip().endswith(END):
        raise EOFError("it ends without </mediawiki>")


def read_pages(part: Slice) -> Iterator[Page]:
    """The pages that begin in a slice of a dump, one at a time in memory.

    Raises:
        ElementTree.ParseError: a page is not well-formed XML.
        EOFError: the dump is truncated.
        OSError: its compressed bytes are damaged.
    """
    cut = part.begin or part.end is not None
    pieces = _bzip2_pieces(part) if cut and part.path.suffix == ".bz2" else _plain_pieces(part)
    for raw in _raw_pages(pieces, whole=not cut):
        # Each page is parsed alone: a tree of the dump would be as large as the dump, and slices have no root element.
        yield _page(ElementTree.fromstring(raw))


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _page(element: Any) -> Page:
    found: dict[str, str] = {}
    redirect = False
    for child in element:
        name = _local(child.tag)
        if name == "redirect":
            redirect = True
        elif name == "revision":
            for part in child:
                found[f"revision.{_local(part.tag)}"] = part.text or ""
        else:
            found[name] = child.text or ""
    return Page(
        number=found.get("id", ""),
        revision=found.get("revision.id", ""),
        title=found.get("title", ""),
        namespace=found.get("ns", "0"),
        redirect=redirect or found.get("revision.text", "")[:9].lower() == "#redirect",
        markup=found.get("revision.text", ""),
    )
