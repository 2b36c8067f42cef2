"""Addresses of checkpoints in object stores: which are supported, and why others are refused. Pure.

Credentials are never part of an address: it is printed in messages and recorded in ``conversion.json``.
"""

from __future__ import annotations

import re

from .._common.document import short_repr
from .._common.errors import UsageError

# Scheme -> package that implements it, and the extra that installs this package.
SCHEMES = {
    "s3": ("s3fs", "remote"),
    "gs": ("gcsfs", "gs"),
    "gcs": ("gcsfs", "gs"),
    "hf": ("huggingface_hub", "hf"),
}
# Keys of S3 and names of Google Cloud Storage have at most 1024 bytes.
MAX_URL_BYTES = 1024
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# Glob characters would address several objects, and `?` and `#` begin versions and fragments.
_REFUSED_CHARACTERS = set("?#*[]\\")


def is_url(text: str) -> bool:
    """Whether ``text`` has the form ``SCHEME://...``; the scheme may be unknown."""
    return _URL.fullmatch(text) is not None


def parse_url(text: str) -> tuple[str, tuple[str, ...]]:
    """The scheme of an address, and its bucket or account followed by the names of the path.

    Args:
        text: such as ``s3://bucket/runs/step-00000100`` or ``hf://account/model@revision``.

    Raises:
        UsageError: an unknown scheme, no bucket, credentials, or names that are not plain.
    """
    match = _URL.fullmatch(text)
    scheme = match[1].lower() if match else ""
    if match is None or scheme not in SCHEMES:
        raise UsageError(
            f"{short_repr(text)}: not a supported address; use a local path, or one of "
            f"{', '.join(f'{name}://' for name in SCHEMES)}"
        )
    names = tuple(match[2].removesuffix("/").split("/"))
    reason = _problem(scheme, match[2], names)
    if reason:
        # The address may contain a secret, so it is not repeated.
        shown = f"{scheme}://" if "@" in names[0] else short_repr(text)
        raise UsageError(f"{shown}: {reason}")
    return scheme, names


def is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder, on a disk and in an object store.

    Args:
        name: one part of a path, from an address or from the listing of an object store.
    """
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


def _problem(scheme: str, rest: str, names: tuple[str, ...]) -> str:
    """Why an address is refused; empty where it is not."""
    if not names[0]:
        return "has no bucket; write SCHEME://BUCKET/PATH"
    if "@" in names[0]:
        return "has an @ before the first slash; credentials are read from the environment only"
    if ":" in names[0] or "::" in rest:
        return "has a colon in its bucket, or a chain of addresses; neither is supported"
    if len(rest.encode(errors="surrogateescape")) > MAX_URL_BYTES:
        return f"is longer than {MAX_URL_BYTES} bytes"
    refused = sorted(_REFUSED_CHARACTERS & set(rest))
    if refused:
        return f"has {' '.join(refused)}; patterns, versions and fragments are not supported"
    if not all(map(is_plain_name, names)):
        return "has an empty, relative or unprintable name between its slashes"
    if scheme == "hf" and len(names) < 2:
        return "must name an account and a model, such as hf://ACCOUNT/MODEL"
    return ""
