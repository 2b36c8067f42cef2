"""Random tokens instead of a data set, and the id that ends documents."""

from __future__ import annotations

import numpy as np
import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config import DefaultContext, resolve
from dynmo_train.data.batches import open_run_data
from dynmo_train.data.gpt_dataset import end_of_document
from dynmo_train.data.mock import DOCUMENTS, mock_dataset
from tests.distributed.whole_runs import write_data

VALUES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-3,
    "vocab_size": 50,
}


def config_of(**values):
    return resolve(flags={**VALUES, **values}, file={}, command={"family": "gpt"}, context=DefaultContext(world_size=1))


def test_mock_dataset_is_a_function_of_the_seed():
    first, again, other = mock_dataset(50, 1), mock_dataset.__wrapped__(50, 1), mock_dataset(50, 2)
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens[:100], other.tokens[:100])
    assert first.num_documents == DOCUMENTS
    assert sorted(set(first.tokens.tolist())) == list(range(50))


def test_mock_dataset_documents_end_with_the_last_id():
    data = mock_dataset(50, 1)
    last = data.documents[1:] - 1
    assert set(data.tokens[data.starts[last] + data.lengths[last] - 1].tolist()) == {49}
    assert end_of_document(config_of(mock_data=True)) == 49


def test_packed_batch_marks_documents_and_leaves_their_ends_out():
    flags = {"mock_data": True, "reset_attention_mask": True, "eod_mask_loss": True}
    inputs = open_run_data(config_of(**flags)).train_shard(0, 1, 0).inputs
    assert set(inputs) == {"ids", "labels", "document_starts", "loss_mask"}
    assert (inputs["loss_mask"] == (inputs["ids"] != 49)).all()
    assert inputs["document_starts"].shape == inputs["ids"].shape == (4, 16)


def test_packed_documents_without_an_end_of_document_id_are_refused(tmp_path):
    config = config_of(data_path=str(write_data(tmp_path / "data")), eod_mask_loss=True, vocab_size=97)
    with pytest.raises(UsageError, match=r"--eod-mask-loss: the end-of-document token is unknown; give the tokenizer"):
        open_run_data(config)
