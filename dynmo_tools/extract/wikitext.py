"""Plain text of MediaWiki markup.

    markup ─> remove_extension_tags ─> tokens ─> _Page.plain ─> remove_leftover_markup ─> tidy ─> lines of text
              (broken_markup)          (mwparserfromhell)       (broken_markup)

The markup is split by the tokenizer of mwparserfromhell. Its node tree is not built: that takes ten times as long, and
most nodes are dropped. Tables, references, files, categories and templates are dropped, except templates with running
text (``wiki_templates``). A formula, or an unknown template within a sentence, becomes a placeholder: ``formula_1`` as
in WikiExtractor, ``template_1``. Sections without text lose their title, as in WikiExtractor.
"""

# ruff: noqa: RUF001 - punctuation of other scripts
from __future__ import annotations

import functools
import html
import itertools
import re
from collections.abc import Callable
from html.entities import name2codepoint
from importlib import import_module
from typing import Any

from .._common.errors import MissingExtraError
from .broken_markup import (
    BLOCKS,
    FORMULA_MARK,
    LITERAL_MARKS,
    ORIGINAL_SIGNS,
    remove_extension_tags,
    remove_leftover_markup,
)
from .wiki_names import LinkKind, WikiNames, convert_variants
from .wiki_templates import template_text

# Control characters are not allowed in XML, so no dump has them: marks cannot be confused with text.
LIST_MARK, TITLE_MARK, TEMPLATE_MARK, TEMPLATE_SIGN = "\x00", "\x01", "\x02", "\x1a"
DROPPED_TAGS = frozenset(
    {"ref", "references", "table", "gallery", "timeline", "syntaxhighlight", "source", "score", "imagemap"}
    | {"style", "hiero", "graph", "mapframe", "templatestyles", "includeonly"}
)
FORMULA_TAGS = frozenset({"math", "chem", "ce"})
PLACEHOLDERS = re.compile(f"{FORMULA_MARK}|{TEMPLATE_SIGN}")
NO_MARKS = dict.fromkeys(map(ord, (TITLE_MARK, LIST_MARK, TEMPLATE_MARK)))
ANY_WIKI = WikiNames.of("", {})
# Upper-case in Latin, any letters in other scripts: __NOTOC__, __目次非表示__.
BEHAVIOUR_SWITCH = re.compile(r"__(?:[A-Z]+|[^\W\da-zA-Z_][^\W\da-zA-Z]*?)__")
# What dropped templates leave: "Kyoto (, ) is" for "Kyoto ({{lang|...}}, {{IPA|...}}) is".
EMPTY_BRACKETS = re.compile(r"\s?\((?:\s|[,;:/،؛])*\)|\s?\[\s*\]|（[\s,;:/、，；：]*）")
LEADING_SEPARATORS = re.compile(r"([(（])(?:\s*[,;、，；،؛])+\s*")
# An unknown template is a part of a sentence if words and a space precede it and words follow; it is a note if it
# follows a word or full stop immediately, and an aside in brackets.
INLINE_TEMPLATE = re.compile(
    rf"(?<=[\w,\"'”»’] ){TEMPLATE_MARK}(?=[.,;:!?]? +[^\s)]|[.!?]$)"
    rf"|(?<=[\u3040-\u30ff\u3400-\u9fff]){TEMPLATE_MARK}(?=[\u3040-\u30ff\u3400-\u9fff])"
)
TITLE_ENDS = tuple("!?.。！？।؟…:：")
IDEOGRAPHS = re.compile("[\u3040-\u30ff\u3400-\u9fff]$")
SPACED_COMMA = re.compile(r" +([,.;:!?)])")
SPACES = re.compile(r"[ \t\xa0]+")
# Token kinds that begin and end a node. Separators divide an open node.
PAIRS = (
    ("TemplateOpen", "TemplateClose"),
    ("ArgumentOpen", "ArgumentClose"),
    ("WikilinkOpen", "WikilinkClose"),
    ("ExternalLinkOpen", "ExternalLinkClose"),
    ("HTMLEntityStart", "HTMLEntityEnd"),
    ("HeadingStart", "HeadingEnd"),
    ("CommentStart", "CommentEnd"),
    ("TagOpenOpen", "TagCloseClose"),
    ("TagOpenOpen", "TagCloseSelfclose"),
)
SEPARATORS = ("TemplateParamSeparator", "TemplateParamEquals", "WikilinkSeparator", "ExternalLinkSeparator")
TAG_SEPARATORS = ("TagAttrStart", "TagCloseOpen", "TagOpenClose")
BEGIN, END, SEPARATOR = range(3)
# Arguments of the tokenizer: start outside of any node, and read quotes of italics and bold as tags.
CONTEXT, SKIP_STYLES = 0, False


