from __future__ import annotations

import bz2
from xml.etree import ElementTree

import pytest

from dynmo_tools.io import mediawiki_dump
from dynmo_tools.io.jsonl import Slice
from dynmo_tools.io.mediawiki_dump import Page, Site, read_pages, read_site
from dynmo_tools.runner.task_manifest import Source, cut

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<siteinfo><base>https://en.wikipedia.org/wiki/Main_Page</base><namespaces><namespace key="-2" case="x">M</namespace>
<namespace key="0" case="x" /><namespace case="x" key="6">A &amp; B</namespace></namespaces></siteinfo>
<page><title>A</title><ns>0</ns><id>12</id>
<revision><id>99</id><text>Some &lt;b&gt;text&lt;/b&gt;.</text></revision></page>
<page><title>B</title><ns>0</ns><id>13</id><redirect title="A"/>
<revision><id>98</id><text>#REDIRECT [[A]]</text></revision></page>
</mediawiki>"""


def dump(tmp_path, text=DUMP):
    path = tmp_path / "dump.xml"
    path.write_text(text)
    return path


def test_read_pages_yields_each_page(tmp_path):
    path = dump(tmp_path)
    site = Site(base="https://en.wikipedia.org/wiki", language="en", namespaces={-2: ["M"], 6: ["A & B"]})
    assert read_site(path) == site
    names = {"<base>": "<dbname>be_x_oldwiki</dbname><base>", "<mediawiki xmlns": '<mediawiki xml:lang="pt-BR" xmlns'}
    languages = [read_site(dump(tmp_path, DUMP.replace(*name))).language for name in names.items()]
    assert languages == ["be-x-old", "pt-br"]
    path = dump(tmp_path)
    first, second = read_pages(Slice(path=path))
    assert first == Page(
        number="12", revision="99", title="A", namespace="0", redirect=False, markup="Some <b>text</b>."
    )
    assert second.redirect


@pytest.mark.parametrize("left", [3, 60])
def test_read_pages_of_a_truncated_dump_raises(tmp_path, left):
    with pytest.raises(EOFError):
        list(read_pages(Slice(path=dump(tmp_path, DUMP[:-left]))))


def test_read_site_of_another_format_raises(tmp_path):
    with pytest.raises(ElementTree.ParseError):
        read_site(dump(tmp_path, "<feed></feed>"))


@pytest.mark.parametrize("piece_bytes", [7, 64, 1 << 20])
def test_any_slices_of_a_plain_dump_have_each_page_once(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(mediawiki_dump, "PIECE_BYTES", piece_bytes)
    path = dump(tmp_path)
    whole = list(read_pages(Slice(path=path)))
    for task_bytes in range(1, len(DUMP), 13):
        parts = cut(Source.of(path), task_bytes)
        assert [page for part in parts for page in read_pages(part)] == whole


@pytest.mark.parametrize("piece_bytes", [7, 1 << 20])
def test_bzip2_streams_that_split_pages_are_read_independently(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(mediawiki_dump, "PIECE_BYTES", piece_bytes)
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


def test_read_pages_of_a_partial_first_word_raises(tmp_path):
    with pytest.raises(EOFError, match="without </mediawiki>"):
        list(read_pages(Slice(path=dump(tmp_path, "<mediawiki"))))
