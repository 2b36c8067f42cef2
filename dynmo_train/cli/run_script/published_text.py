"""Text of scripts as pages publish them: entities of HTML, and scripts that belong to another repository."""

from __future__ import annotations

import html
import re

from ..published_scripts import find

_ENTITY = re.compile(r"&(?:#60|#62|lt|gt);")
_LINK = re.compile(r"<a\b[^<>]*>|</a>")


def without_entities(text: str) -> tuple[str, list[str]]:
    """A script from the source of a web page, with the characters that its entities stand for, and a note.

    Args:
        text: contents of the script; without an entity of an angle bracket it is not changed.
    """
    found = _ENTITY.search(text)
    if found is None:
        return text, []
    line = text.count("\n", 0, found.start()) + 1
    note = f"line {line}: {found[0]} and other entities of HTML are read as the characters that they stand for"
    return html.unescape(_LINK.sub("", text)), [note]


def equivalent_of(path: str) -> str:
    """What to run in place of a published script that is not here, as the end of a message; empty if unknown."""
    row = find(path)
    return f", or run {row.equivalent}, its equivalent" if row and row.equivalent.startswith("bin/") else ""
