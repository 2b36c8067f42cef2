from __future__ import annotations

import bz2
from xml.etree import ElementTree

import pytest

from dynmo_tools import dumps
from dynmo_tools.dumps import Page, read_base, read_pages
from dynmo_tools.plan import Source, cut
from dynmo_tools.records import Slice
from dynmo_tools.wikipedia import text_of

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


def dump(tmp_path, text=DUMP):
    path = tmp_path / "dump.xml"
    path.write_text(text)
    return path


def test_pages_are_read_one_by_one(tmp_path):
    path = dump(tmp_path)
    assert read_base(path) == "https://en.wikipedia.org/wiki"
    first, second = read_pages(Slice(path=path))
    assert first == Page(
        number="12", revision="99", title="A", namespace="0", redirect=False, markup="Some <b>text</b>."
    )
    assert second.redirect


@pytest.mark.parametrize("left", [3, 60])
def test_a_cut_dump_is_an_error(tmp_path, left):
    with pytest.raises(EOFError):
        list(read_pages(Slice(path=dump(tmp_path, DUMP[:-left]))))


def test_what_is_no_dump_is_an_error(tmp_path):
    with pytest.raises(ElementTree.ParseError):
        read_base(dump(tmp_path, "<feed></feed>"))


@pytest.mark.parametrize("piece_bytes", [7, 64, 1 << 20])
def test_any_cutting_of_a_plain_dump_gives_each_page_once(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(dumps, "PIECE_BYTES", piece_bytes)
    path = dump(tmp_path)
    whole = list(read_pages(Slice(path=path)))
    for task_bytes in range(1, len(DUMP), 13):
        parts = cut(Source.of(path), task_bytes)
        assert [page for part in parts for page in read_pages(part)] == whole


@pytest.mark.parametrize("piece_bytes", [7, 1 << 20])
def test_streams_of_a_bzip2_dump_are_read_apart_wherever_they_cut_pages(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(dumps, "PIECE_BYTES", piece_bytes)
    path = tmp_path / "dump.xml.bz2"
    payload = DUMP.encode()
    for each in (9, 31, 150, 1000):
        path.write_bytes(b"".join(bz2.compress(payload[at : at + each]) for at in range(0, len(payload), each)))
        for task_bytes in (1, 100, 300):
            parts = cut(Source.of(path), task_bytes)
            assert len(parts) > 1 or task_bytes > 1 or each == 1000
            pages = [page for part in parts for page in read_pages(part)]
            assert [page.number for page in pages] == ["12", "13"]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(EOFError):
        list(read_pages(Slice(path=path, begin=0, end=5)))


@pytest.mark.data
def test_a_real_dump_has_no_markup_left(shared_data):
    path = next((shared_data / "wiki").glob("enwiki-latest*.bz2"))
    pages = [page for page in read_pages(Slice(path=path)) if not page.redirect][:12]
    texts = [text_of(page.markup) for page in pages]
    assert len(texts) == 12
    for text in texts:
        assert len(text) > 500
        assert text.count("{{") + text.count("[[") + text.count("<ref") + text.count("'''") < 3
