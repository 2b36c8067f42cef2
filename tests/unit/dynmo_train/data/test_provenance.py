"""The trainer refuses a data set of another vocabulary than its tokenizer's, as its sidecar states it."""

from __future__ import annotations

import json
import struct

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of
from dynmo_train.data.batches import open_source
from dynmo_train.formats.dataset import digest_vocabulary

WORDS = {"<unk>": 0, "<|endoftext|>": 1, "the": 2, "house": 3}
DIGEST = "0" * 64


@pytest.fixture
def prefix(tmp_path):
    """A data set of one document of three tokens, with a sidecar."""
    (tmp_path / "data.bin").write_bytes(struct.pack("<3H", 2, 3, 1))
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, 2) + struct.pack("<iqqq", 3, 0, 0, 1)
    (tmp_path / "data.idx").write_bytes(index)
    document = {
        "format": "dynmo.dataset",
        "version": 1,
        "written_by": "test",
        "created_utc": "2026-11-22T10:00:00Z",
        "tokenizer": {
            "type": "WhitespaceVocab",
            "vocab_size": 4,
            "vocab_sha256": digest_vocabulary(WORDS),
            "files": [],
        },
        "eod_id": 1,
        "inputs": [],
        "recipe": {"sha256": DIGEST, "steps": [{"step": "binarize", "settings": {}}]},
        "bin": {"pieces": [{"bytes": 6, "sha256": DIGEST}]},
        "idx": {"bytes": len(index), "sha256": DIGEST},
    }
    (tmp_path / "data.dataset.json").write_text(json.dumps(document))
    return str(tmp_path / "data")


@pytest.fixture
def config(tmp_path, prefix):
    def make(words=None, vocab_size=4):
        given = {}
        if words is not None:
            (tmp_path / "words.json").write_text(json.dumps(words))
            given = {"tokenizer_type": "WhitespaceVocab", "vocab_file": str(tmp_path / "words.json")}
        return config_of(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            seq_length=4,
            micro_batch_size=1,
            train_iters=1,
            lr=0.1,
            vocab_size=vocab_size,
            data_path=prefix,
            **given,
        )

    return make


@pytest.mark.parametrize(("words", "vocab_size"), [(None, 4), (None, 128), (WORDS, 4), (WORDS, 104)])
def test_data_set_of_the_same_vocabulary_is_opened(config, prefix, words, vocab_size):
    assert open_source(config(words, vocab_size), prefix).tokens.tolist() == [2, 3, 1]


def test_data_set_of_another_vocabulary_is_refused(config, prefix):
    swapped = {**WORDS, "the": 3, "house": 2}
    with pytest.raises(UsageError, match=r"another vocabulary: give the data set's tokenizer, or binarize"):
        open_source(config(swapped), prefix)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_data_set_named_by_a_file_of_another_vocabulary_is_refused(config, prefix, ending):
    with pytest.raises(UsageError, match="another vocabulary"):
        open_source(config({**WORDS, "the": 3, "house": 2}), prefix + ending)


def test_data_set_of_more_ids_than_rows_is_refused(config, prefix):
    with pytest.raises(UsageError, match=r"--vocab-size 3 is too small: give --vocab-size 4"):
        open_source(config(vocab_size=3), prefix)


def test_data_set_without_a_sidecar_is_opened(config, prefix, tmp_path):
    (tmp_path / "data.dataset.json").unlink()
    assert open_source(config({**WORDS, "the": 3, "house": 2}, 4), prefix).num_documents == 1


def test_sidecar_of_another_bin_is_refused(config, prefix, tmp_path):
    (tmp_path / "data.bin").write_bytes(struct.pack("<4H", 2, 3, 1, 1))
    with pytest.raises(UsageError, match="remove the sidecar if it is old"):
        open_source(config(), prefix)
