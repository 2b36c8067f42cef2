"""Multi-token prediction with a sharded vocabulary: bits depend on the number of shards only."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest

from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.pipeline.partition import Partition
from tests.distributed.layouts import CUT, Layout, play_layouts
from tests.distributed.scenario import Scenario, merged, play
from tests.distributed.test_release import Release
from tests.distributed.test_release import play as play_release
from tests.distributed.test_vocabulary_parallel import plain_values, stored
from tests.distributed.whole_runs import figures, lines, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

# Two depths behind blocks with experts; the front is frozen on the way, which leaves the table to the depths.
SHARDED = Scenario(model="deepseek", shards=4, steps=8, prune=False, freeze=((3, 1), (6, 3)), dropout=0.0)
NAMES = tuple(item.name for item in SHARDED.family().items)
FIRST, LAST = NAMES.index("mtp.0"), len(NAMES) - 1


def cut(workers: int, *boundaries: int) -> Partition:
    ends = [0, *boundaries, len(NAMES)]
    return Partition.looped(tuple(NAMES[a:b] for a, b in itertools.pairwise(ends)), workers)


def vee(partition: Partition) -> Partition:
    return Partition.v_shaped(partition.stages, partition.num_ranks)


# Depths with the blocks, apart from them, apart from each other, and all of the model but the head on one rank.
MOVES = ((2, cut(2, FIRST)), (4, cut(2, FIRST + 1)), (5, cut(2, LAST)), (7, cut(2, 1)))
CASES = {
    "1 worker, 1f1b": (1, SHARDED),
    "1 worker, zero-bubble, recompute": (1, replace(SHARDED, schedule="zero-bubble", recompute=True)),
    "2 workers, 1f1b, moving": (2, replace(SHARDED, moves=MOVES)),
    "2 workers, gpipe, recompute": (2, replace(SHARDED, schedule="gpipe", recompute=True)),
    "2 workers, zero-bubble, moving": (2, replace(SHARDED, schedule="zero-bubble", moves=MOVES)),
    "2 workers, zero-bubble, all but the depths frozen": (
        2,
        replace(SHARDED, schedule="zero-bubble", start=cut(2, FIRST), freeze=((2, 4),)),
    ),
    "2 workers, interleaved, depths on the first": (
        2,
        replace(SHARDED, schedule="interleaved-1f1b", virtual=2, start=cut(2, 3, 6, LAST)),
    ),
    "2 workers, zb-v, moving": (
        2,
        replace(
            SHARDED,
            schedule="zb-v",
            virtual=2,
            start=vee(cut(2, 1, 5, FIRST)),
            moves=((3, vee(cut(2, 3, FIRST, FIRST + 1))), (6, vee(cut(2, 2, 4, LAST)))),
        ),
    ),
    "3 workers, zero-bubble, a depth on each": (
        3,
        replace(SHARDED, schedule="zero-bubble", start=cut(3, FIRST, FIRST + 1)),
    ),
    "4 workers, 1f1b, bf16": (4, replace(SHARDED, precision="bf16", start=cut(4, 4, FIRST, LAST))),
    "2 workers, fp16, frozen table": (2, replace(SHARDED, precision="fp16", freeze_tied=True, moves=MOVES)),
}


@cache
def reference(scenario: Scenario) -> dict:
    """The scenario on one worker, GPipe."""
    plain = replace(scenario, schedule="gpipe", virtual=1, recompute=False, moves=(), start=None)
    return run_workers(play, 1, plain)[0]


@pytest.mark.parametrize("case", CASES, ids=CASES)
def test_depths_anywhere_have_the_same_bits(case):
    workers, scenario = CASES[case]
    expected = reference(scenario)
    found = merged(run_workers(play, workers, scenario))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("freeze", [(), ((3, 1), (6, 3))], ids=["", "frozen"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_depths_on_parallel_ranks(name):
    """Near one rank without shards; the same bits with two pipeline ranks."""
    dims, settings, parts = LAYOUTS[name]
    scenario = replace(SHARDED, shard_parts=parts, freeze=())
    [alone] = run_workers(play_layouts, 2, [Layout(dims=dims, scenario=scenario, settings=settings)])[0]
    layout = Layout(dims=replace(dims, pipeline=2), scenario=replace(scenario, start=cut(2, FIRST)), settings=settings)
    [placed] = run_workers(play_layouts, 4, [layout])[0]
    assert placed == alone
    whole = plain_values(scenario)
    assert alone["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert alone["norms"] == pytest.approx(whole["norms"], rel=1e-5)


def test_depths_move_when_workers_are_released():
    releases = [Release(step=2, released=(1,), stages=cut(2, FIRST)), Release(step=4, released=(0,), stages=cut(1))]
    dims = ParallelDims(pipeline=3)
    found = [each for each in run_workers(play_release, 3, Layout(dims=dims, scenario=SHARDED), releases) if each]
    [alone] = run_workers(play_release, 1, Layout(dims=ParallelDims(), scenario=SHARDED), [])
    assert [each["losses"] for each in found] == [alone["losses"]]
    assert found[0]["weights"] == alone["weights"]


@pytest.mark.parametrize("extra", [[], ["--untie-embeddings-and-output-weights"]], ids=["tied", "untied"])
def test_run_with_depths_resumes_on_other_workers(tmp_path, extra):
    """A checkpoint has whole tables, which a run with another number of shards, or without, loads."""
    data = write_data(tmp_path / "data")
    words = ["--mtp-num-layers", "2", *extra]
    options = {"family": "llama", "vocabulary_parallel": "6", "train_iters": "12", "eval_interval": "6"}
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(data, whole, 1, *words, **options)
    train(data, run, 2, *words, exit_interval="5", **options)
    train(data, run, 3, *words, "--balance-lockstep", load=str(run), balance="online", profile_interval="1", **options)
    assert figures(run) == figures(whole)
    assert stored(run, 12) == stored(whole, 12)
    [header, *_] = [line["x_vocabulary"] for line in lines(run / "profile.jsonl") if line["record"] == "header"]
    assert header["lookup_bytes"] == 3 * 2 * 32 * 32 * 4
    plain = tmp_path / "plain"
    train(data, plain, 1, *words, **options | {"vocabulary_parallel": None})
    assert [value for step in figures(plain).values() for value in step] == pytest.approx(
        [value for step in figures(whole).values() for value in step], rel=1e-4
    )
