"""Samples of evaluations: validation continues after the last evaluation, and starts over after the last batch."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of
from dynmo_train.data.batches import eval_samples, open_run_data


def write_numbers(prefix: Path, documents: int) -> Path:
    """Documents of eleven tokens; every token of document ``n`` is ``n``."""
    tokens = np.repeat(np.arange(documents), 11).astype("<u2")
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    arrays = (
        np.full(documents, 11, "<i4"),
        np.arange(documents, dtype="<i8") * 22,
        np.arange(documents + 1, dtype="<i8"),
    )
    prefix.with_suffix(".idx").write_bytes(header + b"".join(each.tobytes() for each in arrays))
    return prefix


def config(prefix: Path, **more):
    return config_of(
        **{
            "num_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "seq_length": 10,
            "vocab_size": 100,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": 5,
            "eval_interval": 2,
            "eval_iters": 2,
            "lr": 1e-3,
            "data_path": str(prefix),
            "split": "50,40,10",
        }
        | more
    )


def test_eval_batches_continue_and_start_over(tmp_path):
    options = config(write_numbers(tmp_path / "data", 100))
    assert eval_samples(options) == (3 * 2 * 4, 2 * 4)
    data = open_run_data(options)
    inputs = [data.eval_batch("valid", 4 * number, 2).inputs["ids"] for number in range(7)]
    batches = [tuple(batch.flatten().tolist()) for batch in inputs]
    assert len(set(batches[:6])) == 6, "no batch comes twice while there are others"
    assert batches[6] == batches[0]
    assert all(50 <= number < 90 for batch in batches for number in batch)
    first, second = (data.eval_batch("test", consumed, 5).inputs["ids"] for consumed in (0, 4))
    assert min(first.min(), second.min()) >= 90
    assert not first.equal(second)


def test_too_small_test_split_is_skipped_unless_it_is_named(tmp_path):
    data = write_numbers(tmp_path / "data", 100)
    share = open_run_data(config(data, split="60,39,1"))
    assert share.test is None
    assert "the test split of" in share.no_test
    assert "a batch needs 4" in share.no_test
    nothing = open_run_data(config(data, split="60,40,0"))
    assert (nothing.test, nothing.no_test) == (None, None)
    small = write_numbers(tmp_path / "small", 1)
    parts = {"train_data_path": str(data), "valid_data_path": str(data), "data_path": None}
    assert open_run_data(config(data, **parts)).test is None
    with pytest.raises(UsageError, match="too small"):
        open_run_data(config(data, **parts, test_data_path=str(small)))
