"""Samples of streamed documents: the tokens of binarized data, from any position, in any process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from dynmo_train._common.errors import MissingExtraError, UsageError
from dynmo_train.config import DefaultContext, config_of
from dynmo_train.data.batches import open_run_data
from dynmo_train.data.hf_stream import (
    BLOCK,
    Packer,
    StreamError,
    StreamPosition,
    StreamSpec,
    open_hf_dataset,
    read_blocks,
)
from dynmo_train.data.loader import BatchLoader
from dynmo_train.formats.indexed import open_indexed

# A mark, because a module that is skipped as a whole has no tests to collect.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed"),
]

WORDS = {"<|endoftext|>": 0, "<unk>": 1} | {f"w{number}": number + 2 for number in range(60)}
SEQ_LENGTH = 12
DOCUMENTS = 3 * BLOCK - 5


def write_documents(folder: Path, counts: tuple[int, ...] = (70, 0, 2, 90, DOCUMENTS - 162)) -> list[Path]:
    """JSON files with documents of 0 to 29 words; some are empty."""
    random, files = np.random.default_rng(3), []
    for number, count in enumerate(counts):
        texts = [" ".join(f"w{word}" for word in random.integers(60, size=random.integers(30))) for _ in range(count)]
        files.append(folder / f"part{number}.jsonl")
        lines = [json.dumps({"text": text, "id": index}) + "\n" for index, text in enumerate(texts)]
        files[-1].write_text("".join(lines), encoding="utf-8")
    return [file for file in files if file.stat().st_size]


def write_vocabulary(folder: Path) -> Path:
    path = folder / "words.json"
    path.write_text(json.dumps(WORDS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    for empty in set(folder.glob("part*.jsonl")) - set(write_documents(folder)):
        empty.unlink()
    write_vocabulary(folder)
    return folder


def config(folder: Path, world: int = 1, **more):
    options = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "seq_length": SEQ_LENGTH,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 6,
        "lr": 1e-3,
        "eval_iters": 0,
        "pipeline_model_parallel_size": 1,
        "hf_dataset": str(folder / "part*.jsonl"),
        "tokenizer_type": "WhitespaceVocab",
        "vocab_file": str(folder / "words.json"),
        "vocab_size": len(WORDS),
    }
    return config_of(DefaultContext(world_size=world), **(options | more))


def spec(folder: Path, **more) -> StreamSpec:
    fields = {"name": None, "split": "train", "revision": None, "field": "text", "shuffle_buffer": 0, "seed": (1, 0)}
    return StreamSpec(**({"flag": "--hf-dataset", "dataset": str(folder / "part*.jsonl")} | fields | more))


def texts(folder: Path) -> list[str]:
    """All documents that are not empty, in the order of the files."""
    lines = [line for file in sorted(folder.glob("part*.jsonl")) for line in file.read_text().splitlines()]
    return [text for text in (json.loads(line)["text"] for line in lines) if text]


def encode(text: str) -> list[int]:
    return [*(WORDS[word] for word in text.split()), 0]


def samples_of(documents: list[str], count: int) -> np.ndarray:
    stream = np.array([token for text in documents for token in encode(text)])
    return np.stack([stream[number * SEQ_LENGTH :][: SEQ_LENGTH + 1] for number in range(count)])


@pytest.mark.complete
def test_stream_has_the_tokens_of_binarized_documents(folder, tmp_path):
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(file.read_text() for file in sorted(folder.glob("part*.jsonl"))), encoding="utf-8")
    tokenizer = tmp_path / "tokenizer.json"
    for words in (
        ["train-tokenizer", str(whole), "-o", str(tokenizer), "--vocab-size", "300"],
        ["binarize", str(whole), "-o", str(tmp_path / "data"), "--tokenizer", str(tokenizer), "--append-eod"],
    ):
        subprocess.run([sys.executable, "-m", "dynmo_tools", *words], check=True, capture_output=True)
    binarized = open_indexed(str(tmp_path / "data_text_document")).tokens
    given = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer), "vocab_file": None}
    data = open_hf_dataset(config(folder, **given, vocab_size=300), "train")
    count = (len(binarized) - 1) // SEQ_LENGTH
    assert count > 100
    rows = data.batch(range(count))
    assert np.array_equal(rows[:, :-1].reshape(-1), binarized[: count * SEQ_LENGTH])
    assert np.array_equal(rows[:, -1], binarized[SEQ_LENGTH::SEQ_LENGTH][:count])


@pytest.mark.parametrize("buffer", [0, 100])
def test_stream_from_any_stored_position_continues_exactly(folder, buffer):
    stream = spec(folder, shuffle_buffer=buffer)
    count = 700  # more than two epochs
    whole = Packer(stream, encode, SEQ_LENGTH, StreamPosition())
    rows, positions = [], []
    for _ in range(count):
        positions.append(whole.position())
        rows.append(whole.rows(1)[0])
    assert positions[-1].epoch >= 2
    assert {position.shard for position in positions} > {0}
    for number in range(0, count, 23):
        stored = StreamPosition(**json.loads(json.dumps(vars(positions[number]))))
        resumed = Packer(stream, encode, SEQ_LENGTH, stored)
        assert resumed.sample == number
        assert np.array_equal(resumed.rows(5), np.stack(rows[number : number + 5])[:5])


def test_stream_without_shuffle_keeps_the_order_over_epochs(folder):
    documents = texts(folder)
    count = (2 * sum(len(encode(text)) for text in documents) - 1) // SEQ_LENGTH
    packer = Packer(spec(folder), encode, SEQ_LENGTH, StreamPosition())
    assert np.array_equal(packer.rows(count), samples_of(documents * 2, count))


def test_shuffle_moves_every_document_once_an_epoch(folder):
    def epoch(blocks, number: int) -> list[str]:
        return [text for at, block in blocks if at.epoch == number for text in block]

    def orders(**more) -> list[list[str]]:
        blocks, found = read_blocks(spec(folder, **more), StreamPosition()), []
        while (each := next(blocks))[0].epoch < 2:
            found.append(each)
        return [epoch(found, number) for number in (0, 1)]

    plain, shuffled, other = orders(), orders(shuffle_buffer=100), orders(shuffle_buffer=100, seed=(2, 0))
    assert plain[0] == plain[1] == texts(folder)
    for order in (*shuffled, *other):
        assert sorted(order) == sorted(plain[0])
    assert len({tuple(order) for order in (plain[0], *shuffled, *other)}) == 5
    assert shuffled == orders(shuffle_buffer=100)


@pytest.mark.parametrize("options", [{}, {"hf_shuffle_buffer": 20}, {"curriculum_shortest": 4, "curriculum_steps": 4}])
def test_two_replicas_read_the_batches_of_one(folder, options):
    one, two = (open_run_data(config(folder, world, **options)) for world in (1, 2))
    for step in range(1, 7):
        consumed = (step - 1) * 8
        whole = one.train_shard(consumed, step, 0).inputs
        parts = [two.train_shard(consumed, step, replica).inputs for replica in (0, 1)]
        for name, tensor in whole.items():
            assert tensor.equal(torch.cat([part[name] for part in parts]))


def test_stream_in_a_worker_process_gives_the_same_batches(folder):
    here, there = (open_run_data(config(folder, hf_shuffle_buffer=20)) for _ in range(2))
    batches = BatchLoader(
        lambda consumed, step: there.train_shard(consumed, step, 0), lambda _: 8, 6, num_workers=1, pin_memory=False
    )
    for step in range(1, 7):
        found, expected = batches.batch((step - 1) * 8, step), here.train_shard((step - 1) * 8, step, 0)
        assert found.inputs["ids"].equal(expected.inputs["ids"])
        assert found.position == expected.position
        assert found.position["sample"] == step * 8
    batches.close()


def test_position_of_another_stream_is_ignored(folder, capsys):
    data = open_run_data(config(folder))
    batch = data.train_shard(40, 6, 0)
    stored = {"train": json.loads(json.dumps(batch.position))}
    resumed = open_run_data(config(folder), 6, 48, stored)
    assert resumed.train.first_sample == 48
    assert capsys.readouterr().err == ""
    other = open_run_data(config(folder, hf_shuffle_buffer=5), 6, 48, stored)
    assert other.train.first_sample == 0
    assert "the first 48 samples are read again" in capsys.readouterr().err
    expected = data.train_shard(48, 7, 0).inputs["ids"]
    assert resumed.train_shard(48, 7, 0).inputs["ids"].equal(expected)
    assert open_run_data(config(folder)).train_shard(48, 7, 0).inputs["ids"].equal(expected)
    # A request out of order, before the stored sample, is read from the start.
    assert resumed.train_shard(40, 6, 0).inputs["ids"].equal(batch.inputs["ids"])


def test_validation_reads_its_own_data_without_shuffle(folder, tmp_path):
    (tmp_path / "valid.txt").write_text("w1 w2 w3\nw4 w5\n", encoding="utf-8")
    options = {"eval_iters": 2, "hf_valid_dataset": str(tmp_path / "valid.txt"), "hf_shuffle_buffer": 50}
    data = open_run_data(config(folder, **options))
    row = data.eval_batch("valid", 0, 0).inputs["ids"][0]
    assert row.tolist() == [3, 4, 5, 0, 6, 7, 0, 3, 4, 5, 0, 6]
    assert data.eval_positions()["valid"]["sample"] == 8
    assert data.test is None


def test_documents_of_a_stream_are_masked(folder):
    data = open_run_data(config(folder, reset_attention_mask=True, eod_mask_loss=True))
    inputs = data.train_shard(0, 1, 0).inputs
    assert inputs["loss_mask"].equal((inputs["ids"] != 0).long())
    row, end = (inputs["ids"][:, :-1] == 0).nonzero()[0].tolist()
    assert inputs["document_starts"][row, end + 1 :].min() == end + 1


def bad(folder: Path, tmp_path: Path, **more):
    """A run whose data set is one file with ``lines``."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in more.pop("lines")), encoding="utf-8")
    return config(folder, hf_dataset=str(path), **more)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"body": "w1"}], "has the fields body, and no 'text'; give the field with the text: --hf-text-field"),
        ([{"text": 5}], "the field 'text' has a int; it must be text"),
        ([{"text": " "}, {"text": None}], "has no text in the field 'text' of the split 'train'"),
    ],
)
def test_stream_without_text_is_refused_at_the_start(folder, tmp_path, lines, message):
    with pytest.raises(UsageError, match=message):
        open_run_data(bad(folder, tmp_path, lines=lines))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_dataset": "missing.jsonl"}, "Unable to find .*missing.jsonl'; give the name of a data set on the"),
        ({"hf_dataset": "missing*.jsonl"}, "no file matches the pattern"),
        ({"hf_dataset_split": "books"}, "Bad split: books. Available splits: "),
        ({"vocab_size": 10}, "--vocab-size 10: must be at least 62"),
    ],
)
def test_stream_that_cannot_be_opened_is_refused(folder, options, message):
    with pytest.raises(UsageError, match=message):
        open_run_data(config(folder, **options))


