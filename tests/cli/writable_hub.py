"""A hub of the tests that stores what is written: branches, commits, Git LFS in one or several parts, and faults."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

REPOSITORY = "account/model"
TOKEN, READ_TOKEN = "hf_write", "hf_read"
# What a hook answers besides a status with a body: no answer, or none although the request was served.
DROP, LOSE = "drop", "lose"
LFS_SUFFIXES = (".safetensors", ".pt", ".bin", ".distcp", ".gguf")
PART_BYTES = 5 << 20
Hook = Callable[[str, str], Any]


def blob_id(payload: bytes) -> str:
    """The id of Git for contents, as ``git hash-object`` prints it."""
    return hashlib.sha1(f"blob {len(payload)}\0".encode() + payload).hexdigest()


@dataclass
class Hub:
    """One repository. ``commits`` has the files of each commit: the SHA-256 of each path, and whether it is LFS."""

    folder: Path
    hook: Hook = lambda *_: None
    commits: dict[str, dict[str, tuple[str, bool]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    multipart_above: int = 1 << 40
    port: int = 0

    def store(self, payload: bytes) -> str:
        """Keep contents; returns their SHA-256."""
        oid = hashlib.sha256(payload).hexdigest()
        (self.folder / oid).write_bytes(payload)
        return oid

    def commit(self, branch: str, files: dict[str, tuple[str, bool]]) -> str:
        """A new head of a branch."""
        name = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        return name

    def files(self, branch: str = "main") -> dict[str, bytes]:
        """The files of the head of a branch."""
        return {path: (self.folder / oid).read_bytes() for path, (oid, _) in self.tree(branch).items()}

    def tree(self, revision: str) -> dict[str, tuple[str, bool]] | None:
        """The files of a branch or a commit."""
        return self.commits.get(self.branches.get(revision, revision))

    def entry(self, path: str, oid: str, is_lfs: bool) -> dict[str, Any]:
        """How the hub lists a file."""
        size = (self.folder / oid).stat().st_size
        if not is_lfs:
            return {"type": "file", "path": path, "size": size, "oid": blob_id((self.folder / oid).read_bytes())}
        lfs = {"oid": oid, "size": size, "pointerSize": 134}
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n"
        return {"type": "file", "path": path, "size": size, "oid": blob_id(pointer.encode()), "lfs": lfs}

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a command uses this hub."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(self.folder / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_arguments: Any) -> None:
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def reply(self, status: int, body: Any = b"", **headers: str) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        if self.server.loses:
            self.server.loses, self.close_connection = False, True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def body(self) -> bytes:
        """The body of the request, of a known length or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def handle_any(self) -> None:
        url = urlparse(self.path)
        path = unquote(url.path)
        body = self.body()
        with self.server.lock:
            self.hub.requests.append((self.command, path))
            action = self.hub.hook(self.command, path)
            self.server.loses = action == LOSE
            if action == DROP:
                self.close_connection = True
            elif isinstance(action, tuple):
                self.reply(action[0], action[1])
            else:
                self._serve(path, parse_qs(url.query), body)

    do_GET = do_HEAD = do_PUT = do_POST = handle_any

    def _serve(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        if path.startswith("/lfs/"):  # addresses that carry their own permission
            self._store(path, body)
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (TOKEN, READ_TOKEN):
            self.reply(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "/api/validate-yaml":  # of a model card
            self.reply(200, {"errors": [], "warnings": []})
        elif not re.match(rf"(/api/models)?/{REPOSITORY}\b", path):
            self.reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif self.command == "POST" and "paths-info" not in path and token != TOKEN:
            self.reply(403, {"error": "Forbidden: you must use a write token to upload to a repository."})
        elif self.command == "POST":
            self._write(path, body)
        else:
            self._read(path, query)

    def _read(self, path: str, query: dict[str, list[str]]) -> None:
        about = re.fullmatch(rf"/api/models/{REPOSITORY}(?:/revision/(.+))?", path)
        inside = re.fullmatch(rf"(?:/api/models)?/{REPOSITORY}/(?:tree|resolve)/([^/]+|refs/pr/\d+)(?:/(.*))?", path)
        revision = (about or inside)[1] or "main"
        tree = self.hub.tree(revision)
        if tree is None:
            self.reply(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
            return
        commit = self.hub.branches.get(revision, revision)
        if about:
            self.reply(200, {"id": REPOSITORY, "sha": commit, "siblings": [{"rfilename": each} for each in tree]})
        elif "/resolve/" in path:
            self._send_file(tree, inside[2], commit)
        else:
            self._list(tree, inside[2] or "", recursive="true" in map(str.lower, query.get("recursive", [])))

    def _list(self, tree: dict[str, tuple[str, bool]], folder: str, *, recursive: bool) -> None:
        prefix = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for path, (oid, is_lfs) in tree.items():
            if path.startswith(prefix):
                first, slash, _ = path.removeprefix(prefix).partition("/")
                if slash:
                    found[first] = {"type": "directory", "path": prefix + first, "size": 0, "oid": "2" * 40}
                if recursive or not slash:
                    found[path] = self.hub.entry(path, oid, is_lfs)
        if found or not folder:
            self.reply(200, list(found.values()))
        else:
            self.reply(404, {"error": f"{folder} does not exist"}, X_Error_Code="EntryNotFound")

    def _send_file(self, tree: dict[str, tuple[str, bool]], path: str, commit: str) -> None:
        if path not in tree:
            self.reply(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return
        payload = (self.hub.folder / tree[path][0]).read_bytes()
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
        part = payload[int(span[1]) : int(span[2]) + 1 if span[2] else None]
        self.reply(206 if self.headers.get("Range") else 200, part, ETag=f'"{tree[path][0]}"', X_Repo_Commit=commit)

    def _write(self, path: str, body: bytes) -> None:
        if match := re.fullmatch(rf"/api/models/{REPOSITORY}/paths-info/(.+)", path):
            tree = self.hub.tree(match[1])
            names = parse_qs(body.decode()).get("paths") or json.loads(body).get("paths", [])
            self.reply(200, [self.hub.entry(name, *tree[name]) for name in names if name in tree])
        elif re.fullmatch(rf"/api/models/{REPOSITORY}/preupload/.+", path):
            request = json.loads(body)["files"]
            modes = {each["path"]: each["path"].endswith(LFS_SUFFIXES) or each["size"] > 10 << 20 for each in request}
            answers = [
                {
                    "path": name,
                    "uploadMode": "lfs" if is_lfs else "regular",
                    "shouldIgnore": name.endswith(self.hub.ignored or ("\0",)),
                    "oid": None,
                }
                for name, is_lfs in modes.items()
            ]
            self.reply(200, {"files": answers})
        elif path == f"/{REPOSITORY}.git/info/lfs/objects/batch":
            self.reply(
                200, {"transfer": "basic", "objects": [self._actions(each) for each in json.loads(body)["objects"]]}
            )
        elif match := re.fullmatch(rf"/api/models/{REPOSITORY}/commit/(.+)", path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self.reply(404, {"error": path})

    def _actions(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the client is to do for an object; nothing where it is stored."""
        oid, size, base = request["oid"], request["size"], f"http://127.0.0.1:{self.hub.port}/lfs"
        if (self.hub.folder / oid).exists():
            return request
        upload: dict[str, Any] = {"href": f"{base}/upload/{oid}"}
        if size > self.hub.multipart_above:
            parts = {str(k + 1): f"{base}/part/{oid}/{k + 1}" for k in range(-(-size // PART_BYTES))}
            upload = {"href": f"{base}/complete/{oid}", "header": {"chunk_size": str(PART_BYTES), **parts}}
        return {**request, "actions": {"upload": upload, "verify": {"href": f"{base}/verify"}}}

    def _store(self, path: str, body: bytes) -> None:
        """Receive contents; they must have the hash under which they were announced."""
        _, _, kind, *rest = path.split("/")
        if kind == "part":
            self.server.parts[rest[0], int(rest[1])] = body
            self.reply(200, ETag=f'"{rest[1]}"')
            return
        if kind == "verify":
            request = json.loads(body)
            stored = self.hub.folder / request["oid"]
            is_equal = stored.exists() and stored.stat().st_size == request["size"]
            self.reply(200 if is_equal else 422, {})
            return
        if kind == "complete":
            numbers = [each["partNumber"] for each in json.loads(body)["parts"]]
            body = b"".join(self.server.parts.pop((rest[0], number)) for number in numbers)
        is_equal = hashlib.sha256(body).hexdigest() == rest[0]
        if is_equal:
            self.hub.store(body)
        self.reply(200 if is_equal else 400, {} if is_equal else {"error": "the SHA-256 differs"})

    def _commit(self, branch: str, lines: list[dict[str, Any]]) -> None:
        head = self.hub.branches.get(branch)
        if lines[0]["key"] != "header" or lines[0]["value"].get("parentCommit", head) != head:
            self.reply(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(self.hub.commits[head])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = (self.hub.store(base64.b64decode(value["content"])), False)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile" and (self.hub.folder / value["oid"]).exists():
                files[value["path"]] = (value["oid"], True)
            else:
                self.reply(400, {"error": f"cannot commit {value}"})
                return
        made = self.hub.commit(branch, files)
        self.reply(200, {"success": True, "commitOid": made, "commitUrl": f"http://hub/{REPOSITORY}/commit/{made}"})


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_arguments: Any) -> None:
        pass  # the client was killed


@contextmanager
def writable_hub(folder: Path) -> Iterator[Hub]:
    """A hub with one repository, which has what a new one has.

    Args:
        folder: where contents are kept.
    """
    folder.mkdir()
    server: Any = _Server(("127.0.0.1", 0), _Handler)
    hub = Hub(folder, port=server.server_address[1])
    hub.commit("main", {".gitattributes": (hub.store(b"*.safetensors filter=lfs\n"), False)})
    server.hub, server.lock, server.loses, server.parts = hub, threading.Lock(), False, {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
