"""Remove wiki markup that the parser does not recognize, before parsing and from the resulting text.

mwparserfromhell returns a node as literal text if its parts do not close in order, such as a reference with a single
``''``. MediaWiki removes extension tags first, from ``<ref`` to the next ``</ref>``, whatever is between them.
``remove_extension_tags`` does the same; ``remove_leftover_markup`` removes the remaining markup and keeps the words.
"""

from __future__ import annotations

import functools
import re

from .wiki_names import LinkKind, WikiNames

REMOVED_MARK, FORMULA_MARK = "\x03", "\x04"
# Signs that are not markup, as in <nowiki>, have a mark until the end; \x1c to \x1f would count as white space.
_SIGNS = "<[]{}'|=*#:;&_!-"
LITERAL_MARKS = dict(
    zip(map(ord, _SIGNS), "\x05\x06\x07\x08\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19", strict=True)
)
ORIGINAL_SIGNS = {ord(mark): chr(sign) for sign, mark in LITERAL_MARKS.items()}
FORMULAS = ("math", "ce", "chem")
EXTENSIONS = (
    "ref", "references", "gallery", "math", "ce", "chem", "timeline", "syntaxhighlight", "source", "score",
    "imagemap", "hiero", "graph", "mapframe", "maplink", "templatestyles", "templatedata",
)  # fmt: skip
TAGS = (
    *EXTENSIONS, "abbr", "b", "bdi", "bdo", "big", "blockquote", "br", "caption", "center", "cite", "code",
    "dd", "del", "dfn", "div", "dl", "dt", "em", "font", "h[1-6]", "hr", "i", "includeonly", "indicator", "ins",
    "kbd", "li", "mark", "noinclude", "nowiki", "ol", "onlyinclude", "p", "poem", "pre", "q", "rb", "rp", "rt",
    "rtc", "ruby", "s", "samp", "section", "small", "span", "strike", "strong", "sub", "sup", "table", "tbody",
    "td", "th", "time", "tr", "tt", "u", "ul", "var", "wbr",
)  # fmt: skip
LITERAL = ("nowiki", "pre")
# Tags that end the line before them.
BLOCKS = frozenset(
    {"p", "div", "br", "hr", "blockquote", "center", "pre", "poem", "section", "ul", "ol", "li", "dl", "dt", "dd", "h1"}
    | {"h2", "h3", "h4", "h5", "h6", "caption", "table", "tbody", "tr", "td", "th"}
)
# Possessive quantifiers (*+, ++) never backtrack: a page of unclosed quotes takes linear time.
_BEGIN = re.compile(
    rf"<!--|<({'|'.join((*LITERAL, *EXTENSIONS))})(?=[\s/>])(?:[^<>\"]++|\"[^\"<]*+\")*+>", re.IGNORECASE
)
_TAG = re.compile(rf"</?({'|'.join(TAGS)})(?:[\s/][^<>]*)?>", re.IGNORECASE)
_OPEN_TAG = re.compile(rf"</?(?:{'|'.join(EXTENSIONS)})\b[^\s<>]*", re.IGNORECASE)
# An ampersand of an entity stays, so that the entity is decoded.
_LITERAL_SIGNS = re.compile(r"&(?!#?\w+;)|(?<!&)#|[<\[\]{}'|=*:_!-]|(?<!\w);")
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_APOSTROPHE = re.compile(r"(?<=\w)'''(?=s\b)|(?<=s)'''(?= )")
_QUOTES = re.compile(r"'{2,}")
_STRAY = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}")
_MAYBE = re.compile(r"''|\[\[|\]\]|\{\{|\}\}|\{\||\|\}|<[/a-zA-Z]|^\s*\|", re.MULTILINE)
# Each pass removes the innermost templates and links, so deeper nesting leaves markup; pages do not nest this deep.
MAX_NESTING = 32


