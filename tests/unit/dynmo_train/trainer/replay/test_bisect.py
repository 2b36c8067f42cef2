"""Two runs that one set of processes cannot execute are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.trainer.replay.bisect import Pair, bisect_runs
from dynmo_train.trainer.replay.stored_run import StoredRun


def stored(name: str, **parallel: int) -> StoredRun:
    return StoredRun(path=Path(name), document={"config": {"parallel": {"data_parallel_size": 1} | parallel}}, steps={})


def test_bisect_runs_of_other_layouts_are_refused_with_their_sizes():
    pair = Pair(runs=(stored("one"), stored("other", data_parallel_size=2, zero_stage=1)), flags={}, world=None)
    message = "--data-parallel-size 1 and 2; --zero-stage None and 1"
    with pytest.raises(UsageError, match=re.escape(message)):
        bisect_runs(pair, 8)
