from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma

import pytest
import zstandard

from dynmo_tools._common.errors import DynmoError
from dynmo_tools.io.codecs import TruncatedError, wrap_write
from dynmo_tools.io.jsonl import (
    BadLineError,
    Line,
    Slice,
    encode_row,
    parse_line,
    read_lines,
    repair_utf8,
    split_lines,
    text_of,
)

LINES = [b'{"text": "one"}', b'{"text": "two \xc3\xa9"}', b"", b'{"text": "three"}']
PAYLOAD = b"\n".join(LINES) + b"\n"
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("ending", COMPRESS)
def test_read_lines_reads_every_compression(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](PAYLOAD))
    lines = list(read_lines(Slice(path=path), 1 << 20))
    assert [line.raw for line in lines] == LINES
    assert [line.offset for line in lines] == [0, 16, 35, 36]
    assert [line.number for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_concatenated_streams_are_read_as_one(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](PAYLOAD) + COMPRESS[ending](PAYLOAD))
    assert [line.raw for line in read_lines(Slice(path=path), 1 << 20)] == LINES * 2


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_read_lines_of_a_truncated_stream_raises(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    whole = COMPRESS[ending](PAYLOAD * 100)
    path.write_bytes(whole[: len(whole) - 12])
    with pytest.raises(TruncatedError, match="is truncated"):
        list(read_lines(Slice(path=path), 1 << 20))


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_read_lines_of_another_format_raises(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(PAYLOAD * 10)
    with pytest.raises(DynmoError, match=r"a\.jsonl"):
        list(read_lines(Slice(path=path), 1 << 20))


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_written_stream_is_read_unchanged(tmp_path, ending):
    target = io.BytesIO()
    writer = wrap_write(target, ending)
    writer.write(PAYLOAD)
    writer.close()
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(target.getvalue())
    assert [line.raw for line in read_lines(Slice(path=path), 1 << 20)] == LINES


def test_split_lines_skips_long_lines_in_bounded_memory():
    long = b"x" * (5 << 20)
    lines = list(split_lines(io.BytesIO(b"a\n" + long + b"\nb\n" + long), 0, 1000))
    assert lines[0] == Line(1, 0, b"a", b"", 2)
    assert (lines[1].raw, lines[1].offset, len(lines[1].head)) == (None, 2, 200)
    assert lines[2] == Line(3, 2 + len(long) + 1, b"b", b"", 2)
    assert lines[3].raw is None


@pytest.mark.parametrize("length", [999, 1000])
def test_split_lines_allows_lines_at_the_limit(length):
    assert next(split_lines(io.BytesIO(b"x" * length + b"\n"), 0, 1000)).raw == b"x" * length
    assert next(split_lines(io.BytesIO(b"x" * 1001 + b"\n"), 0, 1000)).raw is None


def test_byte_order_marks_of_concatenated_files_are_removed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(2 * (b"\xef\xbb\xbf" + PAYLOAD))
    raws = [line.raw for line in read_lines(Slice(path=path), 1 << 20)]
    assert raws == 2 * LINES


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"text": "a"', "json"),
        (b"[1, 2]", "json"),
        (b'"text"', "json"),
        (b"not json", "json"),
        (b'{"text": "\xff"}', "utf8"),
    ],
)
def test_parse_line_of_invalid_lines_states_the_reason(raw, reason):
    with pytest.raises(BadLineError) as caught:
        parse_line(raw)
    assert caught.value.reason == reason


def test_repair_utf8_replaces_invalid_bytes():
    assert parse_line(repair_utf8(b'{"text": "a\xffb"}')) == {"text": "a\ufffdb"}
    assert repair_utf8("schön".encode()) == "schön".encode()


def test_parse_line_accepts_numbers_outside_json():
    value = parse_line(b'{"text": "a", "score": NaN}')
    assert json.loads(encode_row(value))["score"] != 0
    assert b"NaN" in encode_row(value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"other": "a"}, "key"),
        ({"text": None}, "type"),
        ({"text": 3}, "type"),
        ({"text": ["a"]}, "type"),
        ({"text": "a\ud800"}, "surrogate"),
    ],
)
def test_text_of_documents_without_text_states_the_reason(value, reason):
    with pytest.raises(BadLineError) as caught:
        text_of(value, "text")
    assert caught.value.reason == reason


def test_text_of_dotted_key_prefers_the_key_itself():
    assert text_of({"a": {"b": "deep"}}, "a.b") == "deep"
    assert text_of({"a.b": "flat", "a": {"b": "deep"}}, "a.b") == "flat"


def test_encode_row_keeps_the_order_of_keys():
    value = {"z": 1, "text": "é", "a": {"y": [None, True]}}
    assert list(json.loads(encode_row(value))) == ["z", "text", "a"]
    assert json.loads(encode_row(value)) == value
