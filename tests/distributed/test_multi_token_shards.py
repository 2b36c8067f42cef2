"""Multi-token prediction with a sharded vocabulary: bits depend on the number of shards only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.pipeline.partition import Partition
from tests.distributed.layouts import CUT, Layout, play_layouts
from tests.distributed.scenario import Scenario, merged, play
from tests.distributed.test_release import Release
from tests.distributed.test_release import play as play_release
from tests.distributed.test_vocabulary_parallel import plain_values
from tests.distributed.whole_runs import figures, lines, train, write_data
from tests.distributed.workers import run_workers
from tests.levels import complete_but

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

# Two depths behind blocks with experts; the front is frozen on the way, which leaves the table to the depths.
SHARDED = Scenario(model="deepseek", shards=4, steps=8, prune=False, freeze=((3, 1), (6, 3)), dropout=0.0)


NAMES = tuple(item.name for item in SHARDED.family().items)


def test_depths_move_when_workers_are_released():
    """Rank 0 as well, whose embedding has no tensors."""
    at = NAMES.index("mtp.0")
    two = Partition.looped((NAMES[:at], NAMES[at:]), 2)
    releases = [
        Release(step=2, released=(1,), stages=two),
        Release(step=4, released=(0,), stages=Partition.looped((NAMES,), 1)),
    ]
    dims = ParallelDims(pipeline=3)
    found = [each for each in run_workers(play_release, 3, Layout(dims=dims, scenario=SHARDED), releases) if each]
    [alone] = run_workers(play_release, 1, Layout(dims=ParallelDims(), scenario=SHARDED), [])
    assert [each["losses"] for each in found] == [alone["losses"]]
    assert found[0]["weights"] == alone["weights"]


@pytest.mark.parametrize("freeze", [(), ((3, 1), (6, 3))], ids=["", "frozen"])
@pytest.mark.parametrize("precision", complete_but(["fp32", "bf16"], "fp32"))
def test_depths_are_near_those_with_whole_tables(precision, freeze):
    """The losses of the model and of each depth, the norms, and the evaluation."""
    scenario = replace(SHARDED, precision=precision, freeze=freeze)
    whole = plain_values(scenario)
    found = merged(run_workers(play, 2, scenario))
    tolerance = 2e-3 if precision == "bf16" else 1e-5
    for name in ("losses", "norms"):
        assert found[name] == pytest.approx(whole[name], rel=tolerance)
    assert found["eval_loss"] == pytest.approx(whole["eval_loss"], rel=tolerance)
    for depth in ("mtp.0", "mtp.1"):
        ours, theirs = ([step[depth]["mtp_loss"][0] for step in run["metrics"]] for run in (found, whole))
        assert min(theirs) > 1
        assert ours == pytest.approx(theirs, rel=tolerance)


LAYOUTS = {
    "tensor": (ParallelDims(tensor=2), {}, 2),
    "sequence": (ParallelDims(tensor=2), CUT, 2),
    "context": (ParallelDims(data=2, context=2), {}, 1),
}


@pytest.mark.complete
@pytest.mark.parametrize("name", LAYOUTS)
def test_depths_on_parallel_ranks(name):
    """Near one rank without shards."""
    dims, settings, parts = LAYOUTS[name]
    scenario = replace(SHARDED, shard_parts=parts, freeze=())
    [alone] = run_workers(play_layouts, 2, [Layout(dims=dims, scenario=scenario, settings=settings)])[0]
    whole = plain_values(scenario)
    assert alone["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert alone["norms"] == pytest.approx(whole["norms"], rel=1e-5)


@pytest.mark.complete
@pytest.mark.parametrize("extra", [[], ["--untie-embeddings-and-output-weights"]], ids=["tied", "untied"])
def test_run_with_depths_is_near_one_without_shards(tmp_path, extra):
    data = write_data(tmp_path / "data")
    words = ["--mtp-num-layers", "2", *extra]
    options = {"family": "llama", "vocabulary_parallel": "6", "train_iters": "12", "eval_interval": "6"}
    whole = tmp_path / "whole"
    train(data, whole, 1, *words, **options)
    [header] = [line["x_vocabulary"] for line in lines(whole / "profile.jsonl") if line["record"] == "header"]
    assert header["lookup_bytes"] == 3 * 2 * 32 * 32 * 4
    plain = tmp_path / "plain"
    train(data, plain, 1, *words, **options | {"vocabulary_parallel": None})
    assert [value for step in figures(plain).values() for value in step] == pytest.approx(
        [value for step in figures(whole).values() for value in step], rel=1e-4
    )