class MarkupParser:
    """The tokenizer of mwparserfromhell, its token kinds, and the conversion of tokens to markup."""

    def __init__(self) -> None:
        try:
            parser: Any = import_module("mwparserfromhell.parser")
        except ImportError as error:
            raise MissingExtraError("mwparserfromhell", "prep") from error
        tokens: Any = import_module("mwparserfromhell.parser.tokens")
        # The tokenizers in C and in Python give the same tokens; some installations only have the second.
        if parser.use_c:
            tokenizer = parser.CTokenizer()
        else:
            tokenizer = import_module("mwparserfromhell.parser.tokenizer").Tokenizer()
        self.tokenize: Callable[[str, int, bool], list[Any]] = tokenizer.tokenize
        self.tokens = tokens
        self.text = tokens.Text
        self.roles: dict[type, int] = {}
        for begin, end in PAIRS:
            self.roles[getattr(tokens, begin)] = BEGIN
            self.roles[getattr(tokens, end)] = END
        self.roles |= {getattr(tokens, name): SEPARATOR for name in SEPARATORS + TAG_SEPARATORS}
        self._builder: Any = parser.Builder

    def markup(self, tokens: list[Any]) -> str:
        """The markup of some tokens."""
        # Nearly always: names of templates and titles of links. The builder is needed for nested nodes only.
        if all(type(token) is self.text for token in tokens):
            return "".join([token["text"] for token in tokens])
        return str(self._builder().build(tokens))


markup_parser = functools.cache(MarkupParser)


class _Page:
    """The tokens of a page, with the end and the separators of each node.

    Args:
        markup: markup of the page.
        names: names of the wiki.
    """

    def __init__(self, markup: str, names: WikiNames) -> None:
        self._names = names
        self._markup_parser = language = markup_parser()
        self._tokens = tokens = language.tokenize(markup, CONTEXT, SKIP_STYLES)
        self._ends: dict[int, int] = {}
        self._parts: dict[int, list[int]] = {}
        roles, ends, parts = language.roles, self._ends, self._parts
        # One pass: the tokenizer closes nodes in order, so a stack finds the end of each.
        opened: list[int] = []
        for at, token in enumerate(tokens):
            role = roles.get(type(token))
            if role is None:
                continue
            if role == BEGIN:
                opened.append(at)
            elif role == END:
                ends[opened.pop()] = at
            else:
                parts.setdefault(opened[-1], []).append(at)
        kinds = language.tokens
        self._readers: dict[type, Callable[[int, int], str]] = {
            kinds.TemplateOpen: self._template,
            kinds.WikilinkOpen: self._link,
            kinds.ExternalLinkOpen: self._external_link,
            kinds.HTMLEntityStart: self._entity,
            kinds.HeadingStart: self._heading,
            kinds.TagOpenOpen: self._tag,
        }

    def plain(self, begin: int = 0, end: int | None = None) -> str:
        """The running text of tokens ``begin`` to ``end``; list items and titles have marks."""
        tokens, text, readers = self._tokens, self._markup_parser.text, self._readers
        stop = len(tokens) if end is None else end
        found: list[str] = []
        at = begin
        while at < stop:
            token = tokens[at]
            kind = type(token)
            if kind is text:
                found.append(token["text"])
                at += 1
                continue
            close = self._ends[at]
            if (read := readers.get(kind)) is not None:
                found.append(read(at, close))
            at = close + 1
        return "".join(found)

    def _markup(self, begin: int, end: int) -> str:
        return self._markup_parser.markup(self._tokens[begin:end])

    def _of_kind(self, opened: int, *kinds: type) -> list[int]:
        return [at for at in self._parts.get(opened, ()) if type(self._tokens[at]) in kinds]

    def _template(self, opened: int, close: int) -> str:
        kinds = self._markup_parser.tokens
        separators = self._of_kind(opened, kinds.TemplateParamSeparator)
        name = self._names.template_name(self._markup(opened + 1, separators[0] if separators else close))
        named = self._of_kind(opened, kinds.TemplateParamEquals)
        values = [
            self.plain(begin + 1, end)
            for begin, end in itertools.pairwise([*separators, close])
            if not any(begin < at < end for at in named)
        ]
        text = template_text(name, values)
        if text is not None:
            return text
        # Boxes have a line for each value.
        texts = (token["text"] for token in self._tokens[opened:close] if type(token) is self._markup_parser.text)
        return "" if any("\n" in line for line in texts) else TEMPLATE_MARK

    def _link(self, opened: int, close: int) -> str:
        parts = self._parts.get(opened)
        title = self._markup(opened + 1, parts[0] if parts else close).strip()
        # Other links with a prefix show it or their label: [[Help:Links]], [[wikt:word|word]], [[:Category:Physics]].
        if not title.startswith(":") and self._names.link_kind(title) is not LinkKind.TEXT:
            return ""
        return self.plain(parts[0] + 1, close) if parts else title.removeprefix(":")

    def _external_link(self, opened: int, close: int) -> str:
        parts = self._parts.get(opened)
        return self.plain(parts[0] + 1, close) if parts else ""

    def _entity(self, opened: int, close: int) -> str:
        # Tokens between start and end: one for a name, two for a decimal number, three for a hexadecimal one.
        value = self._tokens[close - 1]["text"]
        if close == opened + 2:
            character = chr(name2codepoint[value])
        else:
            character = chr(int(value, 16 if close == opened + 4 else 10))
        return LITERAL_MARKS.get(ord(character), character)  # an escaped "<" does not begin a tag

    def _heading(self, opened: int, close: int) -> str:
        return f"\n{TITLE_MARK}{self.plain(opened + 1, close).strip()}\n"

    def _tag(self, opened: int, close: int) -> str:
        kinds = self._markup_parser.tokens
        parts = self._parts.get(opened, ())
        name = self._markup(opened + 1, parts[0] if parts else close).strip().lower()
        if name in DROPPED_TAGS:
            return ""
        if name in FORMULA_TAGS:
            return FORMULA_MARK
        # Only those of wiki markup (*, #, ;, :), which have no end: their text follows as text of the line.
        if name in ("li", "dt", "dd") and self._tokens[opened].wiki_markup:
            return LIST_MARK
        # Without a begin and an end, the tag closes itself and has no contents.
        contents = self._of_kind(opened, kinds.TagCloseOpen, kinds.TagOpenClose)
        text = self.plain(contents[0] + 1, contents[-1]) if len(contents) > 1 else ""
        if name == "li":
            return f"\n{LIST_MARK}{text.strip()}\n"
        # Words before and after a block are not one word.
        return f"\n{text}\n" if name in BLOCKS else text


