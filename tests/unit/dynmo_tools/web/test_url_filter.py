from __future__ import annotations

import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.web.url_filter import (
    DropReasonStore,
    built_in_list,
    domain_label,
    drop_reason,
    filter_urls,
    write_urls,
)
from tests.tables import table

DOMAINS, ENDINGS = built_in_list("blocked_domains"), tuple(sorted(built_in_list("blocked_endings")))


@table(
    ("url", "reason"),
    [
        ("https://www.amazon.co.uk/thing", "domain"),
        ("https://notamazon.com/thing", None),
        ("http://user.github.io/page", "domain"),
        ("http://site.org/a.PNG?x=1", "ending"),
        ("http://site.org/a.png#part", "ending"),
        ("http://site.org/a.7z", "ending"),
        ("http://site.org/a.ai", "ending"),
        ("http://a.b", "malformed"),
        ("http://a.bc", None),
        ("htp://ab", "short"),
        ("ftp://site.org/page", "malformed"),
        ("http://site.org/a b", "malformed"),
        ("http://127.0.0.1:80/x", None),
        ("http://[::1", "malformed"),
        ("http://site.org:abc/x", "malformed"),
        ("http://us er@site.org/", "malformed"),
        ("http://site.org/a\x00b", "malformed"),
        ("http://site.org/\ufffd", "malformed"),
        ("http://" + "a" * 300 + ".org/x", "malformed"),
        ("just some words", "malformed"),
        ("http://site.org/ä", None),
        ("https://site.org", None),
    ],
)
def test_drop_reason_is_the_first_matching_rule(url, reason):
    assert drop_reason(url, DOMAINS, ENDINGS) == reason


@pytest.mark.parametrize(
    ("host", "label"),
    [
        ("www.amazon.co.uk", "amazon"),
        ("a.github.io", "github"),
        ("1.2.3.4", "1.2.3.4"),
        ("localhost", "localhost"),
        ("", ""),
    ],
)
def test_domain_label_is_the_registered_label(host, label):
    assert domain_label(host) == label


def test_write_urls_keeps_order_and_drops_duplicates(tmp_path):
    source, output, dropped = (tmp_path / name for name in ("in.txt", "out.txt", "dropped.txt.gz"))
    source.write_text("http://b.org/1\n\n http://a.org/2 \nhttp://b.org/1\nhttp://a.org/x.jpg\n")
    counts = write_urls(
        [source], output, domains=DOMAINS, endings=frozenset(ENDINGS), tick=lambda size: None, dropped=dropped
    )
    assert output.read_text() == "http://b.org/1\nhttp://a.org/2\n"
    assert (counts.urls_in, counts.urls_out) == (4, 2)
    assert {reason: n for reason, n in counts.dropped.items() if n} == {"duplicate": 1, "ending": 1}
    import gzip

    assert gzip.decompress(dropped.read_bytes()) == b"duplicate\thttp://b.org/1\nending\thttp://a.org/x.jpg\n"


def test_duplicate_urls_are_found_in_all_buckets(tmp_path):
    urls = [f"http://site.org/{n * 7919 % 3000}" for n in range(9000)]
    with DropReasonStore(tmp_path) as store:
        for number, url in enumerate(urls):
            store.add(url, "short" if number % 11 == 0 else None)
        store.mark_duplicates()
        found = list(store)
    known = set()
    for number, (url, reason) in enumerate(zip(urls, found, strict=True)):
        assert reason == ("short" if number % 11 == 0 else "duplicate" if url in known else None)
        if number % 11:
            known.add(url)
    assert not list(tmp_path.iterdir())


def test_filter_urls_refuses_inputs_that_change(tmp_path):
    source = tmp_path / "in.txt"

    def shorten(size):
        source.write_text("")

    source.write_text("http://b.org/1\n" * 5)
    with pytest.raises(UsageError, match="changed between the two passes"):
        list(filter_urls([source], DOMAINS, frozenset(ENDINGS), shorten, tmp_path))
