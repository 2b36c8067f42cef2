"""Text of markup: fixed cases, and comparison with a plain walk over the parser's node tree."""

# ruff: noqa: RUF001, E501 - text of other scripts
from __future__ import annotations

import random
import re
import time

import pytest

from dynmo_tools.extract import wikitext
from dynmo_tools.extract.broken_markup import remove_extension_tags, remove_leftover_markup
from dynmo_tools.extract.wiki_names import LinkKind, WikiNames, convert_variants
from dynmo_tools.extract.wiki_templates import template_text
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
        # A colon in a title, other namespaces and other projects are text.
        (
            "[[Re:Zero]], [[Halo: Reach]], [[wikt:foo|the word]], [[WP:NPOV|neutral]], [[Help:Links]], [[:de:Y]], [[A:]]",
            "Re:Zero, Halo: Reach, the word, neutral, Help:Links, de:Y, A:",
        ),
        ("a [[zh-min-nan:B]][[simple:C|d]][[ category : E ]][[IMAGE:f]][[Foo:g.SVG|thumb|h]] [[Media:i.ogg|j]]", "a j"),
        (
            "one<p>two</p>three<div>four</div><hr>five<blockquote>six</blockquote>seven<br/>eight",
            "one\ntwo\nthree\nfour\nfive\nsix\nseven\neight",
        ),
        ("a<ul><li>b</li><li>c</li></ul>d <span>e</span>f<P class=x>g", "a\nd ef\ng"),
        (
            "<nowiki>[[x]] {{y}} ''z'' &amp; &lt;ref> __TOC__\n* -{a}- http://b.c</nowiki>",
            "[[x]] {{y}} ''z'' & <ref> __TOC__\n* -{a}- http://b.c",
        ),
        ("a<pre>\nif x:\n[[y]]</pre>b <nowiki/>c <nowiki>open &#91;&#91;d", "a\nif x:\n[[y]]\nb c open [[d"),
        ("&amp;lt; &amp;amp; &#123;&#123;x", "&lt; &amp; {{x"),
        ("mass <math>x</math> and <ce>Na+</ce>, <math chem>y", "mass formula_1 and formula_2, y"),
        (
            "the {{unknown|a}}, {{Other}} (see {{x}}) word{{note}}. {{y}}\n{{box}}\n{{z}} text",
            "the template_1, (see) word.\ntext",
        ),
        (
            "is {{val|5}} {{nihongo|tea|茶|cha}} {{template:circa|900}} {{frac|1|2}} {{chem|H|2|O}} {{!}} {{As of|2015}}",
            "is 5 tea c. 900 1/2 H2O | As of 2015",
        ),
        ("-{a;b}- stays in -{R|c}- English", "a;b stays in c English"),
        (
            "題（{{lang|ja}}、{{lang|ja|だい}}）は\n== 歴史 ==\n文。\n== 何？ ==\n文__目次非表示__。",
            "題（だい）は\n歴史。\n文。\n何？\n文。",
        ),
        ("A&nbsp;b &amp; c &mdash; d", "A b & c \u2014 d"),
        ("== Empty ==\n== Full ==\ntext\n=== Why? ===\nmore", "Full.\ntext\nWhy?\nmore"),
        ("Intro\n* one\n* two\n# three\nend", "Intro\nend"),
        ("[http://a.b label] and [http://a.b]", "label and"),
        ("Greek ({{lang|el|abc}}) and ({{lang-fr}}; ) end {{convert|5|km}}", "Greek (abc) and end 5 km"),
        ("<!-- hidden -->seen __NOTOC__", "seen"),
        ("x < y and {{unclosed", "x < y and unclosed"),
    ],
)
def test_text_of_converts_markup_to_text(markup, text):
    assert text_of(markup) == text


@table(
    ("language", "stated", "markup", "text"),
    [
        ("ru", {6: ["Файл"], 14: ["Категория"]}, "[[Файл:a|мини|б]][[изображение:в]]Да.\n[[категория:Г]]", "Да."),
        ("tlh", {6: ["Doch"], 14: ["Segh"]}, "[[doch:a|b]]HIja'.\n[[Segh:c]][[:Segh:d]] [[Bild:e]]", "HIja'.\nSegh:d Bild:e"),
        ("", {}, "[[Bild:a|b]][[文件:c]]x[[تصنيف:d]]", "x"),
        ("ar", {}, "نعم [[\u200fملف:a.jpg|تصغير]][[تصنيف:ب]][[عصام: فيلم]]", "نعم عصام: فيلم"),
        ("vi", {}, "Có. [[Tập_tin:a.png|b]][[Thể  loại:c]]", "Có."),
        ("en", {}, "It is -{zh-hans:a}- [[en:B]]", "It is -{zh-hans:a}- en:B"),
        ("zh", {}, "-{zh-hans:计算机;zh-hant:電腦}-是-{机器}-，-{zh-cn:a&nbsp;b; zh-tw:c;}--{T|zh:d}--{zh-tw;zh-hk|e}-", "计算机是机器，a be"),
        ("zh", {}, "-{H|a=>zh-cn:b;}--{A|zh-tw:[[x|乙]];zh-cn:丙}-<nowiki>-{R|d}-</nowiki>-{zh:戊-{己}-}-", "乙-{R|d}-戊己"),
        ("sr", {}, "-{Linux}- je -{sr-ec:систем; sr-el:sistem}-", "Linux je систем"),
    ],
)  # fmt: skip
def test_links_and_variants_follow_the_language_of_the_wiki(language, stated, markup, text):
    assert text_of(markup, names=WikiNames.of(language, stated)) == text


