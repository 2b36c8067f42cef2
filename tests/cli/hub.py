"""A hub of the tests: answers what huggingface_hub asks when it lists a model and reads ranges of its files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

COMMIT = "0" * 40


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_arguments: Any) -> None:
        pass

    def reply(self, status: int, payload: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        if status == 404:
            is_known = f"/{self.server.repository}/" in self.path
            self.send_header("X-Error-Code", "EntryNotFound" if is_known else "RepoNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def do_GET(self) -> None:
        path, name = urlparse(self.path).path, self.server.repository
        folder: Path = self.server.folder
        self.server.requests.append((path, self.headers.get("Range")))
        files = [
            {
                "type": "file",
                "path": each.name,
                "size": each.stat().st_size,
                "oid": hashlib.sha1(each.read_bytes()).hexdigest(),
            }
            for each in sorted(folder.iterdir())
        ]
        if re.fullmatch(rf"/api/models/{name}(/revision/[^/]+)?", path):
            about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": each["path"]} for each in files]}
            self.reply(200, json.dumps(about).encode(), Content_Type="application/json")
        elif re.fullmatch(rf"/api/models/{name}/tree/[^/]+", path):
            self.reply(200, json.dumps(files).encode(), Content_Type="application/json")
        elif match := re.fullmatch(rf"/{name}/resolve/[^/]+/([^/]+)", path):
            payload = (folder / match[1]).read_bytes() if (folder / match[1]).is_file() else None
            if payload is None:
                self.reply(404, b"")
                return
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
            part = payload[int(span[1]) : int(span[2]) + 1 if span[2] else None]
            self.reply(206 if self.headers.get("Range") else 200, part, ETag='"x"', Accept_Ranges="bytes")
        else:
            self.reply(404, b"{}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlparse(self.path).path
        self.server.requests.append((path, None))
        if re.fullmatch(rf"/api/models/{self.server.repository}/paths-info/[^/]+", path):
            names = re.findall(r"paths(?:%5B%5D)?=([^&]+)", body.decode()) or json.loads(body or b"{}").get("paths", [])
            found = [self.server.folder / each for each in names if (self.server.folder / each).is_file()]
            rows = [{"type": "file", "path": each.name, "size": each.stat().st_size, "oid": "1" * 40} for each in found]
            self.reply(200, json.dumps(rows).encode(), Content_Type="application/json")
        else:
            self.reply(404, b"{}")


@contextmanager
def hub(repository: str, folder: Path) -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """The port of a hub with one model, and the requests as they come: path and range."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.repository, server.folder, server.requests = repository, folder, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], server.requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
