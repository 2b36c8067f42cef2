"""Context parallelism without processes: chunks, balance, and the keys that each chunk sees."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.parallel.context_parallel import ContextRegion


@pytest.mark.parametrize("size", [2, 4])
def test_context_region_ranks_hold_each_token_once(size):
    places = [ContextRegion(None, rank, size).positions(4, torch.device("cpu")).tolist() for rank in range(size)]
    assert sorted(place for each in places for place in each) == list(range(4 * size))
    assert places[0] == [0, 1, 4 * size - 2, 4 * size - 1]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_context_region_ranks_compute_equally_many_scores(size):
    scores = set()
    for rank in range(size):
        region = ContextRegion(None, rank, size)
        places = region.positions(8, torch.device("cpu"))
        assert [int(chunk[-1]) + 1 for chunk in places.chunk(2)] == list(region.keys_of_chunks(8))
        scores.add(int((places + 1).sum()))
    assert len(scores) == 1
