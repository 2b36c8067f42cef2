r"""Builds one HTML file that needs no network: text, tables, and charts as JSON for ``assets/report.js``.

Every string of a document is escaped where it is written: in HTML as entities, and in the embedded JSON, where
``</script>`` would end the data, by ``\\u003c``. A chart without JavaScript is the table below it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib.resources import files
from typing import Any

MAX_TEXT = 300
"""Characters of one name or message on a page; the middle of a longer one is left out."""
LONG_TITLE = 60
"""Characters of a title; a longer one has a smaller font."""
SHORT_CELL = 14
"""Characters of a cell that is never broken into lines."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """The text, or its beginning and end around an ellipsis: ``limit`` characters at most."""
    return text if len(text) <= limit else f"{text[: limit - limit // 3 - 1]}…{text[len(text) - limit // 3 :]}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text.

    Attributes:
        columns: headings; ``group: name`` of neighbors with the same group becomes a heading of two rows.
        rows: cells of each row; one more cell than columns is a sentence below the row.
        text_columns: columns with words, which are aligned left; the first always is.
        caption: what the table shows.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = ()
    caption: str = ""

    def html(self) -> str:
        """The table element, in a frame that scrolls where the page is narrower than the table."""
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        label = escape(self.caption or "table", quote=True)
        body = "".join(map(self._row, self.rows))
        return (
            f'<div class="table" tabindex="0" role="region" aria-label="{label}"><table>{caption}'
            f"<thead>{self._head()}</thead><tbody>{body}</tbody></table></div>"
        )

    def _class(self, at: int, text: str) -> str:
        kind = "words" if at == 0 or at in self.text_columns else ""
        # A short cell is not broken: a number stays next to its unit.
        kind += " short" if len(text) <= SHORT_CELL else ""
        return f' class="{kind.strip()}"' if kind else ""

    def _head(self) -> str:
        groups = [column.split(": ")[0] if ": " in column else None for column in self.columns]
        if not any(groups):
            cells = (f'<th scope="col"{self._class(at, "")}>{escape(c)}</th>' for at, c in enumerate(self.columns))
            return f"<tr>{''.join(cells)}</tr>"
        upper, lower = [], []
        for at, (column, group) in enumerate(zip(self.columns, groups, strict=True)):
            if group is None:
                upper.append(f'<th scope="col" rowspan="2"{self._class(at, "")}>{escape(column)}</th>')
                continue
            lower.append(f'<th scope="col"{self._class(at, "")}>{escape(column.removeprefix(f"{group}: "))}</th>')
            if at == 0 or groups[at - 1] != group:
                span = groups.count(group)
                upper.append(f'<th scope="colgroup" class="group" colspan="{span}">{escape(group)}</th>')
        return f"<tr>{''.join(upper)}</tr><tr>{''.join(lower)}</tr>"

    def _row(self, row: Sequence[str]) -> str:
        count = len(self.columns)
        cells = (f"<td{self._class(at, text)}>{escape(shortened(text))}</td>" for at, text in enumerate(row[:count]))
        if len(row) == count:
            return f"<tr>{''.join(cells)}</tr>"
        more = f'<tr><td class="words more" colspan="{count}">{escape(shortened(row[count]))}</td></tr>'
        return f'<tr class="first">{"".join(cells)}</tr>{more}'


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: ``spec`` is drawn by ``assets/report.js``; the table has the same values for other readers.

    Attributes:
        name: unique on the page; letters, digits and ``-``.
        title, text: what the chart shows, and how to read it.
        spec: ``kind`` (``lines``, ``heatmap``, ``timeline``) and its data.
        table: the values, thinned out.
        wide: whether it needs the whole width of a wide page.
    """

    name: str
    title: str
    text: str
    spec: Mapping[str, Any]
    table: Table
    wide: bool = True

    def html(self) -> str:
        """The figure; the chart itself is added by the script."""
        title, name = escape(self.title), escape(self.name, quote=True)
        return (
            f'<figure class="chart{" wide" if self.wide else ""}" id="{name}" aria-labelledby="{name}-title">'
            f'<figcaption><h3 id="{name}-title">{title}</h3><p>{escape(self.text)}</p></figcaption>'
            f'<div class="canvas" data-chart="{name}"></div>'
            f'<details class="values" open><summary>Values as a table</summary>{self.table.html()}</details></figure>'
        )


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph, such as why there is no chart."""

    text: str
    title: str = ""

    def html(self) -> str:
        """The paragraph, with its title as a small heading."""
        head = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        return f'<div class="note wide">{head}<p>{escape(shortened(self.text, 2000))}</p></div>'


@dataclass(frozen=True, kw_only=True)
class TraceButton:
    """A button that saves a Chrome trace, which is made from timelines of the page.

    Attributes:
        charts: names of the timelines.
        file_name: of the saved file.
    """

    charts: Sequence[str]
    file_name: str

    def html(self) -> str:
        """The button and what to do with the file."""
        names, file_name = escape(",".join(self.charts), quote=True), escape(self.file_name, quote=True)
        return (
            f'<p class="note wide"><button type="button" class="action" data-trace="{names}"'
            f' data-file="{file_name}" hidden>Save trace for Perfetto</button>'
            " <span>Open the file at "
            '<a href="https://ui.perfetto.dev" target="_blank" rel="noopener noreferrer">ui.perfetto.dev</a>'
            " or chrome://tracing; <code>dynmo-plan report --trace FILE</code> writes it without the page.</span></p>"
        )


Block = Chart | Note | Table | TraceButton


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure at the top of the page: its name, its value, and a line on how it developed."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what is below it."""

    title: str
    blocks: Sequence[Block]
    text: str = ""

    @property
    def name(self) -> str:
        """The anchor of the section."""
        return "section-" + "".join(c if c.isalnum() else "-" for c in self.title.lower())

    def html(self) -> str:
        """The section element."""
        text = f'<p class="lead">{escape(self.text)}</p>' if self.text else ""
        blocks = "".join(
            f'<div class="wide">{block.html()}</div>' if isinstance(block, Table) else block.html()
            for block in _rows_filled(self.blocks)
        )
        return (
            f'<section id="{self.name}" aria-labelledby="{self.name}-title"><h2 id="{self.name}-title">'
            f'{escape(self.title)}</h2>{text}<div class="blocks">{blocks}</div></section>'
        )


