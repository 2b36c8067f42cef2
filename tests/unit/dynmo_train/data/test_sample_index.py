"""Sample indices: Megatron's own order, the cache, and large ones; blends by weights."""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import pairwise

import numpy as np
import pytest

from dynmo_train.data.blend import BlendedDataset, blend, samples_per_dataset
from dynmo_train.data.gpt_dataset import build_gpt_dataset
from dynmo_train.data.sample_format import SplitRequest
from dynmo_train.data.sample_index import SampleIndexSpec, build_sample_index, megatron_index, stable_index
from dynmo_train.formats.indexed import IndexedDataset, open_indexed
from tests.tables import table

# (first document, samples, tokens of a sample, digest of order and documents), of megatron-core 0.16.1's GPTDataset
# with the seed 1234 on the data set of `documents`.
OF_MEGATRON = [
    (0, 50, 16, "383a0861bea72188"),
    (0, 50, 33, "a6b37acac908175c"),
    (0, 900, 16, "c1f9909f3902a477"),
    (0, 900, 33, "94169d99a1132a7b"),
    (0, 3000, 16, "f57bfe340af260b9"),
    (0, 3000, 33, "0b6b9c37ddcc5310"),
    (0, 4567, 16, "d58d29a01cd637a3"),
    (0, 4567, 33, "7bdf04fe91bc539f"),
    (10, 50, 16, "dbdbb539ede34c4a"),
    (10, 50, 33, "78bbae5f25c4a071"),
    (10, 900, 16, "24dcecbeb74ceca5"),
    (10, 900, 33, "d5959ecf83c69f9f"),
    (10, 3000, 16, "0a3cba40df11b350"),
    (10, 3000, 33, "4351c750fa6d4c07"),
    (10, 4567, 16, "1663fca956412af1"),
    (10, 4567, 33, "a060867d0dcc6f7a"),
]


