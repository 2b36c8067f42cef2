"""dynmo-prep: extract-wiki and fetch-urls, the latter from servers on the loopback."""

from __future__ import annotations

import bz2
import http.server
import itertools
import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dynmo_tools.extract.html import extract_text
from dynmo_tools.web.fetch_queue import Frontier, Request

LOOPBACK = ("--allow-host", "127.0.0.0/8")
PAGE = (
    "<html><head><title> A  page </title><script>no()</script></head><body><p>One &amp; two</p><div>three</div></body>"
)
DUMP = """<mediawiki><siteinfo><base>http://w.org/wiki/Main</base></siteinfo>
<page><title>Cats</title><ns>0</ns><id>5</id><revision><id>6</id><text>'''Cats''' purr.</text></revision></page>
<page><title>Talk:Cats</title><ns>1</ns><id>7</id><revision><id>8</id><text>Talk.</text></revision></page>
<page><title>Cat</title><ns>0</ns><id>9</id><redirect title="Cats"/>
<revision><id>1</id><text>#REDIRECT</text></revision></page>
<page><title>Void</title><ns>0</ns><id>10</id><revision><id>2</id><text>{{stub}}</text></revision></page>
</mediawiki>"""


class Site(http.server.BaseHTTPRequestHandler):
    """A small site that notes what it was asked."""

    robots = "User-agent: *\nDisallow: /private"

    def do_GET(self):
        self.server.robots_host.append((self.path, time.monotonic(), self.headers["User-Agent"]))
        kind, body, status = "text/html; charset=utf-8", PAGE, 200
        if self.path == "/robots.txt":
            kind, body = "text/plain", self.robots
        elif self.path == "/missing":
            status = 404
        elif self.path == "/image":
            kind = "image/png"
        elif self.path == "/long":
            body = "x" * 100_000
        elif self.path == "/bytes":
            kind, body = "text/plain; charset=ascii", "\xff" * (33 << 20)
        elif self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/page1")
            self.end_headers()
            return
        payload = body.encode("latin-1" if "ascii" in kind else "utf-8")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload) * (2 if self.path == "/cut" else 1)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.robots_host = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_fetch_urls_obeys_the_rules(prep, site, tmp_path):
    server, base = site
    paths = ["/page1", "/missing", "/image", "/long", "/private/x", "/moved", "/page1"]
    (tmp_path / "urls.txt").write_text(
        "".join(f"{base}{path}\n" for path in paths) + "ftp://a.b/c\nhttp://127.0.0.1:1/\n"
    )
    code, out, _ = prep(
        "fetch-urls", tmp_path / "urls.txt", "-o", tmp_path / "pages.jsonl", "--delay-s", 0.05, "--max-bytes", 50_000,
        "--user-agent", "tester", "--format", "json", *LOOPBACK,
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0
    assert report["failed"] == {"404": 1, "connection": 1, "long": 1, "robots": 1, "scheme": 1, "type image/png": 1}
    rows = [json.loads(line) for line in (tmp_path / "pages.jsonl").read_text().splitlines()]
    assert [row["url"] for row in rows] == [f"{base}/page1", f"{base}/moved"]
    assert rows[0] == {"url": f"{base}/page1", "title": "A page", "text": "One & two\nthree"}
    robots_host = [path for path, _, _ in server.robots_host]
    assert robots_host[0] == "/robots.txt"
    assert "/private/x" not in robots_host
    assert {agent for _, _, agent in server.robots_host} == {"tester"}
    own = [when for path, when, _ in server.robots_host if path != "/page1"]
    assert all(later - earlier >= 0.04 for earlier, later in itertools.pairwise(own))


def test_fetch_urls_reports_malformed_urls_and_fetches_others(prep, site, tmp_path):
    _, base = site
    bad = ["http://[::1", "ftp://a.b/x", "words alone", "http:///x", "http://127.0.0.1:abc/", "http://127.0.0.1:99999/"]
    lines = [*(line.encode() for line in bad), f"{base}/\xff".encode("latin-1"), f"{base}/a\0b".encode(), b"", b"  "]
    (tmp_path / "urls.txt").write_bytes(b"\n".join([*lines, f"{base}/page1?ä".encode(), f"{base}/cut".encode()]))
    code, out, err = prep(
        "fetch-urls",
        tmp_path / "urls.txt",
        "-o",
        tmp_path / "pages.jsonl",
        "--delay-s",
        0,
        "--format",
        "json",
        *LOOPBACK,
    )
    assert (code, "Traceback" in err) == (0, False)
    assert json.loads(out)["failed"] == {"connection": 1, "malformed": 6, "scheme": 2}
    rows = [json.loads(line) for line in (tmp_path / "pages.jsonl").read_text().splitlines()]
    assert [row["url"] for row in rows] == [f"{base}/page1?ä"]


def test_stopped_fetch_resumes_from_its_journal(prep, site, tmp_path):
    server, base = site
    (tmp_path / "urls.txt").write_text("".join(f"{base}/page{n}\n" for n in range(6)))
    target = ("fetch-urls", tmp_path / "urls.txt", "-o", tmp_path / "pages.jsonl", "--delay-s", 0, *LOOPBACK)
    assert prep(*target)[0] == 0
    whole = (tmp_path / "pages.jsonl").read_bytes()
    journal = tmp_path / "pages.jsonl.work" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    server.robots_host.clear()
    assert prep(*target)[0] == 0
    assert len([path for path, _, _ in server.robots_host if path != "/robots.txt"]) == 3
    assert (tmp_path / "pages.jsonl").read_bytes() == whole
    (tmp_path / "urls.txt").write_text(f"{base}/other\n")
    code, _, err = prep(*target)
    assert (code, "--overwrite" in err) == (2, True)


def test_edited_output_is_unchanged_and_overwrite_keeps_the_journal(prep, site, tmp_path):
    server, base = site
    urls, output = tmp_path / "urls.txt", tmp_path / "pages.jsonl"
    urls.write_text(f"{base}/page1\n")
    target = ("fetch-urls", urls, "-o", output, "--delay-s", 0, *LOOPBACK)
    assert prep(*target)[0] == 0
    whole = output.read_bytes()
    output.write_text("edited")
    server.robots_host.clear()
    code, _, err = prep(*target)
    assert (code, "already exists; use --overwrite to replace it" in err, output.read_text()) == (2, True, "edited")
    assert prep(*target, "--overwrite")[0] == 0
    assert (output.read_bytes(), server.robots_host) == (whole, [])
    urls.write_text(f"{base}/page2\n")
    assert prep(*target)[0] == 2
    assert prep(*target, "--overwrite")[0] == 0
    assert [path for path, _, _ in server.robots_host] == ["/robots.txt", "/page2"]


@pytest.mark.complete
def test_journal_has_pages_above_64_mib(prep, site, tmp_path):
    """More than 64 MiB in the journal: each byte of Latin-1 takes two bytes there."""
    _, base = site
    (tmp_path / "urls.txt").write_text(f"{base}/bytes\n")
    code, _, err = prep(
        "fetch-urls", tmp_path / "urls.txt", "-o", tmp_path / "p", "--delay-s", 0, "--max-bytes", 1 << 27, *LOOPBACK
    )
    assert (code, "Traceback" in err) == (0, False), err
    assert (tmp_path / "p").stat().st_size > 64 << 20


def test_missing_robots_allows_all_and_failing_robots_nothing(prep, site, tmp_path, monkeypatch):
    _, base = site
    (tmp_path / "urls.txt").write_text(f"{base}/private/x\n")
    code, out, _ = prep(
        "fetch-urls", tmp_path / "urls.txt", "-o", tmp_path / "p", "--delay-s", 0, "--no-robots", *LOOPBACK
    )
    assert "1 pages" in out
    monkeypatch.setattr(Site, "robots", "")
    code, out, _ = prep("fetch-urls", tmp_path / "urls.txt", "-o", tmp_path / "q", "--delay-s", 0, *LOOPBACK)
    assert (code, "1 pages" in out) == (0, True)


PEAK = """
import pathlib, sys
from dynmo_tools import cli
from dynmo_tools._common import console
console.print_message("imports what a progress line needs, which only the longer run may print")
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code
lines = pathlib.Path("/proc/self/status").read_text().splitlines()  # getrusage would count the tests' own memory
sys.stderr.write("peak " + next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.complete
def test_fetch_memory_does_not_grow_with_the_url_list(site, tmp_path):
    server, base = site
    peaks = []
    for count in (100, 100_000):
        lines = [f"{base}/page1", *(f"{base}/private/of-a-long-list-{n}" for n in range(count)), f"{base}/page2"]
        (tmp_path / "urls.txt").write_text("\n".join(lines))
        command = [sys.executable, "-c", PEAK, "fetch-urls", tmp_path / "urls.txt", "-o", tmp_path / f"{count}.jsonl"]
        ran = subprocess.run(
            [*command, "--delay-s", "0", "--format", "json", *LOOPBACK], capture_output=True, text=True, check=True
        )
        assert json.loads(ran.stdout)["failed"] == {"robots": count}
        assert (tmp_path / f"{count}.jsonl").read_text().count("\n") == 2
        peaks.append(int(ran.stderr.rpartition("peak ")[2]) / 1024)
    assert len(server.robots_host) == 6
    assert peaks[1] < peaks[0] + 8, peaks


def test_frontier_returns_urls_of_available_hosts(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("dynmo_tools.web.fetch_queue.time", SimpleNamespace(monotonic=lambda: clock[0]))
    urls = ["http://a/1", "http://a/2", "http://b/1", "not a url", "http://a/3"]
    frontier = Frontier(itertools.starmap(Request, enumerate(urls)), window=4, hosts=2)
    request, host = frontier.take()
    assert request == (0, "http://a/1", 0)
    request, other = frontier.take()
    assert request == (2, "http://b/1", 0)  # a is busy
    other.free_at, host.free_at = 120.0, 110.0
    frontier.release(host)
    frontier.release(other)
    waited = []

    def wait(seconds):
        waited.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(frontier.changed, "wait", wait)
    found = frontier.take()
    assert (found[0].url, waited) == ("http://a/2", [10.0])
    # in the room of b, which may be forgotten when its delay is over
    assert (frontier.take()[0].url, waited) == ("not a url", [10.0, 10.0])
    frontier.release(found[1])
    assert frontier.take()[0].url == "http://a/3"
    assert frontier.take() is None


def test_frontier_window_and_hosts_are_bounded():
    read = itertools.count()
    urls = (Request(next(read), f"http://host{n % 500}/{n}") for n in range(5000))
    frontier = Frontier(urls, window=64, hosts=3)
    given = []
    while (found := frontier.take()) is not None:
        given.append(found[0].number)
        assert next(read) <= 2 * len(given) + 66  # this count itself reads one a turn
        assert len(frontier.active_hosts) <= 3
        frontier.release(found[1])
    assert len(given) == 5000


@pytest.mark.parametrize(
    ("html", "title", "text"),
    [
        ("plain", "", "plain"),
        ("<title>T</title><body>a<br>b <i>c</i>", "T", "a\nb c"),
        ("<body><nav>menu</nav><p>x<script>y</script>z", "", "xz"),
        ("<p>&lt;tag&gt; &eacute;</p>", "", "<tag> é"),
    ],
)
def test_extract_text_returns_title_and_text(html, title, text):
    assert extract_text(html) == (title, text)


@pytest.mark.parametrize("ending", ["", ".bz2"])
def test_dump_in_several_tasks_is_equal_for_any_workers(prep, tmp_path, ending):
    source = tmp_path / f"dump.xml{ending}"
    payload = DUMP.encode()
    streams = (bz2.compress(payload[at : at + 90]) for at in range(0, len(payload), 90))
    source.write_bytes(b"".join(streams) if ending else payload)
    outputs = []
    for workers, task_bytes in ((1, 1 << 20), (1, 150), (2, 150)):
        output = tmp_path / f"{workers}-{task_bytes}.jsonl"
        assert prep("extract-wiki", source, "-o", output, "--workers", workers, "--task-bytes", task_bytes)[0] == 0
        outputs.append(output.read_bytes())
    assert outputs[0] == outputs[1] == outputs[2] != b""
    assert len(json.loads((tmp_path / "2-150.jsonl.work" / "manifest.json").read_text())["tasks"]) > 2


def test_extract_wiki_writes_documents(prep, tmp_path):
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(DUMP.encode()))
    code, out, _ = prep("extract-wiki", tmp_path / "dump.xml.bz2", "-o", tmp_path / "wiki.jsonl")
    assert code == 0
    assert "4 documents in" in out
    assert "3 dropped (1 empty, 1 namespace, 1 redirect)" in out
    assert json.loads((tmp_path / "wiki.jsonl").read_text()) == {
        "id": "5", "revid": "6", "url": "http://w.org/wiki?curid=5", "title": "Cats", "text": "Cats purr.",
    }  # fmt: skip
    (tmp_path / "cut.xml.bz2").write_bytes(bz2.compress(DUMP.encode())[:-20])
    code, _, err = prep("extract-wiki", tmp_path / "cut.xml.bz2", "-o", tmp_path / "cut.jsonl")
    assert (code, "truncated, or not MediaWiki XML" in err) == (1, True)