def _rows_filled(blocks: Sequence[Block]) -> list[Block]:
    """The blocks in their order; a chart of half the width without a neighbor gets the whole width."""
    filled: list[Block] = []
    has_left = False
    for at, block in enumerate(blocks):
        if isinstance(block, Chart) and not block.wide and not has_left:
            following = blocks[at + 1] if at + 1 < len(blocks) else None
            has_left = isinstance(following, Chart) and not following.wide
            filled.append(block if has_left else replace(block, wide=True))
        else:
            has_left = False
            filled.append(block)
    return filled


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        title: the name of the run.
        subtitle: the model.
        kind: what the page is, such as ``Run report``.
        facts: names and values for the header.
        tiles: the main figures.
        sections: everything else, in order.
        footer: who wrote the page.
    """

    title: str
    subtitle: str
    kind: str
    facts: Sequence[tuple[str, str]]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    footer: str = ""
    lang: str = field(default="en")

    def html(self) -> str:
        """The complete file."""
        blocks = [block for each in self.sections for block in each.blocks]
        charts = {block.name: dict(block.spec) for block in blocks if isinstance(block, Chart)}
        facts = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(shortened(value))}</dd></div>" for name, value in self.facts
        )
        tiles = "".join(
            f'<li><span class="label">{escape(tile.label)}</span><span class="value">{escape(tile.value)}</span>'
            f'<span class="sub">{escape(tile.note)}</span></li>'
            for tile in self.tiles
        )
        links = "".join(f'<a href="#{each.name}">{escape(each.title)}</a>' for each in self.sections)
        title = escape(shortened(self.title, 120))
        long = ' class="long"' if len(self.title) > LONG_TITLE else ""
        subtitle = escape(shortened(self.subtitle))
        return (
            f'<!doctype html>\n<html lang="{self.lang}"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{title} · {escape(self.kind)}</title>"
            f"<style>{_asset('report.css')}</style></head><body>"
            f'<a class="skip" href="#content">Skip to the charts</a><header><div class="top"><div>'
            f'<p class="kind">{escape(self.kind)}</p><h1{long}>{title}</h1><p class="subtitle">{subtitle}</p></div>'
            '<button type="button" class="theme" hidden aria-label="Color theme"></button></div>'
            f'<dl class="facts">{facts}</dl></header><nav aria-label="Sections">{links}</nav><main id="content">'
            "<noscript><p class='lead'>The charts need JavaScript. The table below each chart has its values.</p>"
            "</noscript>"
            f'<ul class="tiles">{tiles}</ul>{"".join(each.html() for each in self.sections)}</main>'
            f"<footer>{escape(self.footer)}</footer>"
            f'<script type="application/json" id="report-data">{embedded_json(charts)}</script>'
            f"<script>{_asset('uplot.js')}</script><script>{_asset('report.js')}</script></body></html>\n"
        )


def embedded_json(value: Any) -> str:
    """JSON that is safe within a script element of a page."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Lone surrogates, as file names may have, have no UTF-8: they are written as JSON escapes.
    text = text.encode("utf-8", "backslashreplace").decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def encoded(page: Page) -> bytes:
    """The bytes of the file; characters that UTF-8 does not have are escaped."""
    return page.html().encode("utf-8", "backslashreplace")


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
