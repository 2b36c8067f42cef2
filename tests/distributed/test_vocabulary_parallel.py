"""Shards of word table and output layer on all pipeline ranks: their bits depend on the number of shards only."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache

import pytest

from tests.distributed.scenario import Scenario, merged, play
from tests.distributed.whole_runs import figures, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

SHARDED = Scenario(tied=False, shards=4)
CASES = {
    "2 workers, operations of a plan": (
        2,
        replace(
            SHARDED,
            schedule="custom",
            operations=(
                "0F0 0F1 0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3",
                "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3",
            ),
        ),
    ),
}


@cache
def reference(scenario: Scenario) -> dict:
    """The scenario on one worker, GPipe."""
    plain = replace(scenario, schedule="gpipe", virtual=1, recompute=False, moves=(), start=None)
    return run_workers(play, 1, plain)[0]


@pytest.mark.parametrize("case", CASES, ids=CASES)
def test_shards_anywhere_have_the_same_bits(case):
    workers, scenario = CASES[case]
    expected = reference(scenario)
    found = merged(run_workers(play, workers, scenario))
    assert found["losses"] == expected["losses"]
    assert found["norms"] == expected["norms"]
    assert found["eval_loss"] == expected["eval_loss"]
    assert found["weights"] == expected["weights"]


def plain_values(scenario: Scenario) -> dict:
    return run_workers(play, 1, replace(scenario, shards=None))[0]


@pytest.mark.parametrize(("workers", "tied", "precision"), [(2, False, "fp32"), (4, False, "fp16"), (3, True, "fp32")])
def test_shards_are_near_the_whole_tables(workers, tied, precision):
    scenario = replace(SHARDED, tied=tied, prune=False, freeze=(), precision=precision)
    whole = plain_values(scenario)
    found = merged(run_workers(play, workers, scenario))
    tolerance = 2e-3 if precision == "fp16" else 1e-5
    assert found["losses"] == pytest.approx(whole["losses"], rel=tolerance)
    # None where the loss scale was too large; the steps are the same.
    norms = [[-1.0 if norm is None else norm for norm in each["norms"]] for each in (found, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=tolerance)
    assert found["eval_loss"] == pytest.approx(whole["eval_loss"], rel=tolerance)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("vocabulary") / "data")


UNTIED = "--untie-embeddings-and-output-weights"


def test_checkpoint_has_the_whole_output_layer(data, tmp_path):
    """A run without shards loads it and has the same loss."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    train(data, run, 2, UNTIED, exit_interval="8", vocabulary_parallel="4")
    manifest = json.loads((run / "checkpoints" / "step-00000008" / "manifest.json").read_text())
    entry = manifest["tensors"]["head.weight"]
    assert entry["shape"] == [97, 32]
    assert [shard["index"][0] for shard in entry["shards"]] == [[0, 24], [24, 48], [48, 72], [72, 97]]
    assert not [name for name in manifest["tensors"] if name.startswith("vocabulary")]
    shutil.copytree(run, plain)
    train(data, plain, 1, UNTIED, load=str(plain))
    train(data, run, 4, UNTIED, load=str(run), vocabulary_parallel="4")
    for step in range(9, 25):
        assert figures(run)[step] == pytest.approx(figures(plain)[step], rel=1e-4)
