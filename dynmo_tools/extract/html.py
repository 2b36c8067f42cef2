"""Text of HTML pages, with the parser of the standard library."""

from __future__ import annotations

import re
from html.parser import HTMLParser

SKIPPED_TAGS = frozenset(
    {"script", "style", "noscript", "template", "svg", "head", "nav", "form", "button", "iframe", "select"}
)
BLOCK_TAGS = frozenset(
    {"p", "div", "br", "li", "ul", "ol", "table", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article"}
    | {"header", "footer", "main", "aside", "blockquote", "pre", "dl", "dt", "dd", "hr", "figure", "figcaption", "body"}
)
SPACES = re.compile(r"\s+")


class _TextExtractor(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[list[str]] = [[]]
        self.title: list[str] = []
        self._skipped: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._in_title = True
        if tag == "body":
            self._skipped.clear()  # the head may not be closed
        if tag in SKIPPED_TAGS:
            self._skipped.append(tag)
        elif tag in BLOCK_TAGS:
            self.lines.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if tag in self._skipped:
            del self._skipped[self._skipped.index(tag) :]
        elif tag in BLOCK_TAGS:
            self.lines.append([])

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._skipped:
            self.lines[-1].append(data)


def extract_text(html: str) -> tuple[str, str]:
    """Extract the title and the text of a page, one line per block element."""
    reader = _TextExtractor()
    reader.feed(html)
    reader.close()
    lines = (SPACES.sub(" ", "".join(line)).strip() for line in reader.lines)
    return SPACES.sub(" ", "".join(reader.title)).strip(), "\n".join(line for line in lines if line)
