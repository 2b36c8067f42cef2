"""Paths in object stores (``s3://``, ``gs://``, ``hf://``), through fsspec.

A :class:`RemotePath` is a ``Path`` whose file system is an object store, so every reader of a format opens a local
directory and an address with the same code::

    parse_location(text) -> Path or RemotePath
    RemotePath.is_file, iterdir, glob      listings, cached by fsspec
    RemotePath.stat, open, read_bytes      the size, and a seekable file that reads ranges
    RemoteFile.fill                        the bytes of a tensor, for several threads, with one window each

Methods that would change something, or that only a local disk has, raise ``io.UnsupportedOperation``. Objects are
written by :mod:`.uploads` only.

Memory: a read of less than ``WINDOW_BYTES`` fetches a whole window, for a request to an object store takes tens of
milliseconds whatever its size. Each thread keeps one window, whichever file it reads.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, cast

from .._common.document import size_problem
from .._common.errors import DynmoError, MissingExtraError
from .errors import CorruptError, StorageError, short_name
from .urls import SCHEMES, is_plain_name, is_url, parse_url

# The scheme of Hugging Face repositories.
HUB = "hf"
# Files of a repository rather than of a checkpoint in it: they neither count as one nor are removed with it.
REPOSITORY_FILES = (".gitattributes", ".gitignore", "LICENSE", "LICENSE.md", "LICENSE.txt", "README.md")
WINDOW_BYTES = 8 << 20
# Enough for the header of most files, so that opening one takes one request.
HANDLE_BYTES = 1 << 18
# The object that marks a directory whose upload is not complete. Readers do not list it.
UPLOAD_MARK = ".dynmo-upload"
# Where the objects lie that are to replace those of a directory. Readers do not list it either.
STAGING = ".dynmo-staging"
# What identifies the contents of an object, by store.
IDENTITIES = ("ETag", "etag", "md5Hash", "crc32c", "generation", "blob_id", "mtime", "size")


def parse_location(text: str) -> Path:
    """A local path, or the path of an address.

    Raises:
        UsageError: an address that is not supported.
    """
    if not is_url(text):
        return Path(text)
    scheme, names = parse_url(text)
    return RemotePath(f"{scheme}:", *names)


class RemotePath(PosixPath):
    """A path in an object store; its first part is the scheme with a colon.

    It has no state besides its parts, so all operations on paths (``/``, ``parent``, ``relative_to``) keep working.
    """

    @property
    def scheme(self) -> str:
        """The scheme, such as ``s3``.

        Raises:
            io.UnsupportedOperation: a part of a path, such as the result of ``relative_to``.
        """
        scheme = self.parts[0].removesuffix(":") if self.parts else ""
        if scheme not in SCHEMES or len(self.parts) < 2:
            raise io.UnsupportedOperation(f"{super().__str__()}: not an address in an object store")
        return scheme

    @property
    def bucket(self) -> RemotePath:
        """The bucket; in ``hf://`` the account."""
        return RemotePath(*self.parts[:2])

    def __str__(self) -> str:
        text = super().__str__()
        scheme, colon, rest = text.partition(":/")
        return f"{scheme}://{rest}" if colon and scheme in SCHEMES else text

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def file_system(self) -> Any:
        """The file system of fsspec; instances are cached there.

        Raises:
            MissingExtraError: the package of the scheme is not installed.
        """
        return file_system(self.scheme)

    def info(self, *, refresh: bool = False) -> dict[str, Any] | None:
        """What the store reports about an object or a prefix; None where there is nothing.

        Args:
            refresh: do not use a cached listing.

        Raises:
            StorageError: the store cannot be reached or denies access.
        """
        files = self.file_system()
        with remote_errors(self):
            if refresh:
                files.invalidate_cache(str(self.parent))
                files.invalidate_cache(str(self))
            try:
                return dict(files.info(str(self)))
            except FileNotFoundError:
                return None

    def listing(self) -> dict[str, dict[str, Any]]:
        """The entries of a prefix by name; empty where there are none.

        Raises:
            StorageError: the store cannot be reached or denies access.
            CorruptError: a name that would lead out of the directory.
        """
        files = self.file_system()
        with remote_errors(self):
            try:
                entries = files.ls(str(self), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        own, found = _key(files, self), {}
        for entry in entries:
            path = str(entry["name"]).rstrip("/")
            if path == own:  # an object with the name of the prefix, or the path is an object
                continue
            name = path.removeprefix(f"{own}/")
            if not is_plain_name(name):
                raise CorruptError(f"{self}: has an object with the name {short_name(name)}, which is not a file name")
            if name not in (UPLOAD_MARK, STAGING):
                found[name] = entry
        return found

    def is_file(self, **_unused: Any) -> bool:
        """Whether an object with this name exists."""
        # Of the listing of the parent, which serves the questions about all other names of a format.
        if len(self.parts) > 3:
            return self.parent.listing().get(self.name, {}).get("type") == "file"
        found = self.info()
        return found is not None and found["type"] == "file"

    def is_dir(self, **_unused: Any) -> bool:
        """Whether there are objects under this prefix."""
        return bool(self.listing())

    def exists(self, **_unused: Any) -> bool:
        """Whether there is an object with this name, or objects under this prefix."""
        return self.is_dir() or self.info() is not None

    def is_symlink(self) -> bool:
        """Object stores have no links."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Kind and size; all other fields are 0.

        Raises:
            FileNotFoundError: there is no such object or prefix.
        """
        del follow_symlinks
        found = self.info()
        if found is None:
            raise FileNotFoundError(2, "No such file or directory", str(self))
        kind = stat.S_IFREG if found["type"] == "file" else stat.S_IFDIR
        return os.stat_result((kind | 0o444, 0, 0, 0, 0, 0, found.get("size") or 0, 0, 0, 0))

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        """The objects and prefixes directly under this one, in order of their names."""
        for name in sorted(self.listing()):
            yield self / name

    def glob(self, pattern: Any, **_unused: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """As ``Path.glob``, without ``**``."""
        first, _, rest = str(pattern).partition("/")
        for child in self.iterdir():
            if fnmatchcase(child.name, first):
                if rest:
                    yield from child.glob(rest)
                else:
                    yield child

    def rglob(self, pattern: Any, **_unused: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """As ``Path.rglob``, for the pattern of a name."""
        for name, entry in sorted(self.listing().items()):
            child = self / name
            if fnmatchcase(name, str(pattern)):
                yield child
            if entry["type"] == "directory":
                yield from child.rglob(pattern)

    def resolve(self, strict: bool = False) -> RemotePath:
        """The path itself: an address is absolute."""
        del strict
        return self

    def absolute(self) -> RemotePath:
        """The path itself: an address is absolute."""
        return self

    def open(self, mode: str = "r", *_unused: Any, **_more: Any) -> Any:
        """A seekable file that reads ranges; the mode must be ``rb``.

        Raises:
            CorruptError: there is no such object.
            StorageError: the store cannot be reached or denies access.
        """
        if mode != "rb":
            raise io.UnsupportedOperation(f"{self}: mode {mode!r} is not supported in an object store")
        return open_remote(self)

    def read_bytes(self) -> bytes:
        """The contents of an object."""
        with open_remote(self) as handle:
            return handle.read()

    def check_complete(self) -> None:
        """Refuse an address without objects, and one whose upload was cut.

        Raises:
            CorruptError: nothing is stored here, or only a part.
            StorageError: the store cannot be reached or denies access.
        """
        if (self / UPLOAD_MARK).info(refresh=True) is not None:
            raise CorruptError(
                f"{self}: an upload to this address is running or was cut; write it again with --overwrite"
            )
        if self.info() is not None:
            return
        if self.scheme not in ("s3", "gs", "gcs"):
            raise CorruptError(f"{self}: there is no such model or revision, or it is not public")
        if self.bucket.info() is None:
            raise CorruptError(f"{self}: there is no bucket {self.parts[1]}")
        raise CorruptError(f"{self}: nothing is stored under this address")


def _local_only(name: str) -> Callable[..., Any]:
    def refuse(self: RemotePath, *_arguments: Any, **_options: Any) -> Any:
        raise io.UnsupportedOperation(f"{self}: {name} is not supported in an object store")

    return refuse


# They would act on a local file whose name looks like the address.
LOCAL_ONLY = (
    *("chmod", "copy", "copy_into", "expanduser", "group", "hardlink_to", "is_block_device", "is_char_device"),
    *("is_fifo", "is_junction", "is_mount", "is_socket", "lchmod", "link_to", "lstat", "mkdir", "move", "move_into"),
    *("owner", "read_text", "readlink", "rename", "replace", "rmdir", "samefile", "symlink_to", "touch", "unlink"),
    *("walk", "write_bytes", "write_text"),
)
for _name in LOCAL_ONLY:
    setattr(RemotePath, _name, _local_only(_name))


def file_system(scheme: str) -> Any:
    """The file system of fsspec for a scheme, with its own defaults: credentials come from the environment.

    Raises:
        MissingExtraError: the package of the scheme is not installed.
    """
    module, extra = SCHEMES[scheme]
    try:
        import fsspec

        # gcsfs logs each failed request with a traceback; its error becomes the message of the command.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        return fsspec.filesystem(scheme)
    except ImportError as error:
        raise MissingExtraError(module, extra) from error


@contextmanager
def remote_errors(path: RemotePath) -> Iterator[None]:
    """Turn the errors of a store's client into errors of this package; a missing object stays ``FileNotFoundError``.

    Raises:
        StorageError: no credentials, access denied, no connection, or an error of the store.
    """
    # The mark of an upload is the first object that is looked for; users gave the address that it lies under.
    path = path.parent if path.name == UPLOAD_MARK else path
    try:
        yield
    except (DynmoError, FileNotFoundError, NotADirectoryError, io.UnsupportedOperation):
        raise
    except PermissionError as error:
        raise StorageError(
            f"{path}: access denied ({_reason(error)}); check the credentials in your environment, and what they permit"
        ) from error
    # The clients raise errors of botocore, aiohttp, google.auth and others; none of these packages is imported here.
    except Exception as error:
        kind = type(error).__name__
        if "Credentials" in kind or "credentials" in str(error):
            raise StorageError(
                f"{path}: no credentials ({_reason(error)}); set those of the store in your environment"
            ) from error
        # gcsfs has no type and no number for this answer.
        if str(error).startswith("Forbidden: "):
            raise StorageError(f"{path}: {_STATUS_CAUSES[403]} ({_reason(error)})") from error
        if cause := _STATUS_CAUSES.get(http_status(error) or 0):
            raise StorageError(f"{path}: {cause} ({_reason(error)})") from error
        raise StorageError(f"{path}: the store cannot be used: {kind}: {_reason(error)}; try again") from error


_STATUS_CAUSES = {
    401: "the store does not accept the credentials; check those in your environment, such as HF_TOKEN",
    403: "access denied; check the credentials in your environment, and what they permit",
    409: "was changed by someone else meanwhile; run the command again",
    412: "was changed by someone else meanwhile; run the command again",
    429: "the store limits the rate of requests; try again later",
}


def http_status(error: BaseException | None) -> int | None:
    """The status of the answer that caused an error of a client; None where there was no answer."""
    while error is not None:
        # huggingface_hub has the answer, gcsfs the number.
        status = getattr(getattr(error, "response", None), "status_code", getattr(error, "code", None))
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _reason(error: BaseException) -> str:
    """The first line of a message, shortened; an answer of a store may be a whole page."""
    return short_name(str(error).strip().partition("\n")[0]) or "no reason was given"


def _key(files: Any, path: RemotePath) -> str:
    """How the file system names a path in its listings."""
    if path.scheme == HUB:
        return str(files.resolve_path(str(path)).unresolve())
    return str(files._strip_protocol(str(path))).rstrip("/")


class RemoteFile:
    """An object that threads read by ranges; each keeps one window of read-ahead in ``windows``."""

    def __init__(self, path: RemotePath, windows: threading.local) -> None:
        """Look up the size.

        Raises:
            CorruptError: there is no such object.
            StorageError: the store cannot be reached or denies access.
        """
        found = path.info()
        if found is None or found["type"] != "file":
            raise CorruptError(f"{path}: cannot be read: No such file or directory")
        self.path, self.windows = path, windows
        self.num_bytes = int(found.get("size") or 0)
        self.identity = _identity(found)

    def fetch(self, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)`` of the object; fewer at its end.

        Raises:
            CorruptError: the object was removed.
            StorageError: the connection was cut, or the store answered with another number of bytes.
        """
        end = min(end, self.num_bytes)
        if begin >= end:
            return b""
        try:
            with remote_errors(self.path):
                payload = bytes(self.path.file_system().cat_file(str(self.path), start=begin, end=end))
        except FileNotFoundError as error:
            raise CorruptError(f"{self.path}: was removed while it was read") from error
        if len(payload) != end - begin:
            raise StorageError(f"{self.path}: the store sent {len(payload)} of the bytes {begin} to {end}; try again")
        return payload

    def fill(self, view: memoryview, offset: int, end: int) -> int:
        """Fill ``view`` from byte ``offset``.

        Args:
            view: where the bytes go.
            offset: of the first byte, in the object.
            end: read-ahead stops here: the end of the tensor.

        Returns:
            Number of bytes; fewer than ``view`` has only at the end of the object.
        """
        if len(view) >= WINDOW_BYTES:
            payload = self.fetch(offset, offset + len(view))
            view[: len(payload)] = payload
            return len(payload)
        owner, begin, window = getattr(self.windows, "last", (None, 0, b""))
        inside = owner is self and begin <= offset and offset + len(view) <= begin + len(window)
        if not inside:
            self.windows.last = None, 0, b""  # two windows at a time would double the memory
            del window
            window = self.fetch(offset, max(offset + len(view), min(end, offset + WINDOW_BYTES)))
            begin = offset
            self.windows.last = self, begin, window
        part = memoryview(window)[offset - begin : offset - begin + len(view)]
        view[: len(part)] = part
        return len(part)

    def check_unchanged(self) -> None:
        """Compare the object with what it was when it was opened.

        Raises:
            CorruptError: it was replaced or removed; what was read may be of two versions.
        """
        found = self.path.info(refresh=True)
        if found is None or _identity(found) != self.identity:
            raise CorruptError(f"{self.path}: was replaced or removed while it was read; run the command again")


def _identity(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(str(found.get(name)) for name in IDENTITIES)


class _RemoteHandle(io.RawIOBase):
    """An object as a raw file, for readers of headers."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self.file, self.at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As ``io.IOBase.seek``."""
        self.at = max(0, offset + (0, self.at, self.file.num_bytes)[whence])
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the current position."""
        payload = self.file.fetch(self.at, self.at + len(buffer))
        buffer[: len(payload)] = payload
        self.at += len(payload)
        return len(payload)


def open_remote(path: RemotePath) -> BinaryIO:
    """A seekable, buffered file on an object.

    Raises:
        CorruptError: there is no such object.
        StorageError: the store cannot be reached or denies access.
    """
    return cast("BinaryIO", io.BufferedReader(_RemoteHandle(RemoteFile(path, threading.local())), HANDLE_BYTES))


def read_remote(path: RemotePath, max_bytes: int) -> bytes:
    """The contents of an object of at most ``max_bytes`` bytes.

    Raises:
        CorruptError: there is no such object, or it is larger.
        StorageError: the store cannot be reached or denies access.
    """
    file = RemoteFile(path, threading.local())
    if problem := size_problem(file.num_bytes, max_bytes):
        raise CorruptError(f"{path}: {problem}")
    return file.fetch(0, file.num_bytes)
