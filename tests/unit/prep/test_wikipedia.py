from __future__ import annotations

import bz2
import io
from xml.etree import ElementTree

import pytest

from dynmo_tools.wikipedia import Page, read_pages, text_of

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<siteinfo><base>https://en.wikipedia.org/wiki/Main_Page</base></siteinfo>
<page><title>A</title><ns>0</ns><id>12</id>
<revision><id>99</id><text>Some &lt;b&gt;text&lt;/b&gt;.</text></revision></page>
<page><title>B</title><ns>0</ns><id>13</id><redirect title="A"/>
<revision><id>98</id><text>#REDIRECT [[A]]</text></revision></page>
</mediawiki>"""


@pytest.mark.parametrize(
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
        ("x < y and {{unclosed", "x < y and {{unclosed"),
    ],
)
def test_markup_becomes_text(markup, text):
    assert text_of(markup) == text


def test_lists_can_be_kept():
    assert text_of("Intro\n* one\n* [[two]]\nend", keep_lists=True) == "Intro\n- one\n- two\nend"


def test_pages_are_read_one_by_one():
    base, first, second = read_pages(io.BytesIO(DUMP.encode()))
    assert base == "https://en.wikipedia.org/wiki"
    assert first == Page(
        number="12", revision="99", title="A", namespace="0", redirect=False, markup="Some <b>text</b>."
    )
    assert second.redirect


def test_a_cut_dump_is_an_error():
    with pytest.raises(ElementTree.ParseError):
        list(read_pages(io.BytesIO(DUMP[:-60].encode())))


@pytest.mark.data
def test_a_real_dump_has_no_markup_left(shared_data):
    path = next((shared_data / "wiki").glob("enwiki-latest*.bz2"))
    with bz2.open(path) as handle:
        pages = [page for page in read_pages(handle) if isinstance(page, Page) and not page.redirect][:12]
    texts = [text_of(page.markup) for page in pages]
    assert len(texts) == 12
    for text in texts:
        assert len(text) > 500
        assert text.count("{{") + text.count("[[") + text.count("<ref") + text.count("'''") < 3
