"""Pages of a MediaWiki XML dump, read from any piece of it: a piece holds the pages that begin in it.

A plain dump may be cut anywhere. A bzip2 dump may be cut where a stream of it begins, which is on a byte (multistream
dumps have one for every hundred pages); a page that goes on behind the piece is read to its end. ``<`` is written as an
entity in the texts of a dump, so the tags of a page are never part of one.
"""

from __future__ import annotations

import bz2
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .codecs import PIECE_BYTES, open_read
from .jsonl import Slice

OPEN, CLOSE, END = b"<page>", b"</page>", b"</mediawiki>"
STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # a stream's header and that of its first block: chance never writes them
HEAD_BYTES = 1 << 20
TAIL_BYTES = 64  # more than a tag and the white space behind the last one
BASE = re.compile(rb"<base>([^<]*)/[^</]*</base>")

Piece = tuple[bytes, bool]
"""Bytes of a dump, and whether they are of the piece, or behind it."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a dump, as it is written there."""

    number: str
    revision: str
    title: str
    namespace: str
    redirect: bool
    markup: str


def is_dump(path: Path) -> bool:
    """Whether the name is that of a dump that may be cut: ``.xml``, or ``.xml`` within and ``.bz2`` at its end."""
    return path.suffix == ".xml" or (path.suffix == ".bz2" and ".xml" in path.name)


def next_stream(path: Path, offset: int) -> int | None:
    """The first offset at or behind ``offset`` where a bzip2 stream begins."""
    length = len(b"BZh91AY&SY")
    with open(path, "rb") as handle:
        handle.seek(offset)
        held = b""
        while piece := handle.read(PIECE_BYTES):
            held += piece
            if found := STREAM.search(held):
                return offset + found.start()
            offset += max(len(held) - length + 1, 0)
            held = held[-length + 1 :]
    return None


def cut_points(path: Path, size: int, step: Callable[[int], int]) -> list[int]:
    """Where a dump of ``size`` bytes is cut: near every ``step(offset)`` bytes behind an offset."""
    points: list[int] = []
    at: int | None = 0
    while at is not None and (wanted := at + step(at)) < size:
        at = next_stream(path, wanted) if path.suffix == ".bz2" else wanted
        if at is not None:
            points.append(at)
    return points


def read_base(path: Path) -> str:
    """The address that a dump's pages have in common; empty where the dump states none.

    Raises:
        ElementTree.ParseError: it is no dump.
    """
    with open_read(path) as handle:
        head = handle.read(HEAD_BYTES)
    if b"<mediawiki" not in head:
        raise ElementTree.ParseError("it does not begin with <mediawiki>")
    found = BASE.search(head.partition(OPEN)[0])
    return found[1].decode("utf-8", "replace") if found else ""


def _plain_pieces(part: Slice) -> Iterator[Piece]:
    with open_read(part.path) as handle:
        if part.begin:
            handle.seek(part.begin)
        left = None if part.end is None else part.end - part.begin
        while piece := handle.read(PIECE_BYTES if not left else min(left, PIECE_BYTES)):
            yield piece, left is None or left > 0
            left = None if left is None else max(left - len(piece), 0)


def _bzip2_pieces(part: Slice) -> Iterator[Piece]:
    """As ``_plain_pieces``; the bytes of a stream that begins within the piece are of the piece."""
    decoder = bz2.BZ2Decompressor()
    with open(part.path, "rb") as handle:
        handle.seek(part.begin)
        consumed, begun = part.begin, part.begin
        held = b""
        while piece := held or handle.read(PIECE_BYTES):
            made = decoder.decompress(piece)
            held = decoder.unused_data
            consumed += len(piece) - len(held)
            if made:
                yield made, part.end is None or begun < part.end
            if decoder.eof:
                decoder, begun = bz2.BZ2Decompressor(), consumed
        if consumed != begun:
            raise EOFError("the last bzip2 stream is not complete")


def _raw_pages(pieces: Iterator[Piece], *, whole: bool) -> Iterator[bytes]:
    held, own, at, total = b"", 0, 0, 0
    for piece, ours in pieces:
        total += len(piece)
        held, own, at = held[at:] + piece, own - at + (len(piece) if ours else 0), 0
        while True:
            begin = held.find(OPEN, at)
            if begin < 0:
                at = max(at, len(held) - TAIL_BYTES)
                break
            if begin >= own:
                return
            end = held.find(CLOSE, begin)
            if end < 0:
                at = begin
                break
            at = end + len(CLOSE)
            yield held[begin:at]
        if not ours and at >= own:
            return
    # Of a short last piece, the piece before has seen the end.
    if (whole or total >= TAIL_BYTES) and not held[at:].rstrip().endswith(END):
        raise EOFError("it ends without </mediawiki>")


def read_pages(part: Slice) -> Iterator[Page]:
    """The pages that begin within a piece of a dump, one at a time in memory.

    Raises:
        ElementTree.ParseError: a page is no well-formed XML.
        EOFError: the dump is cut off.
        OSError: its compressed bytes are damaged.
    """
    cut = part.begin or part.end is not None
    pieces = _bzip2_pieces(part) if cut and part.path.suffix == ".bz2" else _plain_pieces(part)
    for raw in _raw_pages(pieces, whole=not cut):
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