def test_stream_without_the_package_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dynmo-toolkit\[datasets\]'"):
        open_run_data(config(folder))


def test_fault_in_a_worker_process_is_a_problem_of_the_batch(folder, tmp_path):
    options = bad(folder, tmp_path, lines=[{"text": "w1 w2"}] * 200 + [{"text": None, "other": 1}])
    data = open_run_data(options)
    Path(options.data.hf_dataset).unlink()
    batches = BatchLoader(lambda *at: data.train_shard(*at, 0), lambda _: 8, 6, num_workers=1, pin_memory=False)
    assert "data.jsonl" in batches.batch(0, 1).problem
    batches.close()
    for _ in range(2):  # again too: the generators have ended
        with pytest.raises(StreamError, match=r"data\.jsonl"):
            data.train_shard(0, 1, 0)


def test_tokenizer_that_makes_no_tokens_ends_the_run(folder):
    with pytest.raises(StreamError, match="the tokenizer makes no token of any document"):
        Packer(spec(folder), lambda _: [], SEQ_LENGTH, StreamPosition()).rows(1)


def test_parquet_position_continues_exactly(folder, tmp_path):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    documents = texts(folder)
    pq.write_table(pa.table({"text": documents}), tmp_path / "part.parquet", row_group_size=50)
    stream = spec(folder, dataset=str(tmp_path / "part.parquet"))
    packer = Packer(stream, encode, SEQ_LENGTH, StreamPosition())
    packer.skip(150)
    at = packer.position()
    assert at.state is not None
    expected = samples_of(documents, 160)[150:]
    assert np.array_equal(packer.rows(10), expected)
    assert np.array_equal(Packer(stream, encode, SEQ_LENGTH, at).rows(10), expected)
    # The state of a block, not the start of the file.
    assert not np.array_equal(Packer(stream, encode, SEQ_LENGTH, replace(at, state=None)).rows(10), expected)
