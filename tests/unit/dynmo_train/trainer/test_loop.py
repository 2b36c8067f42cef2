"""Errors that end a run."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.trainer.failures import lost_connection, out_of_memory


def test_out_of_memory_is_found_in_what_caused_an_error():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    wrapped = RuntimeError("[Stage 0] failed to run forward")
    wrapped.__cause__ = raised.value
    problem = out_of_memory(wrapped)
    assert problem is not None
    assert "--recompute-granularity full" in problem
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) is not None


def test_out_of_memory_leaves_other_errors():
    assert out_of_memory(RuntimeError("shapes differ")) is None


def test_lost_connection_is_named_in_a_few_words():
    closed = RuntimeError("[../third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    assert lost_connection(closed) == "connection closed by peer"
    outer = RuntimeError("the step failed")
    outer.__cause__ = closed
    assert lost_connection(outer) == "connection closed by peer"
    assert lost_connection(RuntimeError("shapes do not match")) is None
    assert lost_connection(None) is None
