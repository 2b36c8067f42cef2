"""Repositories of the Hugging Face Hub as outputs: files are uploaded one by one, and one commit makes them visible.

::

    open_commit    the head of the branch, and the files that are there     nothing is written
    add            a file of the disk: the client hashes it and uploads its contents to the storage of the repository
    send           one commit on top of that head: new files, and deletions of those that are replaced
    findings       the hashes that the hub has of the files of that commit

The client decides how contents travel: by chunks (Xet) where the package ``hf_xet`` is installed, otherwise by Git LFS;
files that the hub takes for text go into the commit. A reader sees the old commit or the new one. What was uploaded and
not committed is in no revision.

The client repeats requests that fail for a moment, but not the commit, whose answer may be lost after it succeeded. So
``send`` repeats it itself: the head that it names as parent makes a second commit impossible.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from .._common.errors import DynmoError, MissingExtraError, UsageError
from .errors import StorageError, short_name, short_names
from .remote import REPOSITORY_FILES, RemotePath, http_status, remote_errors

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
COMMIT_WAITS_S = (1.0, 2.0, 4.0, 8.0)
CONFLICTS = (409, 412)
_COMMIT_ID = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubFolder:
    """A folder of a branch of a repository.

    Attributes:
        kind: ``model``, ``dataset`` or ``space``.
        repository: ``OWNER/NAME``.
        branch: the branch; ``main`` where the address has none.
        folder: path in the repository; empty: the whole repository.
    """

    kind: str
    repository: str
    branch: str
    folder: str


def hub_folder(path: RemotePath) -> HubFolder:
    """The parts of ``hf://[KIND/]OWNER/NAME[@BRANCH][/FOLDER]``. Pure.

    Raises:
        UsageError: a bucket, no name, or a revision that cannot be written.
    """
    names = list(path.parts[1:])
    if names[0] == "buckets":
        raise UsageError(f"{path}: buckets are only read; write to a repository, hf://OWNER/NAME")
    kind = KINDS[names.pop(0)] if names[0] in KINDS else "model"
    if len(names) < 2:
        raise UsageError(f"{path}: must name an account and a repository, such as hf://OWNER/NAME")
    owner, name, *rest = names
    name, at, branch = name.partition("@")
    # Branches of pull requests and conversions have a slash in their names.
    if branch == "refs" and len(rest) > 1 and rest[0] in ("pr", "convert"):
        branch, rest = "/".join([branch, *rest[:2]]), rest[2:]
    branch = unquote(branch)
    if not name or (at and not branch):
        raise UsageError(f"{path}: must name a repository and, after an @, a branch")
    if _COMMIT_ID.fullmatch(branch):
        raise UsageError(f"{path}: a commit does not change; write to a branch, such as hf://{owner}/{name}@main")
    return HubFolder(kind=kind, repository=f"{owner}/{name}", branch=branch or "main", folder="/".join(rest))


@dataclass(kw_only=True)
class HubCommit:
    """A commit in preparation.

    Attributes:
        target: the address, for messages.
        place: the parts of the address.
        api: the client of the hub.
        head: the commit on top of which this one is made.
        present: the paths in the folder at ``head``, relative to it.
        additions: the operations of the client, by path.
        blobs: the ids that Git gives the files which become a part of the commit, by path.
    """

    target: RemotePath
    place: HubFolder
    api: Any
    head: str
    present: frozenset[str]
    additions: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, str] = field(default_factory=dict)

    @property
    def _where(self) -> dict[str, str]:
        return {"repo_id": self.place.repository, "repo_type": self.place.kind}

    def path_of(self, name: str) -> str:
        """The path in the repository of a file of the folder."""
        return f"{self.place.folder}/{name}" if self.place.folder else name

    def add(self, name: str, content: Path | bytes) -> bool:
        """Upload a file; it appears with the commit.

        Args:
            name: its path in the folder.
            content: a file of the disk, or its bytes.

        Returns:
            Whether ``content`` is no longer needed. A file that becomes a part of the commit is read again by ``send``.

        Raises:
            UsageError: the repository ignores files of this name.
            StorageError: the hub denies access or cannot be reached.
        """
        from huggingface_hub import CommitOperationAdd

        with hub_errors(self.target), _no_progress_bars():
            addition = CommitOperationAdd(
                path_in_repo=self.path_of(name), path_or_fileobj=content if isinstance(content, bytes) else str(content)
            )
            self.api.preupload_lfs_files(additions=[addition], revision=self.place.branch, **self._where)
        if getattr(addition, "_should_ignore", False):
            raise UsageError(f"{self.target}: .gitignore of the repository excludes {short_name(name)}; edit it")
        self.additions[name] = addition
        # The client drops the contents of what it has uploaded.
        is_uploaded = bool(content) and addition.path_or_fileobj == b""
        if not is_uploaded:
            self.blobs[name] = git_blob_id(content)
        return is_uploaded

    def send(self, message: str) -> str:
        """Make the commit: the added files, and deletions of the others in the folder.

        Returns:
            The id of the commit.

        Raises:
            StorageError: the hub denies access or cannot be reached, or the branch was changed meanwhile.
        """
        from huggingface_hub import CommitOperationDelete

        stale = sorted(self.present - set(self.additions) - set(self._repository_files()))
        operations = [
            *self.additions.values(),
            *(CommitOperationDelete(path_in_repo=self.path_of(name), is_folder=False) for name in stale),
        ]
        is_repeated = False
        for wait_s in (*COMMIT_WAITS_S, None):
            try:
                with _no_progress_bars():
                    made = self.api.create_commit(
                        operations=list(operations),
                        commit_message=message,
                        revision=self.place.branch,
                        parent_commit=self.head,
                        **self._where,
                    )
                return str(made.oid)
            # The client raises errors of httpx, requests and its own; none of these packages is imported here.
            except Exception as error:
                status = http_status(error)
                may_be_made = status is None or status >= 500 or (is_repeated and status in CONFLICTS)
                if may_be_made and (found := self._commit_made()):
                    return found
                if wait_s is None or not (status is None or status >= 500 or status == 429):
                    with hub_errors(self.target):
                        raise
                is_repeated = True
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def findings(self, commit: str) -> list[str]:
        """Differences between the files of a commit and those that were added.

        Args:
            commit: its id.

        Raises:
            StorageError: the hub denies access or cannot be reached.
        """
        with hub_errors(self.target):
            stored = {entry.path: entry for entry in _files(self.api, self.place, commit)}
        found = []
        for name, addition in self.additions.items():
            entry = stored.get(self.path_of(name))
            if entry is None:
                found.append(f"{name}: is missing")
                continue
            # An object, or a mapping in releases of huggingface_hub before 1.0.
            lfs = entry.lfs
            sha256 = lfs["sha256"] if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
            # Of other files the hub has the hash that Git gives their contents.
            is_equal = sha256 == addition.upload_info.sha256.hex() if sha256 else entry.blob_id == self.blobs.get(name)
            if not is_equal or entry.size != addition.upload_info.size:
                found.append(f"{name}: has other contents than were sent")
        return found

    def _commit_made(self) -> str | None:
        """The id of the commit, if the hub made it although its answer was lost; None where the head is unchanged."""
        try:
            with remote_errors(self.target):
                head = str(self.api.repo_info(revision=self.place.branch, **self._where).sha)
        except StorageError:  # the commit is tried again, and then reports what is wrong
            return None
        if head == self.head:
            return None
        if unlike := self.findings(head):
            raise StorageError(
                f"{self.target}: was changed by someone else meanwhile; run the command again ({short_names(unlike)})"
            )
        return head

    def _repository_files(self) -> tuple[str, ...]:
        return () if self.place.folder else REPOSITORY_FILES


def open_commit(target: RemotePath, inputs: Sequence[Path], *, overwrite: bool) -> HubCommit:
    """Prepare a commit to a repository, before anything is uploaded.

    Args:
        target: the address.
        inputs: files and directories that are read.
        overwrite: files in the folder are replaced.

    Raises:
        UsageError: the address cannot be written, has files without ``overwrite``, or contains an input.
        MissingExtraError: huggingface_hub is not installed.
        StorageError: no such repository or branch, no token, access denied, or no connection.
    """
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hf") from error
    place = hub_folder(target)
    for source in inputs:
        if source.is_relative_to(target):
            raise UsageError(f"{target}: overlaps the input {source}; choose another address")
    if get_token() is None:
        raise StorageError(f"{target}: no token of the hub; set HF_TOKEN, or log in with `hf auth login`")
    api = HfApi()
    with hub_errors(target):
        head = str(api.repo_info(place.repository, revision=place.branch, repo_type=place.kind).sha)
        present = {entry.path for entry in _files(api, place, head)}
    prefix = f"{place.folder}/" if place.folder else ""
    commit = HubCommit(
        target=target,
        place=place,
        api=api,
        head=head,
        present=frozenset(path.removeprefix(prefix) for path in present),
    )
    if commit.present - set(commit._repository_files()) and not overwrite:
        raise UsageError(f"{target}: exists; choose another address, or replace it with --overwrite")
    return commit


def _files(api: Any, place: HubFolder, revision: str) -> list[Any]:
    """The files in the folder at a revision; empty where there is no such folder."""
    from huggingface_hub.errors import EntryNotFoundError

    try:
        entries = list(
            api.list_repo_tree(
                place.repository, place.folder or None, recursive=True, revision=revision, repo_type=place.kind
            )
        )
    except EntryNotFoundError:
        return []
    return [entry for entry in entries if hasattr(entry, "blob_id")]  # folders have none


def git_blob_id(content: Path | bytes) -> str:
    """The id that Git gives a file: SHA-1 of a head with its size, and the contents."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with open(content, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


@contextmanager
def hub_errors(target: RemotePath) -> Iterator[None]:
    """As ``remote_errors``, with the remedies of the hub.

    Raises:
        StorageError: no such repository or branch, access denied, or no connection.
    """
    try:
        with remote_errors(target):
            yield
    except DynmoError as error:
        place, status = hub_folder(target), http_status(error.__cause__)
        if status == 404:
            raise StorageError(
                f"{target}: there is no {place.kind} {place.repository} with a branch {place.branch}, or the token "
                f"does not see it; create it with `hf repos create {place.repository}`, or `hf repos branch create`"
            ) from error
        if status == 401:
            raise StorageError(
                f"{target}: the hub does not accept the token, or does not show it {place.repository}; set HF_TOKEN to "
                "a token of an account that may write there"
            ) from error
        if status == 403:
            raise StorageError(
                f"{target}: access denied; the token must have the permission to write to {place.repository}"
            ) from error
        raise


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Silence the progress bars of the client: the command has its own."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    was_disabled = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            utils.enable_progress_bars()
