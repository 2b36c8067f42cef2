"""Division of zstandard files at their frames."""

from __future__ import annotations

import io
import json
import random

import pytest

from dynmo_tools.io import codecs
from dynmo_tools.io.frames import line_frames
from dynmo_tools.io.jsonl import Slice, read_lines
from dynmo_tools.runner.task_manifest import Source, cut

zstandard = pytest.importorskip("zstandard")
ROWS = [json.dumps({"text": f"word{at} " * (at % 23)}).encode() for at in range(400)]
TEXT = b"".join(row + b"\n" for row in ROWS)


def own(monkeypatch):
    """As the program writes them: a frame ends after a line."""
    monkeypatch.setattr(codecs, "FRAME_BYTES", 1000)
    target = io.BytesIO()
    writer = codecs.wrap_write(target, ".zst")
    for row in ROWS:
        writer.write(row)
        writer.write(b"\n")
    writer.close()
    return target.getvalue()


def foreign(rng):
    """Frames that end anywhere, also without text, with checksums, and skippable ones between them."""
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    skippable = 0x184D2A53.to_bytes(4, "little") + b"\5\0\0\0lines"
    made, at = skippable, 0
    while at < len(TEXT):
        size = rng.choice([1, 50, 900, 3000, TEXT.index(b"\n", at) + 1 - at])
        made += compressor.compress(TEXT[at : at + size])
        at += size
        made += rng.choice([b"", b"", skippable, compressor.compress(b"")])
    return made


def lines(part):
    return [(line.offset, line.raw) for line in read_lines(part, 1 << 20)]


def test_slices_of_frames_have_each_line_once(tmp_path, monkeypatch):
    path = tmp_path / "in.jsonl.zst"
    files = {"own": own(monkeypatch), **{str(seed): foreign(random.Random(seed)) for seed in range(8)}}
    for name, payload in files.items():
        path.write_bytes(payload)
        whole = lines(Slice(path=path))
        assert [raw for _, raw in whole] == ROWS
        frames, size = line_frames(path)
        assert (size, len(frames) > 3) == (len(TEXT), True), name
        for task_bytes in (1, 700, 5000, 1 << 20):
            parts = cut(Source.of(path), task_bytes)
            assert [line for part in parts for line in lines(part)] == whole
            assert task_bytes > 5000 or len(parts) > 2
    assert len(cut(Source.of(path), 1, has_lines=False)) == 1  # a dump


def test_files_that_are_not_divided(tmp_path):
    path = tmp_path / "in.jsonl.zst"
    one = zstandard.compress(TEXT)
    for payload in (b"", one, one[:-3], one + b"what is this", one + one[:-9], one + one[:2], b"x" * 40):
        path.write_bytes(payload)
        assert cut(Source.of(path), 1) == [Slice(path=path)]
