"""How a plan is carried out: each source byte read once and checked, each written byte read back and checked."""

import os
import zlib

import numpy as np
import pytest

from dynmo_ckpt._common.console import Format
from dynmo_ckpt.converters.native import plan_native_export
from dynmo_ckpt.formats.choices import WriteOptions
from dynmo_ckpt.io.checks import CheckedRange, combine_parts
from dynmo_ckpt.io.errors import CorruptError, StorageError
from dynmo_ckpt.native.checkpoint import open_native
from dynmo_ckpt.native.reshard import partition_from_counts
from dynmo_ckpt.operations.write import WriteSettings, write_export
from dynmo_ckpt.tensors import tiled_copy
from tests.unit.dynmo_ckpt import native_checkpoints

SETTINGS = WriteSettings(jobs=2, verify=True, overwrite=False, plan_only=False, format=Format.JSON)
TARGETS = [1, 2, 4]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A checkpoint of two tensor-parallel ranks whose matrices take several panels each."""
    monkeypatch.setattr(tiled_copy, "PANEL_BYTES", 512)
    m = native_checkpoints.model(num_layers=2, hidden_size=16, ffn_hidden_size=64, vocab_size=40, padded_vocab_size=48)
    native_checkpoints.save(tmp_path / "in", native_checkpoints.parameters(m), m, tp=2)
    return tmp_path / "in"


def reshard(source, target, tp):
    checkpoint = open_native(source)
    partition = partition_from_counts([1, 1], checkpoint.manifest["model"])
    write_export(source, target, plan_native_export(checkpoint, WriteOptions(tp=tp), partition), SETTINGS)


@pytest.mark.parametrize("tp", TARGETS)
def test_execute_reads_each_source_about_once(source, tmp_path, monkeypatch, tp):
    sizes, own = {}, os.preadv

    def preadv(descriptor, buffers, offset):
        got = own(descriptor, buffers, offset)
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        sizes[place] = sizes.get(place, 0) + got
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    reshard(source, tmp_path / "out", tp)
    files = [path for path in source.iterdir() if path.suffix == ".safetensors"]
    tensors = sum(path.stat().st_size for path in files)
    replicated = (
        sum(path.stat().st_size for path in files) // 5
    )  # norms, positions: one copy for each rank that is written
    assert sum(sizes[str(path)] for path in files) <= tensors + (tp - 1) * replicated


@pytest.mark.parametrize("tp", TARGETS)
def test_execute_every_altered_source_is_refused(source, tmp_path, tp):
    random = np.random.default_rng(tp)
    for path in sorted(source.glob("*.safetensors")):
        payload = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(payload[:8], "little")
        for at in random.integers(begin, len(payload), 8).tolist():
            path.write_bytes(payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])
            with pytest.raises(CorruptError, match="the bytes were altered") as error:
                reshard(source, tmp_path / "out", tp)
            assert path.name in str(error.value)
        path.write_bytes(payload)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tp", TARGETS)
def test_execute_every_wrong_write_is_found(source, tmp_path, monkeypatch, tp):
    own, calls, wrong = os.pwrite, [0], [-1]

    def pwrite(descriptor, payload, offset):
        calls[0] += 1
        if calls[0] == wrong[0]:
            spoilt = bytearray(payload)
            spoilt[(0, len(spoilt) // 2, -1)[calls[0] % 3]] ^= 8
            return own(descriptor, spoilt, offset)
        return own(descriptor, payload, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    reshard(source, tmp_path / "good", tp)
    total = calls[0]
    assert total > 40
    for number in range(1, total, max(1, total // 16)):
        calls[0], wrong[0] = 0, number
        with pytest.raises(StorageError, match="read back differently"):
            reshard(source, tmp_path / "out", tp)
    assert not (tmp_path / "out").exists()


def test_combine_parts_random_ranges_equals_crc32_of_whole():
    payload = np.random.default_rng(0).bytes(1000)

    def part(begin, end):
        return CheckedRange(begin, end - begin, zlib.crc32(payload[begin:end]))

    requested = []

    def missing(begin, end):
        requested.append((begin, end))
        return zlib.crc32(payload[begin:end])

    parts = [part(400, 700), part(100, 400), part(100, 400), part(250, 500), part(800, 900)]
    assert combine_parts(parts, 1000, missing) == zlib.crc32(payload)
    assert requested == [(0, 100), (700, 800), (900, 1000)]
    assert combine_parts([], 0, missing) == 0
