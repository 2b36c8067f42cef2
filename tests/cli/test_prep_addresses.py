"""fetch-urls: which addresses it connects to, and what it follows."""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import itertools
import json
import socket
import threading
import time

import pytest

from dynmo_tools import cli
from dynmo_tools.web import http_client
from dynmo_tools.web.http_client import AllowedHosts, FetchError, get, is_public, sendable, without_credentials
from tests.tables import table

PAGE = b"<html><title>Page</title><body>Text of the page</body></html>"


@pytest.fixture
def fetch(monkeypatch, capsys, tmp_path):
    """Fetch URLs in this process: (report, rows of the output, bytes of everything that was written)."""

    def run(*urls, allow=(), options=()):
        (tmp_path / "urls.txt").write_text("".join(f"{url}\n" for url in urls))
        arguments = ["fetch-urls", tmp_path / "urls.txt", "-o", tmp_path / "pages.jsonl", "--delay-s", 0, "--overwrite"]
        hosts = [word for host in allow for word in ("--allow-host", host)]
        line = ["dynmo-prep", *map(str, arguments), *hosts, *options, "--format", "json"]
        monkeypatch.setattr("sys.argv", line)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        assert not stop.value.code, captured.err
        rows = [json.loads(line) for line in (tmp_path / "pages.jsonl").read_text().splitlines()]
        written = captured.out + captured.err
        for path in (tmp_path / "pages.jsonl", tmp_path / "pages.jsonl.work" / "journal.jsonl"):
            written += path.read_text()
        return json.loads(captured.out), rows, written

    return run


