"""Text of markup: fixed cases, and comparison with a plain walk over the parser's node tree."""

from __future__ import annotations

import random
import re
import time

import pytest

from dynmo_tools.extract import wikitext
from dynmo_tools.extract.broken_markup import remove_extension_tags, remove_leftover_markup
from dynmo_tools.extract.wikitext import text_of, tidy
from dynmo_tools.io.jsonl import Slice
from dynmo_tools.io.mediawiki_dump import read_pages
from tests.tables import table

PIECES = [
    *("{{", "}}", "{{{", "}}}", "[[", "]]", "[", "]", "|", "=", "==", "''", "'''", "\n", "* ", "# ", "; a : b", ": "),
    *("<ref>", "</ref>", '<ref name="x" />', "<br>", "<br/>", "</br>", "<b>", "</b>", "<li>", "<li a=1>", "<dd>"),
    *("<table>", "</table>", "{|", "|}", "|-", "! h", "|| c", "<!--", "-->", "<nowiki>", "</nowiki>", "<gallery>"),
    *("</gallery>", '<div class="a{{b}}">', "</div>", "<b {{x|y=z}}>", "<small>", "</small>", "----", "\n:", "\n\n"),
    *("&nbsp;", "&#65;", "&#x41;", "&bogus;", "http://a.org/x y", "[http://b.org t]", "https://c.d", "File:a.jpg"),
    *("Category:z", ":Category:q", "[[a|b]]", "[[File:x.png|thumb|cap [[l]]]]", "lang", "|en|text", "snd", "nowrap"),
    *("{{lang|en|x}}", "{{convert|5|km}}", "{{convert}}", "{{lang<!-- c -->|en|y}}", "1=", "a", "word ", " "),
]


@table(
    ("markup", "text"),
    [
        ("'''Bold''' and ''italic'' [[link|shown]] [[plain]].", "Bold and italic shown plain."),
        ("Text.<ref name=a>note {{cite|b}}</ref> More.<ref name=a/>", "Text. More."),
        ("Before {{infobox\n| a = [[b]]\n* list in it\n}}after.", "Before after."),
        ("{| class=x\n! a\n|-\n| b\n|}\nBehind.", "Behind."),
        ("[[File:a.jpg|thumb|a [[b]] c]][[Category:X]][[de:Y]]Kept [[:Category:Z]].", "Kept Category:Z."),
        ("A&nbsp;b &amp; c &mdash; d", "A b & c \u2014 d"),
        ("== Empty ==\n== Full ==\ntext\n=== Why? ===\nmore", "Full.\ntext\nWhy?\nmore"),
        ("Intro\n* one\n* two\n# three\nend", "Intro\nend"),
        ("[http://a.b label] and [http://a.b]", "label and"),
        ("Greek ({{lang|el|abc}}) and ({{lang-fr}}; ) end {{convert|5|km}}", "Greek (abc) and end 5 km"),
        ("<!-- hidden -->seen <math>x</math>__NOTOC__", "seen"),
        ("x < y and {{unclosed", "x < y and unclosed"),
    ],
)
def test_text_of_converts_markup_to_text(markup, text):
    assert text_of(markup) == text


def test_text_of_with_keep_lists_keeps_list_items():
    assert text_of("Intro\n* one\n* [[two]]\nend", keep_lists=True) == "Intro\n- one\n- two\nend"


def of_tag(node, nodes):
    name = str(node.tag).strip().lower()
    if name in ("li", "dt", "dd") and node.wiki_markup:
        return wikitext.LIST_MARK
    if name == "br":
        return "\n"
    return "" if name in wikitext.DROPPED_TAGS else walk(node.contents, nodes)


def of_template(node, nodes):
    name = str(node.name).strip().lower()
    values = [walk(param.value, nodes) for param in node.params if not param.showkey]
    if name in wikitext.LAST_VALUE_TEMPLATES:
        return "".join(values[-1:])
    if name in wikitext.TWO_VALUE_TEMPLATES and len(values) > 1:
        return " ".join(values[:2])
    return " " if name in wikitext.SPACE_TEMPLATES else ""


def of_link(node, nodes):
    title = str(node.title)
    if wikitext.NAMESPACE_LINK.match(title) and not title.startswith(":"):
        return ""
    return title.removeprefix(":") if node.text is None else walk(node.text, nodes)


def walk(code, nodes):
    """As ``text_of`` before tidying, over the tree of nodes that mwparserfromhell builds."""
    readers = {
        nodes.Text: lambda node, _: str(node.value),
        nodes.Wikilink: of_link,
        nodes.Tag: of_tag,
        nodes.Template: of_template,
        nodes.Heading: lambda node, nodes: f"\n{wikitext.TITLE_MARK}{walk(node.title, nodes).strip()}\n",
        nodes.HTMLEntity: lambda node, _: node.normalize(),
        nodes.ExternalLink: lambda node, nodes: "" if node.title is None else walk(node.title, nodes),
    }
    return "".join(readers[type(node)](node, nodes) for node in code.nodes if type(node) in readers)


def by_tree(markup):
    library = pytest.importorskip("mwparserfromhell")
    tree = library.parse(remove_extension_tags(markup), skip_style_tags=False)
    return tidy(remove_leftover_markup(walk(tree, library.nodes)), keep_lists=True)


