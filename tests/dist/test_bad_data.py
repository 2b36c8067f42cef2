"""Data that cannot be trained on: one clear line from rank 0, exit code 2, and no process is left behind."""

from __future__ import annotations

import time

import numpy as np
import pytest
from whole_runs import arguments, run_command, write_data
from workers import run_workers

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def cut_index(prefix):
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:-9])


def cut_tokens(prefix):
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])


def high_id(prefix):
    """An id beyond the vocabulary in every document, which only the batches show."""
    path = prefix.with_suffix(".bin")
    tokens = np.frombuffer(path.read_bytes(), "<u2").copy()
    tokens[::50] = 4000
    path.write_bytes(tokens.tobytes())


CASES = {
    "truncated index": (cut_index, {}, "truncated"),
    "tokens missing": (cut_tokens, {}, "add up to"),
    "an id beyond the vocabulary": (high_id, {}, "holds the token id 4000; the vocabulary has the ids 0 to 96"),
    "too few samples": (None, {"seq_length": "512", "global_batch_size": "32"}, "is too small"),
    "no data": (None, {"data_path": "nowhere/data"}, "no such file"),
    "more stages than layers": (None, {"num_layers": "1", "granularity": "layer", "virtual_stages_per_worker": "2",
                                       "schedule": "interleaved-1f1b", "freeze_schedule": None}, "more than the 3 items"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_data_end_every_process_with_one_message(tmp_path, case):
    damage, options, told = CASES[case]
    data = write_data(tmp_path / "data")
    if damage is not None:
        damage(data)
    line = arguments(data, tmp_path / "run", **options)
    begun = time.monotonic()
    (first, talk), (second, silence) = run_workers(run_command, 2, line, joins=False)
    assert time.monotonic() - begun < 60
    assert (first, second) == (2, 2)
    errors = [text for text in talk.splitlines() if text.startswith("dynmo-train: error: ")]
    assert len(errors) == 1, talk
    assert told in talk
    assert "Traceback" not in talk
    assert "error" not in silence
