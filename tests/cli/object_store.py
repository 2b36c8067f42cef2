"""Object stores of the tests: emulators of S3 and Google Cloud Storage, and a proxy in front that injects faults."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

# They end when their standard input is closed: with the test process, however that ends.
S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
# An abandoned upload is deleted by its address; the emulator does not implement that, and Google answers 499.
GS_SERVER = """
import http.server
import os
import sys
import threading
from gcp_storage_emulator import server
from gcp_storage_emulator.storage import Storage

lock = threading.RLock()

def locked(method):
    def call(*words, **options):
        with lock:
            return method(*words, **options)
    return call

# It writes its tables in one thread while another changes them, and then drops the connection: one change at a time.
for name, method in list(vars(Storage).items()):
    if callable(method) and not isinstance(method, staticmethod | classmethod) and not name.startswith("__"):
        setattr(Storage, name, locked(method))
http.server.HTTPServer = server.server.HTTPServer = http.server.ThreadingHTTPServer
emulator = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
emulator.start()
print(emulator._api._httpd.server_address[1], flush=True)
sys.stdin.read()
os._exit(0)  # its threads would continue
"""
BUCKET = "bucket"
CUT, DROP = "cut", "drop"
Hook = Callable[[str, str, int], Any]


@dataclass(frozen=True)
class Store:
    """An emulated object store with one bucket, at a port of this machine."""

    port: int
    scheme = ""

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of the bucket under a prefix, in order."""
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        """The contents of an object."""
        raise NotImplementedError

    def put(self, key: str, payload: bytes) -> None:
        """Store an object."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """The variables with which a command uses this store; no retries, so that faults show at once."""
        raise NotImplementedError

    def is_part(self, method: str, path: str) -> bool:
        """Whether a request sends a part of an object."""
        raise NotImplementedError

    def is_read(self, method: str, path: str, name: str) -> bool:
        """Whether a request reads a range of an object of this name."""
        raise NotImplementedError

    def denial(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """The answer to a request that is not permitted."""
        raise NotImplementedError

    def environment(self, **changes: str) -> dict[str, str]:
        """The environment of a command that uses this store."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FSSPEC_"))}
        return others | self.variables() | {"OMP_NUM_THREADS": "1"} | changes


class S3(Store):
    """moto's server."""

    scheme = "s3"

    def keys(self, prefix: str = "") -> list[str]:
        _, page = request(self.port, "GET", f"/{BUCKET}?list-type=2&max-keys=1000&prefix={prefix}", headers=SIGNED)
        return re.findall(r"<Key>(.*?)</Key>", page.decode())

    def get(self, key: str) -> bytes:
        status, payload = request(self.port, "GET", f"/{BUCKET}/{key}", headers=SIGNED)
        assert status == 200, payload
        return payload

    def put(self, key: str, payload: bytes) -> None:
        request(self.port, "PUT", f"/{BUCKET}/{key}", payload, headers=SIGNED)

    def variables(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def is_part(self, method: str, path: str) -> bool:
        return "partNumber" in path

    def is_read(self, method: str, path: str, name: str) -> bool:
        return method == "GET" and path.endswith(name)

    def denial(self) -> tuple[int, list[tuple[str, str]], bytes]:
        page = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        return 403, [("Content-Type", "application/xml")], page


class GoogleStorage(Store):
    """gcp-storage-emulator."""

    scheme = "gs"

    def keys(self, prefix: str = "") -> list[str]:
        _, page = request(self.port, "GET", f"/storage/v1/b/{BUCKET}/o?prefix={prefix}&maxResults=1000")
        return sorted(each["name"] for each in json.loads(page).get("items", []))

    def get(self, key: str) -> bytes:
        status, payload = request(self.port, "GET", f"/{BUCKET}/{quote(key)}")
        assert status == 200, payload
        return payload

    def put(self, key: str, payload: bytes) -> None:
        path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(key, safe='')}"
        status, page = request(self.port, "POST", path, payload, headers={"Content-Type": "application/octet-stream"})
        assert status == 200, page

    def variables(self) -> dict[str, str]:
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.port}",
            "FSSPEC_GS": json.dumps({"token": "anon"}),
            # Otherwise it asks for the kind of each bucket by gRPC, which the emulator does not have.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def is_part(self, method: str, path: str) -> bool:
        return method in ("POST", "PUT") and "upload_id" in path

    def is_read(self, method: str, path: str, name: str) -> bool:
        return method == "GET" and "alt=media" in path and name in unquote(path)

    def denial(self) -> tuple[int, list[tuple[str, str]], bytes]:
        page = b'{"error": {"code": 403, "message": "does not have storage.objects.get access"}}'
        return 403, [("Content-Type", "application/json")], page


SERVERS = {"s3": (S3, S3_SERVER), "gs": (GoogleStorage, GS_SERVER)}
NEEDED = {"s3": ("moto", "s3fs", "flask"), "gs": ("gcp_storage_emulator", "gcsfs")}
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
}


@contextmanager
def object_store(scheme: str) -> Iterator[Store]:
    """A store with an empty bucket, in a process of its own."""
    kind, program = SERVERS[scheme]
    command = [sys.executable, "-W", "ignore", "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            port = int(server.stdout.readline())
            if scheme == "s3":
                request(port, "PUT", f"/{BUCKET}", headers=SIGNED)
            yield kind(port)
        finally:
            server.stdin.close()
            server.wait(30)


def request(
    port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """One request, whose signature moto does not check: status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


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
        # A client of Google's abandons an upload so; the emulator does not implement it.
        if self.command == "DELETE" and "upload_id" in self.path and action is None:
            action = (499, [], b"")
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
def proxy(backend: Store, hook: Hook) -> Iterator[Store]:
    """The store at a port that passes requests on; ``hook(method, path, number)`` decides about each."""
    server: Any = _Server(("127.0.0.1", 0), _Handler)
    server.backend, server.hook, server.requests, server.lock = backend.port, hook, 0, threading.Lock()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield replace(backend, port=server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