def test_text_of_with_keep_lists_keeps_list_items():
    assert text_of("Intro\n* one\n* [[two]]\nend", keep_lists=True) == "Intro\n- one\n- two\nend"


def of_tag(node, nodes):
    name = str(node.tag).strip().lower()
    if name in ("li", "dt", "dd") and node.wiki_markup:
        return wikitext.LIST_MARK
    if name in wikitext.DROPPED_TAGS:
        return ""
    if name in wikitext.FORMULA_TAGS:
        return wikitext.FORMULA_MARK
    text = walk(node.contents, nodes) if node.contents is not None else ""
    if name == "li":
        return f"\n{wikitext.LIST_MARK}{text.strip()}\n"
    return f"\n{text}\n" if name in wikitext.BLOCKS else text


def of_template(node, nodes):
    values = [walk(param.value, nodes) for param in node.params if not param.showkey]
    text = template_text(wikitext.ANY_WIKI.template_name(str(node.name)), values)
    if text is not None:
        return text
    texts = (line for part in node.__children__() for line in part.filter_text(recursive=True))
    return "" if any("\n" in str(line) for line in texts) else wikitext.TEMPLATE_MARK


def of_link(node, nodes):
    title = str(node.title).strip()
    if not title.startswith(":") and wikitext.ANY_WIKI.link_kind(title) is not LinkKind.TEXT:
        return ""
    return title.removeprefix(":") if node.text is None else walk(node.text, nodes)


def of_entity(node, _):
    return node.normalize().translate(wikitext.LITERAL_MARKS)


def walk(code, nodes):
    """As ``text_of`` before tidying, over the tree of nodes that mwparserfromhell builds."""
    readers = {
        nodes.Text: lambda node, _: str(node.value),
        nodes.Wikilink: of_link,
        nodes.Tag: of_tag,
        nodes.Template: of_template,
        nodes.Heading: lambda node, nodes: f"\n{wikitext.TITLE_MARK}{walk(node.title, nodes).strip()}\n",
        nodes.HTMLEntity: of_entity,
        nodes.ExternalLink: lambda node, nodes: "" if node.title is None else walk(node.title, nodes),
    }
    return "".join(readers[type(node)](node, nodes) for node in code.nodes if type(node) in readers)


def by_tree(markup):
    library = pytest.importorskip("mwparserfromhell")
    tree = library.parse(convert_variants(remove_extension_tags(markup), ""), skip_style_tags=False)
    return tidy(remove_leftover_markup(walk(tree, library.nodes), wikitext.ANY_WIKI), keep_lists=True)


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
        ("mass <math>a < b '' {{x</math> and <chem>H2O</chem>.", "mass formula_1 and formula_2."),
        ("so<ref>x</ref>\n; not a list", "so"),
        ("<ref>x</ref>; not a list", "; not a list"),
        ("The ''Iliad''' was", "The Iliad' was"),
        ("The Iliad'''s end", "The Iliad's end"),
        ("before\n{| class=\"a\"\n|-\n| ''x\n{|\n| inner\n|}\n|}\nafter", "before\nafter"),
        ("before\n{| class=\"a\"\n! h\n| ''x\nwords stay", "before\nwords stay"),
        ("a\n|}\nb", "a\nb"),
        ("!Kung people", "!Kung people"),
        ("[[File:x.jpg|thumb|a ''b [[c|d]] e]] f", "f"),
        ("an [[open link and [[a|b]] c", "an open link and b c"),
        ("a {{open {{cite|1}} b", "a open b"),
        ("a }} b ]] c", "a b c"),
        ("__TOC__ a __NOTOC__", "a"),
        ("<blockquote>\n''quoted\n</blockquote>", "quoted"),
        ("a <!-- <ref> --> b <!-- open", "a b"),
        ("<nowiki><ref></nowiki> a", "<ref> a"),
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
        *(("-{", ""), ("-{a;", "}-"), ("-{H|", ""), ("<p>", "")),
    ],
)
def test_broken_markup_removal_takes_linear_time(begin, end):
    def seconds(count):
        began = time.process_time()
        text = convert_variants(remove_extension_tags(begin * count + end * count), "")
        remove_leftover_markup(text, wikitext.ANY_WIKI)
        return time.process_time() - began

    few = min(seconds(10_000) for _ in range(3))
    assert seconds(40_000) < 10 * few + 0.1


def test_nested_tables_are_removed_with_their_words():
    lines = ["a", "{|", "b", "{|", "c", "|} d", "e", "|} f", "g", "{|", "! h", "{|", "i", "|} j", "k"]
    assert remove_leftover_markup("\n".join(lines), wikitext.ANY_WIKI) == "a\n f\ng\n j\nk"