def documents(folder):
    """60 documents of random length, in the mmap format."""
    random = np.random.default_rng(5)
    made = [(np.cumsum(random.integers(1, 4, random.integers(80, 300))) % 97).astype("<u2") for _ in range(60)]
    (folder / "data.bin").write_bytes(b"".join(document.tobytes() for document in made))
    lengths = np.array([len(document) for document in made])
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(made), len(made) + 1)
    pointers = np.concatenate([[0], lengths.cumsum()[:-1] * 2])
    arrays = (lengths.astype("<i4"), pointers.astype("<i8"), np.arange(len(made) + 1).astype("<i8"))
    (folder / "data.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return open_indexed(str(folder / "data"))


def spec(**changes):
    documents = {"first_document": 0, "end_document": 60, "split_index": 0}
    samples = {"seq_length": 16, "seed": 1234, "num_samples": 900, "order": "stable"}
    return SampleIndexSpec(**documents | samples | changes)


@table(("low", "samples", "length", "digest"), OF_MEGATRON)
def test_megatron_index_equals_megatrons_order(tmp_path, low, samples, length, digest):
    high = {0: 60, 10: 48}[low]
    spec_ = spec(first_document=low, end_document=high, num_samples=samples, seq_length=length, order="megatron")
    index = megatron_index(documents(tmp_path), spec_)
    payload = index.order.astype(np.int64).tobytes() + index.pieces.astype(np.int64).tobytes()
    assert hashlib.sha256(payload).hexdigest()[:16] == digest


@pytest.mark.parametrize("order", ["stable", "megatron"])
def test_cached_index_equals_the_built_one_and_is_mapped(tmp_path, monkeypatch, order):
    monkeypatch.setattr("dynmo_train.data.index_cache.MIN_CACHED_BYTES", 0)
    source, cache = documents(tmp_path), tmp_path / "deep" / "cache"
    spec_ = spec(order=order)
    built = build_sample_index(source, spec_, None)
    first = build_sample_index(source, spec_, cache)
    files = sorted(path.name for path in cache.iterdir())
    second = build_sample_index(source, spec_, cache)
    assert [isinstance(part, np.memmap) for part in (second.pieces, second.ends, second.order)] == [True] * 3
    for name in ("pieces", "ends", "order"):
        assert np.array_equal(getattr(built, name), getattr(first, name))
        assert np.array_equal(getattr(built, name), getattr(second, name))
    assert sorted(path.name for path in cache.iterdir()) == files
    assert not [name for name in files if ".tmp" in name]
    [facts] = [json.loads(path.read_text()) for path in cache.glob("*.json")]
    assert (facts["num_samples"], facts["order"], facts["sequences"]) == (900, order, 60)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"num_samples": 901}, {"seq_length": 15}, {"end_document": 59}, {"order": "megatron"}]
)
def test_another_spec_has_another_cache_entry(tmp_path, monkeypatch, change):
    monkeypatch.setattr("dynmo_train.data.index_cache.MIN_CACHED_BYTES", 0)
    source = documents(tmp_path)
    build_sample_index(source, spec(), tmp_path / "cache")
    build_sample_index(source, spec(**change), tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2


def test_rewritten_data_set_has_another_cache_entry(tmp_path, monkeypatch):
    monkeypatch.setattr("dynmo_train.data.index_cache.MIN_CACHED_BYTES", 0)
    build_sample_index(documents(tmp_path), spec(), tmp_path / "cache")
    build_sample_index(documents(tmp_path), spec(), tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2


def test_damaged_or_unwritable_cache_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr("dynmo_train.data.index_cache.MIN_CACHED_BYTES", 0)
    source = documents(tmp_path)
    built = build_sample_index(source, spec(), tmp_path / "cache")
    for path in (tmp_path / "cache").glob("*-ends.npy"):
        path.write_bytes(path.read_bytes()[:50])
    again = build_sample_index(source, spec(), tmp_path / "cache")
    assert np.array_equal(built.order, again.order)
    (tmp_path / "file").write_text("in the way")
    assert np.array_equal(build_sample_index(source, spec(), tmp_path / "file").order, built.order)


def test_small_indices_are_not_cached(tmp_path):
    build_sample_index(documents(tmp_path), spec(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_stable_index_of_more_samples_begins_with_the_same_samples(tmp_path):
    source = documents(tmp_path)
    few, many = (stable_index(source, spec(num_samples=count)) for count in (700, 3000))
    assert few.order.tolist() == many.order[:700].tolist()
    shared = int(np.searchsorted(few.ends, 700 * 16 + 1)) + 1
    assert few.pieces[:shared].tolist() == many.pieces[:shared].tolist()


WEIGHTS = [(3.0, 1.0), (1.0,), (0.2, 0.5, 0.3), (1.0, 1.0, 1.0), (0.9, 0.01, 0.05, 0.04), (1e-3, 5.0, 0.7)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_blend_in_pieces_equals_the_whole_and_has_each_sample_once(weights):
    sets, samples = blend(weights, 0, 1000)
    cuts = [0, 1, 2, 7, 64, 65, 333, 999, 1000]
    parts = [blend(weights, begin, end) for begin, end in pairwise(cuts)]
    assert np.concatenate([part[0] for part in parts]).tolist() == sets.tolist()
    assert np.concatenate([part[1] for part in parts]).tolist() == samples.tolist()
    for number in range(len(weights)):
        mine = samples[sets == number]
        assert mine.tolist() == list(range(len(mine)))
    for count in (10, 100, 1000):
        for number, weight in enumerate(weights):
            share = weight / sum(weights) * count
            assert abs((sets[:count] == number).sum() - share) <= len(weights) / 2 + 1
    needed = samples_per_dataset(weights, 1000)
    assert all((sets == number).sum() <= needed[number] for number in range(len(weights)))


def test_blend_of_weights_3_and_1_equals_a_written_one():
    sets, samples = blend((3.0, 1.0), 0, 8)
    assert sets.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert samples.tolist() == [0, 1, 0, 2, 3, 4, 1, 5]


def test_blended_batch_equals_the_samples_of_its_data_sets():
    def source(first):
        tokens = np.arange(first, first + 400, dtype=np.int32)
        return IndexedDataset(
            prefix="memory",
            tokens=tokens,
            lengths=np.full(40, 10, np.int32),
            starts=np.arange(0, 400, 10, dtype=np.int64),
            documents=np.arange(41, dtype=np.int64),
        )

    parts = [
        build_gpt_dataset(
            SplitRequest(source=source(first), split="train", shares=(1.0, 0.0, 0.0), num_samples=300, batch_size=1),
            seq_length=5,
            seed=1,
            vocab_size=10_000,
        )
        for first in (0, 1000)
    ]
    blended = BlendedDataset(parts=parts, weights=(0.7, 0.3), length=300)
    sets, samples = blend((0.7, 0.3), 50, 90)
    expected = [parts[number].batch([sample])[0].tolist() for number, sample in zip(sets, samples, strict=True)]
    assert blended.batch(range(50, 90)).tolist() == expected
    assert {row[0] // 1000 for row in expected} == {0, 1}
