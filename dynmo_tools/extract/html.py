"""Text of HTML pages, with the parser of the standard library.

Pages of the web are rarely well-formed: tags are open, crossed or closed twice. The parser reports tags as they occur
and builds no tree, so nothing that a page lacks can end the extraction.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

# Contents that a browser does not show as text, and lists of links and controls around it.
SKIPPED_TAGS = frozenset(
    {"script", "style", "noscript", "template", "svg", "head", "nav", "form", "button", "iframe", "select"}
)
# Tags that begin a new line in a browser; text of all other tags continues the line.
BLOCK_TAGS = frozenset(
    {"p", "div", "br", "li", "ul", "ol", "table", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article"}
    | {"header", "footer", "main", "aside", "blockquote", "pre", "dl", "dt", "dd", "hr", "figure", "figcaption", "body"}
)
SPACES = re.compile(r"\s+")


class _TextExtractor(HTMLParser):
    def __init__(self) -> None:
        # Entities arrive as characters, within the text around them.
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
        # An end tag also ends the open tags within it; one without a start tag is ignored.
        if tag in self._skipped:
            del self._skipped[self._skipped.index(tag) :]
        elif tag in BLOCK_TAGS:
            self.lines.append([])

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._skipped:
            self.lines[-1].append(data)

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Skip ``<![...``; what Python's parser refuses there is a comment, as in browsers.

        Args:
            i: offset of ``<![``.
            report: whether the section is handled.

        Returns:
            The offset after it; -1 where the page ends within.
        """
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)


def extract_text(html: str) -> tuple[str, str]:
    """Extract the title and the text of a page.

    Args:
        html: decoded page.

    Returns:
        The title, empty if there is none, and the text, one line per block element without blank lines.
    """
    reader = _TextExtractor()
    reader.feed(html)
    reader.close()
    lines = (SPACES.sub(" ", "".join(line)).strip() for line in reader.lines)
    return SPACES.sub(" ", "".join(reader.title)).strip(), "\n".join(line for line in lines if line)
