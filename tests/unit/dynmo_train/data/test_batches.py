"""Which samples evaluations take: the validation goes on where it stopped, the test is taken once, both begin again."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of
from dynmo_train.data.batches import held_out_targets, open_samples


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


def test_evaluations_go_on_and_begin_again(tmp_path):
    given = config(write_numbers(tmp_path / "data", 100))
    assert held_out_targets(given) == (3 * 2 * 4, 2 * 4)
    samples = open_samples(given)
    taken = [samples.held_out("valid", 4 * number, 2).inputs["ids"] for number in range(7)]
    seen = [tuple(batch.flatten().tolist()) for batch in taken]
    assert len(set(seen[:6])) == 6, "no batch comes twice while there are others"
    assert seen[6] == seen[0]
    assert all(50 <= number < 90 for batch in seen for number in batch)
    first, second = (samples.held_out("test", consumed, 5).inputs["ids"] for consumed in (0, 4))
    assert min(first.min(), second.min()) >= 90
    assert not first.equal(second)


def test_a_test_part_that_makes_no_batch_is_left_out_unless_it_is_named(tmp_path):
    data = write_numbers(tmp_path / "data", 100)
    share = open_samples(config(data, split="60,39,1"))
    assert share.test is None
    assert "the test part of" in share.no_test
    assert "a batch needs 4" in share.no_test
    nothing = open_samples(config(data, split="60,40,0"))
    assert (nothing.test, nothing.no_test) == (None, None)
    small = write_numbers(tmp_path / "small", 1)
    parts = {"train_data_path": str(data), "valid_data_path": str(data), "data_path": None}
    assert open_samples(config(data, **parts)).test is None
    with pytest.raises(UsageError, match="too small"):
        open_samples(config(data, **parts, test_data_path=str(small)))
