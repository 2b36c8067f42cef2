"""Addresses: which are accepted, what their paths are, and that no method of a path acts on a local file."""

from __future__ import annotations

import io
import sys
from pathlib import Path, PosixPath, PurePath

import pytest

from dynmo_ckpt._common.errors import MissingExtraError, UsageError
from dynmo_ckpt.io.remote import LOCAL_ONLY, RemotePath, file_system, parse_location
from dynmo_ckpt.io.uploads import MAX_PARTS, PART_BYTES, is_marker, part_bytes
from dynmo_ckpt.io.urls import is_plain_name
from tests.tables import table


@pytest.mark.parametrize(
    "text", ["s3://bucket", "s3://bucket/run/step-00000004", "gs://b/c d/e", "hf://account/model@refs", "gcs://b/x@y"]
)
def test_address_keeps_its_text(text):
    path = parse_location(text)
    assert isinstance(path, RemotePath)
    assert str(path) == text
    assert str(path / "x" / "y.json") == f"{text}/x/y.json"
    assert str((path / "x").parent) == text
    assert (path / "x" / "y").relative_to(path).as_posix() == "x/y"
    assert path.resolve() == path
    assert path == parse_location(f"{text}/")


@pytest.mark.parametrize("text", ["run", "./s3:/x", "/abs/run", "s3:/bucket", "C:x", ""])
def test_local_path_stays_local(text):
    assert type(parse_location(text)) is PosixPath


@table(
    ("text", "reason"),
    [
        ("ftp://host/x", "not a supported address"),
        ("file:///etc/passwd", "not a supported address"),
        ("https://host/x", "not a supported address"),
        ("s3://", "no bucket"),
        ("s3:///key", "no bucket"),
        ("s3://key:secret@bucket/x", "credentials"),
        ("s3://user@bucket/x", "credentials"),
        ("s3://bucket:9000/x", "colon"),
        ("s3://bucket/x::zip://y", "chain"),
        ("s3://bucket/../other", "relative"),
        ("s3://bucket/a/./b", "relative"),
        ("s3://bucket//a", "empty"),
        ("s3://bucket/a//", "empty"),
        ("s3://bucket/a\nb", "unprintable"),
        ("s3://bucket/a\x00b", "unprintable"),
        ("s3://bucket/*", "patterns"),
        ("s3://bucket/a?versionId=3", "versions"),
        ("s3://bucket/a#b", "fragments"),
        ("s3://bucket/[a]", "patterns"),
        ("s3://bucket/" + "a" * 2000, "longer than"),
        ("hf://model", "account and a model"),
    ],
)
def test_hostile_address_is_refused(text, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        parse_location(text)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_no_method_of_a_path_acts_on_a_local_file(tmp_path, monkeypatch):
    """A method of ``Path`` is pure, of an object store, or refused; new ones of later Pythons must be looked at."""
    monkeypatch.chdir(tmp_path)
    own = {name for name in vars(RemotePath) if not name.startswith("_")}
    pure = {name for name in dir(PurePath) if not name.startswith("_")} | {"cwd", "home", "from_uri", "info"}
    assert {name for name in dir(Path) if not name.startswith("_")} - own - pure == set()
    path = parse_location("s3://bucket/x")
    for name in LOCAL_ONLY:
        with pytest.raises(io.UnsupportedOperation, match="s3://bucket/x"):
            getattr(path, name)()
    with pytest.raises(io.UnsupportedOperation):
        path.open("wb")
    with pytest.raises(FileNotFoundError):
        Path(str(path)).read_bytes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("scheme", "module"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_missing_package_names_its_extra(monkeypatch, scheme, module):
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"dynmo-toolkit\[{'remote' if scheme == 's3' else 'gs'}\]"):
        file_system(scheme)


def test_parts_of_any_object_are_few_enough():
    assert part_bytes(0) == part_bytes(1 << 30) == PART_BYTES
    for size in (10**10, 10**11, 10**12, 5 * 10**12):
        part = part_bytes(size)
        assert part % (1 << 20) == 0
        assert -(-size // part) <= MAX_PARTS
    assert part_bytes(5 * 10**12) < 600 << 20


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\nb", "\x00"])
def test_name_that_leads_elsewhere_is_not_plain(name):
    assert not is_plain_name(name)


def test_markers_are_those_by_which_readers_find_a_model():
    found = ("config.json", "a/config.json", "model.safetensors.index.json", "iter_0000001/.metadata", "manifest.json")
    assert all(map(is_marker, found))
    assert not any(map(is_marker, ("model.safetensors", "tokenizer.json", "conversion.json")))
