"""Joining the processes of a run: what the environment must have."""

from __future__ import annotations

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.parallel.process_groups import init_world

# Without the rule it waits for the timeout of the rendezvous, so that no mutant can show it.
pytestmark = pytest.mark.complete


@pytest.mark.parametrize("rank", ["2", "7", "-1"])
def test_rank_beyond_the_world_is_refused_before_it_connects(monkeypatch, rank):
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"RANK={rank}: must be below WORLD_SIZE=2"):
        init_world("cpu")