def tidy(text: str, *, keep_lists: bool) -> str:
    """Remove residues of dropped markup; a title stays only before text, and ends with a full stop.

    Args:
        text: result of ``remove_leftover_markup``, with marks.
        keep_lists: keep list items, each as a line that starts with "- ".
    """
    text = BEHAVIOUR_SWITCH.sub("", html.unescape(text))
    lines: list[str] = []
    title: str | None = None
    for line in text.split("\n"):
        if line.startswith(TITLE_MARK):
            # Held back: the next title replaces it if no text follows, as for sections of references only.
            title = line.translate(NO_MARKS).strip()
            continue
        listed = LIST_MARK in line
        line = SPACES.sub(" ", line.replace(LIST_MARK, "")).strip()
        if TEMPLATE_MARK in line:
            line = INLINE_TEMPLATE.sub(TEMPLATE_SIGN, line).replace(TEMPLATE_MARK, "")
            line = SPACES.sub(" ", line)
        line = LEADING_SEPARATORS.sub(r"\1", EMPTY_BRACKETS.sub("", line))
        line = SPACED_COMMA.sub(r"\1", line).strip()
        if not line or (listed and not keep_lists):
            continue
        if title:
            end = "。" if IDEOGRAPHS.search(title) else "."
            lines.append(title if title.endswith(TITLE_ENDS) else f"{title}{end}")
        title = None
        lines.append(f"- {line}" if listed else line)
    return _numbered("\n".join(lines)).translate(ORIGINAL_SIGNS)


def _numbered(text: str) -> str:
    """Number the placeholders of a page, those of formulas and of templates from 1."""
    counts = {FORMULA_MARK: itertools.count(1), TEMPLATE_SIGN: itertools.count(1)}
    names = {FORMULA_MARK: "formula_", TEMPLATE_SIGN: "template_"}
    return PLACEHOLDERS.sub(lambda found: f"{names[found[0]]}{next(counts[found[0]])}", text)


def text_of(markup: str, *, keep_lists: bool = False, names: WikiNames = ANY_WIKI) -> str:
    """The plain text of a page's markup.

    Args:
        markup: markup of the page.
        keep_lists: keep list items, each as a line that starts with "- ".
        names: names of the wiki.
    """
    markup = convert_variants(remove_extension_tags(markup), names.language)
    return tidy(remove_leftover_markup(_Page(markup, names).plain(), names), keep_lists=keep_lists)