def test_text_of_random_markup_matches_the_node_tree():
    rng = random.Random(7)
    texts = set()
    for _ in range(3000):
        markup = "".join(rng.choices(PIECES, k=rng.randrange(1, 28)))
        text = text_of(markup, keep_lists=True)
        assert text == by_tree(markup), markup
        texts.add(text)
    assert len(texts) > 2000


def test_text_of_without_the_c_tokenizer_is_the_same(monkeypatch):
    parser = pytest.importorskip("mwparserfromhell.parser")
    markup = "== T ==\n{{lang|en|x}} [[a|b]]&nbsp;<i>c</i>\n* d {{convert|1|km}}"
    expected = text_of(markup, keep_lists=True)
    monkeypatch.setattr(parser, "use_c", False)
    made = wikitext.MarkupParser()
    assert type(made.tokenize.__self__).__name__ == "Tokenizer"
    monkeypatch.setattr(wikitext, "markup_parser", lambda: made)
    assert text_of(markup, keep_lists=True) == expected == "T.\nx b c\n- d 1 km"


LEFTOVERS = re.compile(
    r"</?ref|\'\'|\[\[|\]\]|\{\{|\}\}|\{\||\|\}|</?[a-z]+[ />]|<!--|__[A-Z]+__|(?:style|class|align|colspan)=\"|^\s*\|",
    re.MULTILINE,
)


@pytest.mark.complete
@pytest.mark.data
@pytest.mark.parametrize("keep_lists", [False, True])
def test_text_of_real_dumps_has_no_markup(shared_data, keep_lists):
    count = 0
    for path in sorted((shared_data / "wiki").glob("*.bz2")):
        for page in read_pages(Slice(path=path)):
            if page.redirect or page.namespace != "0":
                continue
            text = text_of(page.markup, keep_lists=keep_lists)
            assert LEFTOVERS.search(text) is None, (page.title, LEFTOVERS.search(text))
            count += len(text) > 500
    assert count > 100


@pytest.mark.data
def test_text_of_a_real_dump_matches_the_node_tree(shared_data):
    path = next((shared_data / "wiki").glob("enwiki-latest*.bz2"))
    pages = [page for page in read_pages(Slice(path=path)) if not page.redirect][:3]
    for page in pages:
        assert text_of(page.markup, keep_lists=True) == by_tree(page.markup)


@table(
    ("markup", "text"),
    [
        ("a<ref>x ''y</ref> b", "a b"),
        ('a<ref name="n>m">x</ref> b<ref name=q /> c', "a b c"),
        ("a<REF>one {{cite|<ref>two</ref> three}} b", "a three b"),
        ("a<ref>never closed", "anever closed"),
        ("a</ref> b", "a b"),
        ("kept <gallery>\nFile:a.jpg|[[b]] ''c\n</gallery> kept", "kept kept"),
        ("mass <math>a < b '' {{x</math> and <chem>H2O</chem><ce>Na+</ce>.", "mass and."),
        ("so<math>x</math>\n; not a list", "so"),
        ("<math>x</math>; not a list", "; not a list"),
        ("The ''Iliad''' was", "The Iliad' was"),
        ("The Iliad'''s end", "The Iliad's end"),
        ("before\n{| class=\"a\"\n|-\n| ''x\n{|\n| inner\n|}\n|}\nafter", "before\nafter"),
        ("before\n{| class=\"a\"\n! h\n| ''x\nwords stay", "before\nwords stay"),
        ("a\n|}\nb", "a\nb"),
        ("!Kung people", "!Kung people"),
        ("[[File:x.jpg|thumb|a ''b [[c|d]] e]] f", "f"),
        ("an [[open link and [[a|b]] c", "an open link and b c"),
        ("a {{open {{done|1}} b", "a open b"),
        ("a }} b ]] c", "a b c"),
        ("__TOC__ a __NOTOC__", "a"),
        ("<blockquote>\n''quoted\n</blockquote>", "quoted"),
        ("a <!-- <ref> --> b <!-- open", "a b"),
        ("<nowiki><ref></nowiki> a", "a"),
        ("the tag &lt;ref&gt; is", "the tag <ref> is"),
        ("if a <b and c> d, i<j", "if a d, i<j"),
        ("x < y > z and 3<4", "x < y > z and 3<4"),
    ],
)
def test_broken_markup_is_removed_without_its_words(markup, text):
    assert text_of(markup) == text


@table(
    ("begin", "end"),
    [
        *(("<ref>", ""), ('<ref name="', ""), ("{{", ""), ("[[", ""), ("{|\n", ""), ("''", ""), ("<!--", "")),
        *(("<nowiki>", ""), ("[[a|", ""), ("{{a}}", ""), ("{|\n", "|}\n"), ("{|\n{|\n|}\n", "")),
    ],
)
def test_broken_markup_removal_takes_linear_time(begin, end):
    def seconds(count):
        began = time.process_time()
        remove_leftover_markup(remove_extension_tags(begin * count + end * count))
        return time.process_time() - began

    few = min(seconds(10_000) for _ in range(3))
    assert seconds(40_000) < 10 * few + 0.1


def test_nested_tables_are_removed_with_their_words():
    lines = ["a", "{|", "b", "{|", "c", "|} d", "e", "|} f", "g", "{|", "! h", "{|", "i", "|} j", "k"]
    assert remove_leftover_markup("\n".join(lines)) == "a\n f\ng\n j\nk"