def remove_extension_tags(markup: str) -> str:
    """Remove comments and extension tags such as ``<ref>``; signs of literal text (``<nowiki>``) become marks.

    Tags within comments and literal text are ignored. ``REMOVED_MARK`` replaces a tag, so that the text after it does
    not start a line and become a list; ``FORMULA_MARK`` replaces a formula.
    """
    pieces: list[str] = []
    unclosed: set[str] = set()  # searched once per name, so that a page of open tags takes linear time
    at = done = 0
    while (found := _BEGIN.search(markup, at)) is not None:
        at, name = found.end(), (found.group(1) or "").lower()
        if not name:
            end = markup.find("-->", at)
            pieces.append(markup[done : found.start()])
            at = done = end + 3 if end >= 0 else len(markup)
        elif name not in unclosed:
            # As MediaWiki: from the tag to the next end tag of its name, whatever is between them.
            close = None if found.group().endswith("/>") else _closing(name).search(markup, at)
            if close is not None:
                at = close.end()
            elif not found.group().endswith("/>"):
                unclosed.add(name)
                continue
            pieces += [markup[done : found.start()], REMOVED_MARK]
            if name in FORMULAS:
                pieces.append(FORMULA_MARK)
            elif name in LITERAL and close is not None:
                literal = markup[found.end() : close.start()]
                # Entities are the only markup there; their end keeps its sign.
                pieces.append(_LITERAL_SIGNS.sub(lambda sign: LITERAL_MARKS[ord(sign[0])], literal))
                if name == "pre":
                    pieces[-1] = f"\n{pieces[-1]}\n"
            done = at
    return "".join([*pieces, markup[done:]])


@functools.cache
def _closing(name: str) -> re.Pattern[str]:
    return re.compile(rf"</{name}\s*>", re.IGNORECASE)


def remove_leftover_markup(text: str, names: WikiNames) -> str:
    """Remove remaining templates and tables completely, and all other remaining markup except its words.

    Args:
        text: text with the markup that the parser did not recognize.
        names: names of the wiki.
    """
    text = text.replace(REMOVED_MARK, "")
    # Most pages have none: one search instead of eight substitutions.
    if _MAYBE.search(text) is None:
        return text
    for _ in range(MAX_NESTING):
        shorter = _LINK.sub(lambda found: _link_text(found, names), _TEMPLATE.sub("", text))
        if shorter == text:
            break
        text = shorter
    # Tables after tags: a tag before "{|" would hide that the table starts a line.
    text = _remove_tables(_OPEN_TAG.sub("", _TAG.sub(_break, text)))
    return _QUOTES.sub("", _APOSTROPHE.sub("'", _STRAY.sub("", text)))


def _link_text(found: re.Match[str], names: WikiNames) -> str:
    title, *parts = found.group(1).split("|")
    if names.link_kind(title) is not LinkKind.TEXT and not title.startswith(":"):
        return ""
    return parts[-1] if parts else title


def _break(found: re.Match[str]) -> str:
    return "\n" if found[1].lower() in BLOCKS else ""


def _remove_tables(text: str) -> str:
    """Remove tables, which begin and end at the start of a line.

    If the end of a table is missing, only the lines of its markup are removed.
    """
    lines = text.split("\n")
    # A table may be indented or within a list item, whose marks precede it.
    marks = [line.lstrip("\x00 \t:*#;")[:2] for line in lines]
    dropped = [mark.startswith("|") for mark in marks]
    opened: list[int] = []
    closed: list[tuple[int, int]] = []  # outermost tables, marked at the end: linear time for nested tables
    for at, mark in enumerate(marks):
        if mark == "{|":
            opened.append(at)
        elif mark == "|}" and opened:
            begin = opened.pop()
            while closed and closed[-1][0] > begin:
                closed.pop()
            closed.append((begin, at))
    for begin, at in closed:
        dropped[begin:at] = [True] * (at - begin)
        lines[at] = lines[at].partition("|}")[2]
        dropped[at] = not lines[at].strip()
    for begin in opened:
        dropped[begin] = True
    for at in range(opened[0] if opened else len(lines), len(lines)):
        dropped[at] = dropped[at] or marks[at].startswith("!")
    return "\n".join(line for line, drop in zip(lines, dropped, strict=True) if not drop)
