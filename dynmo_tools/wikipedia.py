"""Extract the text of a MediaWiki dump: one document an article, as WikiExtractor's ``--json`` writes them.

The markup is read by mwparserfromhell. Templates, tables, references, files and categories are left out; of a few
templates that hold running text, the text stays. Sections without text lose their title, as there.
"""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree import ElementTree

from .dumps import Page, read_base, read_pages
from .errors import DynmoError, MissingExtraError
from .joining import map_phases, records_kind
from .plan import Plan
from .records import encode_row
from .settings import ExtractWikiSettings
from .tasks import Phase, Task

LIST_MARK, TITLE_MARK = "\x00", "\x01"
DROPPED_TAGS = frozenset(
    {"ref", "references", "table", "gallery", "math", "timeline", "syntaxhighlight", "source", "score", "imagemap"}
    | {"style", "hiero", "chem", "graph", "mapframe", "templatestyles", "noinclude", "includeonly"}
)
LAST_VALUE_TEMPLATES = frozenset(
    {"lang", "transl", "transliteration", "nowrap", "nobr", "small", "big", "visible anchor"}
)
SPACE_TEMPLATES = frozenset({"nbsp", "spaces", "snd", "spnd", "ndash", "mdash", "dash"})
NAMESPACE_LINK = re.compile(r"^:?[a-z][\w -]*:\S", re.IGNORECASE)
BEHAVIOUR_SWITCH = re.compile(r"__[A-Z]+__")
EMPTY_BRACKETS = re.compile(r"\s?\((?:\s|[,;:/])*\)|\s?\[\s*\]")
OPENING_RUBBISH = re.compile(r"\((?:\s*[,;])+\s*")
SPACED_COMMA = re.compile(r" +([,.;:!?)])")
SPACES = re.compile(r"[ \t\xa0]+")


def _parser() -> Any:
    try:
        import mwparserfromhell
    except ImportError as error:
        raise MissingExtraError("mwparserfromhell", "prep") from error
    return mwparserfromhell


def _template(node: Any) -> str:
    name = str(node.name).strip().lower()
    values = [str(_plain(param.value)) for param in node.params if not param.showkey]
    if name in SPACE_TEMPLATES:
        return " "
    if name in LAST_VALUE_TEMPLATES and values:
        return values[-1]
    if name in ("convert", "cvt") and len(values) > 1:
        return f"{values[0]} {values[1]}"
    return ""


def _link(node: Any) -> str:
    title = str(node.title)
    if NAMESPACE_LINK.match(title) and not title.startswith(":"):
        return ""
    return _plain(node.text) if node.text is not None else title.removeprefix(":")


def _tag(node: Any) -> str:
    name = str(node.tag).strip().lower()
    if name in DROPPED_TAGS:
        return ""
    if name in ("li", "dt", "dd") and node.wiki_markup:
        return LIST_MARK
    if name == "br":
        return "\n"
    return _plain(node.contents) if node.contents is not None else ""


def _plain(code: Any) -> str:
    """The running text of some markup, list items and titles behind their marks."""
    kinds = _parser().nodes
    parts = []
    for node in code.nodes:
        if isinstance(node, kinds.Text):
            parts.append(str(node.value))
        elif isinstance(node, kinds.Wikilink):
            parts.append(_link(node))
        elif isinstance(node, kinds.Tag):
            parts.append(_tag(node))
        elif isinstance(node, kinds.Template):
            parts.append(_template(node))
        elif isinstance(node, kinds.Heading):
            parts.append(f"\n{TITLE_MARK}{_plain(node.title).strip()}\n")
        elif isinstance(node, kinds.HTMLEntity):
            parts.append(node.normalize())
        elif isinstance(node, kinds.ExternalLink) and node.title is not None:
            parts.append(_plain(node.title))
    return "".join(parts)


def tidy(text: str, *, keep_lists: bool) -> str:
    """Lines of text without what dropped markup left behind; titles only before text, each ended by a full stop."""
    text = BEHAVIOUR_SWITCH.sub("", html.unescape(text))
    kept: list[str] = []
    title: str | None = None
    for line in text.split("\n"):
        if line.startswith(TITLE_MARK):
            title = line[1:].strip()
            continue
        listed = LIST_MARK in line
        line = SPACES.sub(" ", line.replace(LIST_MARK, "")).strip()
        line = OPENING_RUBBISH.sub("(", EMPTY_BRACKETS.sub("", line))
        line = SPACED_COMMA.sub(r"\1", line).strip()
        if not line or (listed and not keep_lists):
            continue
        if title:
            kept.append(title if title[-1:] in "!?." else f"{title}.")
        title = None
        kept.append(f"- {line}" if listed else line)
    return "\n".join(kept)


def text_of(markup: str, *, keep_lists: bool = False) -> str:
    """The plain text of a page's markup."""
    return tidy(_plain(_parser().parse(markup, skip_style_tags=False)), keep_lists=keep_lists)


def extract_phases(plan: Plan) -> list[Phase]:
    """The phases of ``extract-wiki``."""
    return map_phases(plan, "wikipedia:extract")


def extract(task: Task) -> None:
    """Task function: the articles that begin in one piece of a dump.

    Raises:
        DynmoError: the dump is cut off, damaged or no XML.
    """
    settings: ExtractWikiSettings = task.job.settings
    writer = task.create(task.part(records_kind(task)))
    path = task.slice.path
    try:
        base = settings.url_base or read_base(path)
        for found in read_pages(task.slice):
            task.count(found.markup)
            reason = _skip(found, settings)
            text = "" if reason else text_of(found.markup, keep_lists=settings.lists)
            if reason or not text:
                task.tally.drop(reason or "empty")
                continue
            row = {
                "id": found.number,
                "revid": found.revision,
                "url": f"{base}?curid={found.number}",
                "title": found.title,
                "text": text,
            }
            task.keep(writer, encode_row(row))
    except (ElementTree.ParseError, EOFError) as error:
        raise DynmoError(f"{path}: is cut off or no MediaWiki XML: {error}; fetch the dump again") from error
    except OSError as error:
        if error.errno is not None:  # of the disk, not of the compression
            raise
        raise DynmoError(f"{path}: is damaged: {error}; fetch the dump again") from error


def _skip(page: Page, settings: ExtractWikiSettings) -> str | None:
    if page.redirect:
        return "redirect"
    return None if page.namespace in settings.namespaces else "namespace"
