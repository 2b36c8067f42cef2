"""An S3 of the tests: moto's server in a process of its own, and a proxy in front of it that injects faults."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# It ends when its standard input is closed: with the test process, however that ends.
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
BUCKET = "bucket"
CUT, DROP = "cut", "drop"
Hook = Callable[[str, str, int], Any]


@contextmanager
def moto_server() -> Iterator[int]:
    """The port of a server with an empty bucket."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            port = int(server.stdout.readline())
            request(port, "PUT", f"/{BUCKET}")
            yield port
        finally:
            server.stdin.close()
            server.wait(30)


def request(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request without signature, which moto accepts: status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        authorization = (
            "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        )
        connection.request(method, path, body, {"Authorization": authorization})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def keys(port: int, prefix: str = "") -> list[str]:
    """The keys of the bucket under a prefix."""
    import re

    _, page = request(port, "GET", f"/{BUCKET}?list-type=2&max-keys=1000&prefix={prefix}")
    return re.findall(r"<Key>(.*?)</Key>", page.decode())


def get(port: int, key: str) -> bytes:
    """The contents of an object."""
    status, payload = request(port, "GET", f"/{BUCKET}/{key}")
    assert status == 200, payload
    return payload


def environment(port: int, **changes: str) -> dict[str, str]:
    """The environment of a command that uses this server; no retries, so that faults show at once."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "OMP_NUM_THREADS": "1",
    } | changes


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_arguments: Any) -> None:
        pass

    def forward(self) -> None:
        """Pass a request on, or do what the hook returns: a status with a body, a cut answer, or none at all."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.server.requests += 1
            action = self.server.hook(self.command, self.path, self.server.requests)
        if action == DROP:
            self.close_connection = True
            return
        status, headers, payload = action if isinstance(action, tuple) else self._ask(body)
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == "content-length"), len(payload))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload[: len(payload) // 2] if action == CUT else payload)
        self.close_connection = self.close_connection or action == CUT

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.backend, timeout=60)
        try:
            skipped = ("connection", "content-length", "expect")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_arguments: Any) -> None:
        pass  # the client was killed


@contextmanager
def proxy(backend: int, hook: Hook) -> Iterator[int]:
    """A port that passes requests on to ``backend``; ``hook(method, path, number)`` decides about each."""
    server: Any = _Server(("127.0.0.1", 0), _Handler)
    server.backend, server.hook, server.requests, server.lock = backend, hook, 0, threading.Lock()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