@contextlib.contextmanager
def serve(address, redirects=(), robots="", failure=0):
    """A site that redirects some paths: (its URL, what it was asked as (path, time, header fields))."""
    robots_host = []
    moved = dict(redirects)

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            robots_host.append((self.path, time.monotonic(), dict(self.headers)))
            target = moved.get(self.path)
            payload = robots.encode() if self.path == "/robots.txt" else PAGE
            self.send_response(302 if target else failure if failure and self.path == "/robots.txt" else 200)
            if target:
                self.send_header("Location", target)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer((address, 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://{address}:{server.server_port}", robots_host
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


INTERNAL = (
    "127.0.0.1", "127.9.9.9", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "239.255.255.250", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1",
    "fc00::1", "fd12:3456::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1", "2001:0:7f00:1::1",
)  # fmt: skip
PUBLIC = ("8.8.8.8", "93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1")


@table("address", INTERNAL)
def test_is_public_of_an_internal_address_is_false(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_is_public_of_a_public_address_is_true(address):
    assert is_public(ipaddress.ip_address(address))


def test_allowed_hosts_take_networks_addresses_and_names():
    allowed = AllowedHosts.parse(["10.0.0.0/8", "[::1]", "Intranet.example."])
    assert allowed.allows("anything", "10.3.4.5")
    assert allowed.allows("anything", "::ffff:10.3.4.5")
    assert allowed.allows("anything", "::1")
    assert allowed.allows("intranet.example", "192.168.0.9")
    assert not allowed.allows("anything", "192.168.0.9")
    assert not allowed.allows("anything", "fe80::1%eth0")
    with pytest.raises(http_client.UsageError, match="or a host name"):
        AllowedHosts.parse(["10.0.0.0/99"])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "0"])
def test_internal_host_in_any_spelling_is_refused(fetch, host):
    with serve("127.0.0.1") as (base, robots_host):
        report, rows, _ = fetch(f"http://{host}:{base.rpartition(':')[2]}/secret")
    assert (report["failed"], rows, robots_host) == ({"internal address": 1}, [], [])


def test_redirect_to_an_internal_address_is_refused(fetch):
    with serve("127.0.0.1") as (inner, robots_host), serve("127.0.0.2", {"/go": f"{inner}/secret"}) as (outer, _):
        report, rows, _ = fetch(f"{outer}/go", f"{outer}/page", allow=["127.0.0.2"])
    assert (report["failed"], len(rows), robots_host) == ({"internal address": 1}, 1, [])


def test_robots_redirect_to_an_internal_address_is_refused(fetch):
    with (
        serve("127.0.0.1") as (inner, robots_host),
        serve("127.0.0.2", {"/robots.txt": f"{inner}/secret"}) as (outer, _),
    ):
        report, rows, _ = fetch(f"{outer}/page", allow=["127.0.0.2"])
    assert (report["failed"], rows, robots_host) == ({"internal address": 1}, [], [])


def test_connection_uses_the_checked_address(monkeypatch):
    answers = itertools.chain(["8.8.8.8"], itertools.repeat("127.0.0.1"))
    connected = []

    class Socket:
        def __init__(self, *kind):
            self.kind = kind

        def settimeout(self, seconds):
            pass

        def connect(self, address):
            connected.append(address)
            raise ConnectionRefusedError

        def close(self):
            pass

    def resolve(host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(http_client.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(http_client.socket, "socket", Socket)
    settings = {"user_agent": "a", "timeout_s": 1.0, "limit": 1, "allowed": AllowedHosts()}
    for scheme, port in (("http", 80), ("https", 443)):
        answers = itertools.chain(["8.8.8.8"], itertools.repeat("127.0.0.1"))
        with pytest.raises(FetchError, match="connection"):
            get(f"{scheme}://rebinds.example/", **settings)
        assert connected.pop() == ("8.8.8.8", port)
        with pytest.raises(FetchError, match="internal address"):
            get(f"{scheme}://rebinds.example/", **settings)
        assert connected == []


def test_redirect_obeys_robots_of_its_target(fetch):
    rules = "User-agent: *\nDisallow: /private"
    with serve("127.0.0.1", robots=rules) as (target, robots_host):
        moves = {"/a": f"{target}/private/x", "/b": f"{target}/open", "/c": "/c"}
        with serve("127.0.0.2", moves) as (first, _):
            report, rows, _ = fetch(f"{first}/a", f"{first}/b", f"{first}/c", allow=["127.0.0.0/8"])
    assert report["failed"] == {"redirects": 1, "robots": 1}
    assert [row["url"] for row in rows] == [f"{first}/b"]
    assert [path for path, _, _ in robots_host] == ["/robots.txt", "/open"]


def test_redirect_waits_for_the_delay_of_its_target(fetch):
    with serve("127.0.0.1") as (target, robots_host):
        moves = {f"/{n}": f"{target}/page{n}" for n in range(4)}
        with serve("127.0.0.2", moves) as (first, _), serve("127.0.0.3", moves) as (second, _):
            urls = [f"{site}/{n}" for n in range(4) for site in (first, second)]
            report, _, _ = fetch(*urls, f"{target}/own", allow=["127.0.0.0/8"], options=["--delay-s", "0.1"])
    assert report["pages"] == 9
    times = [when for _, when, _ in robots_host]
    assert len(times) == 10
    assert all(later - earlier >= 0.09 for earlier, later in itertools.pairwise(times))


def test_credentials_of_a_url_are_neither_sent_nor_written(fetch):
    with serve("127.0.0.1") as (base, robots_host):
        url = f"{base}/page?mail=a@b.c".replace("://", "://user:hidden@")
        report, rows, written = fetch(url, allow=["127.0.0.1"])
    assert (report["pages"], rows[0]["url"]) == (1, f"{base}/page?mail=a@b.c")
    assert "hidden" not in written
    assert all("Authorization" not in headers for _, _, headers in robots_host)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://u:p@h/a@b", "http://h/a@b"),
        ("http://h/a@b", "http://h/a@b"),
        ("http://u@h?x=@", "http://h?x=@"),
        ("http://a@b@h", "http://h"),
    ],
)
def test_without_credentials_keeps_the_rest_of_a_url(url, expected):
    assert without_credentials(url) == expected


def test_sendable_drops_credentials_and_keeps_an_ipv6_host():
    assert sendable("http://u:p@[::1]:80/a b".replace(" ", "%20")) == "http://[::1]:80/a%20b"


def test_host_that_refuses_connections_fails_with_connection(fetch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        report, _, _ = fetch(f"http://127.0.0.1:{taken.getsockname()[1]}/", allow=["127.0.0.1"])
    assert report["failed"] == {"connection": 1}


def test_robots_that_fails_forbids_the_host(fetch):
    with serve("127.0.0.1", failure=503) as (base, robots_host):
        report, _, _ = fetch(f"{base}/a", f"{base}/b", allow=["127.0.0.1"])
    assert report["failed"] == {"robots 503": 2}
    assert [path for path, _, _ in robots_host] == ["/robots.txt"]


def test_robots_redirect_is_followed(fetch):
    with serve("127.0.0.1", {"/robots.txt": "/rules/robots.txt"}) as (base, robots_host):
        report, _, _ = fetch(f"{base}/a", allow=["127.0.0.1"])
    assert report["pages"] == 1
    assert [path for path, _, _ in robots_host] == ["/robots.txt", "/rules/robots.txt", "/a"]


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/café", "/caf%C3%A9"),
        ("/Д?q=Д", "/%D0%94?q=%D0%94"),
        ("/a b", "/a%20b"),
        ("/caf%C3%A9", "/caf%C3%A9"),
    ],
)
def test_redirect_with_any_bytes_is_followed(fetch, location, path):
    raw = location.encode().decode("latin-1")  # the server writes Latin-1
    with serve("127.0.0.1", {"/start": raw}) as (base, robots_host):
        report, rows, _ = fetch(f"{base}/start", allow=["127.0.0.1"])
    assert (report["pages"], len(rows)) == (1, 1), report
    assert robots_host[-1][0] == path
