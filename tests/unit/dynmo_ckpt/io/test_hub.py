"""Addresses of repositories of the hub as outputs, and the statuses of answers in chains of errors."""

from __future__ import annotations

import pytest

from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.io.hub import hub_folder
from dynmo_ckpt.io.remote import http_status, parse_location


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://o/n", ("model", "o/n", "main", "")),
        ("hf://o/n/a/b", ("model", "o/n", "main", "a/b")),
        ("hf://o/n@dev", ("model", "o/n", "dev", "")),
        ("hf://o/n@a%2Fb/c", ("model", "o/n", "a/b", "c")),
        ("hf://o/n@refs/pr/7/c", ("model", "o/n", "refs/pr/7", "c")),
        ("hf://o/n@refs%2Fpr%2F7/c", ("model", "o/n", "refs/pr/7", "c")),
        ("hf://datasets/o/n/c", ("dataset", "o/n", "main", "c")),
        ("hf://models/o/n", ("model", "o/n", "main", "")),
    ],
)
def test_parts_of_an_address_are_those_of_its_client(text, expected):
    found = hub_folder(parse_location(text))
    assert (found.kind, found.repository, found.branch, found.folder) == expected
    uris = pytest.importorskip("huggingface_hub.utils._hf_uris", reason="parses addresses since 1.0")
    client = uris.parse_hf_uri(text)
    assert (client.type, client.id, client.revision or "main", client.path_in_repo) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hf://buckets/o/n", "buckets are only read"),
        ("hf://datasets/o", "account and a repository"),
        ("hf://o/n@", "after an @, a branch"),
        ("hf://o/@main", "after an @, a branch"),
        (f"hf://o/n@{'0a' * 20}", "a commit does not change"),
    ],
)
def test_address_that_cannot_be_written_is_refused(text, reason):
    with pytest.raises(UsageError, match=reason):
        hub_folder(parse_location(text))


def test_status_is_that_of_the_first_answer_in_a_chain():
    class _Answer:
        status_code = 403

    cause = OSError("x")
    cause.response = _Answer()
    error = RuntimeError("uploading")
    error.__cause__ = cause
    assert http_status(error) == 403
    assert http_status(ValueError()) is None
    assert http_status(None) is None
    assert http_status(SystemExit("text")) is None
