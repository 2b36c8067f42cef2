"""Shards of word table and output layer on all pipeline ranks: their bits depend on the number of shards only."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from dynmo_train.formats.checkpoint import open_checkpoint
from dynmo_train.parallel.dims import ParallelDims
from tests.distributed.layouts import Layout, play_layouts
from tests.distributed.scenario import Scenario, merged, play
from tests.distributed.test_placement import WANDER, WANDER_4, cut, vee
from tests.distributed.test_release import Release
from tests.distributed.test_release import play as play_release
from tests.distributed.whole_runs import figures, lines, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SHARDED = Scenario(tied=False, shards=4)
TIED = Scenario(shards=4)
CASES = {
    "1 worker, 1f1b": (1, SHARDED),
    "2 workers, gpipe": (2, replace(SHARDED, schedule="gpipe")),
    "2 workers, 1f1b, moving": (2, replace(SHARDED, moves=WANDER)),
    "2 workers, zero-bubble, recompute": (2, replace(SHARDED, schedule="zero-bubble", recompute=True)),
    "2 workers, interleaved, moving": (
        2,
        replace(
            SHARDED,
            schedule="interleaved-1f1b",
            virtual=2,
            moves=((6, cut(2, 1, 5, 8)), (11, cut(2, 3, 4, 7))),
        ),
    ),
    "2 workers, zb-v, moving": (
        2,
        replace(SHARDED, schedule="zb-v", virtual=2, moves=((6, vee(cut(2, 1, 5, 8))), (11, vee(cut(2, 3, 4, 7))))),
    ),
    "2 workers, dualpipe-v": (2, replace(SHARDED, schedule="dualpipe-v", virtual=2)),
    "3 workers, 1f1b": (3, SHARDED),
    "4 workers, 1f1b, moving, an empty stage": (4, replace(SHARDED, moves=WANDER_4)),
    "4 workers, zero-bubble": (4, replace(SHARDED, schedule="zero-bubble")),
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
    "2 workers, 1f1b, bf16": (2, replace(SHARDED, precision="bf16")),
    "2 workers, zero-bubble, fp16": (2, replace(SHARDED, schedule="zero-bubble", precision="fp16", moves=WANDER)),
    "3 workers, 1f1b, tied": (3, TIED),
    "2 workers, zero-bubble, tied, moving": (2, replace(TIED, schedule="zero-bubble", moves=WANDER)),
    "2 workers, zb-v, tied and frozen": (2, replace(TIED, schedule="zb-v", virtual=2, freeze_tied=True)),
    "4 workers, gpipe, tied, bf16": (4, replace(TIED, schedule="gpipe", precision="bf16")),
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


def test_run_with_shards_moves_and_resumes_on_other_workers(data, tmp_path):
    """Pruned and frozen on the way; the second half is resumed on other workers, and moves layers."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    shards = {"vocabulary_parallel": "6"}
    train(data, whole, 1, UNTIED, **shards)
    train(data, run, 2, UNTIED, exit_interval="11", **shards)
    train(data, run, 3, UNTIED, "--balance-lockstep", load=str(run), balance="online", profile_interval="1", **shards)
    assert figures(run) == figures(whole)
    assert stored(run, 24) == stored(whole, 24)
    profile = lines(run / "profile.jsonl")
    assert [line for line in profile if line["record"] == "plan_result"], "the planner was never asked"
    headers = [line["x_vocabulary"] for line in profile if line["record"] == "header"]
    assert {(each["shards"], each["param_count"]) for each in headers} == {(6, 2 * 97 * 32)}
    costs = [line["x_vocabulary"] for line in profile if line["record"] == "step"]
    assert costs
    assert all(len(each["forward_ns"]) == 6 and min(each["backward_ns"]) > 0 for each in costs)
    plan = json.loads(sorted((run / "plans").glob("*.json"))[-1].read_text())
    assert "x_vocabulary" in plan or plan["action"] == "keep" or plan["balancer"] == "initial"


@pytest.mark.parametrize("options", [{"tensor_model_parallel_size": "2"}, {"zero_stage": "2"}], ids=["tensor", "zero"])
def test_run_on_two_ranks_resumes_on_a_pipeline(data, tmp_path, options):
    """Tied; with two tensor-parallel ranks some shards have padding alone."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    options = options | {"vocabulary_parallel": "6", "train_iters": "12"}
    train(data, whole, 2, pipeline_model_parallel_size="1", **options)
    train(data, run, 2, pipeline_model_parallel_size="1", exit_interval="5", **options)
    train(data, run, 4, load=str(run), pipeline_model_parallel_size="2", **options)
    assert figures(run) == figures(whole)
    assert stored(run, 12) == stored(whole, 12)
    manifest = json.loads((run / "checkpoints" / "step-00000012" / "manifest.json").read_text())
    assert manifest["ties"] == {"head.weight": "embedding.word.weight"}
    assert manifest["tensors"]["embedding.word.weight"]["shape"] == [97, 32]
    [header, *_] = [line["x_vocabulary"] for line in lines(run / "profile.jsonl") if line["record"] == "header"]
    if "zero_stage" in options:
        assert header["param_count"] == header["output_param_count"] == 97 * 32
    else:
        # Half of 256 padded rows, of which not all are true ones.
        assert header["param_count"] == 128 * 32
        assert header["output_param_count"] < 97 * 32


def stored(run: Path, step: int) -> dict[str, bytes]:
    """Tensor name -> bytes in the checkpoint of a step, however it is sharded."""
    found = open_checkpoint(run / "checkpoints" / f"step-{step:08d}")
    names = [name for role in ("parameter", "mask", "optimizer") for name in found.names(role)]
    return {name: found.load([name])[name].view(torch.uint8).numpy().tobytes() for name in names}


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


@pytest.mark.parametrize("pipeline", [1, 2])
def test_shards_of_replicas_have_the_same_bits_on_any_pipeline(pipeline):
    """Two replicas, reduced while the backward runs."""
    layout = Layout(
        dims=ParallelDims(pipeline=pipeline, data=2), scenario=SHARDED, settings={"overlap_reduction": pipeline == 2}
    )
    assert run_workers(play_layouts, 2 * pipeline, [layout])[0] == replicas()


@cache
def replicas() -> list:
    layout = Layout(dims=ParallelDims(data=2), scenario=replace(SHARDED, schedule="gpipe"))
    return run_workers(play_layouts, 2, [layout])[0]


def test_shards_move_when_workers_are_released():
    """Twice, down to one worker."""
    releases = [
        Release(step=2, released=(1,), stages=cut(3, 2, 6)),
        Release(step=4, released=(0, 2), stages=cut(1)),
    ]
    scenario = replace(SHARDED, shards=6)
    dims = ParallelDims(pipeline=4)
    found = [each for each in run_workers(play_release, 4, Layout(dims=dims, scenario=scenario), releases) if each]
    [alone] = run_workers(play_release, 1, Layout(dims=ParallelDims(), scenario=scenario), [])
    assert [each["losses"] for each in found] == [alone["losses"]]
    assert found[0]["eval_loss"] == alone["eval_loss"]
    assert found[0]["weights"] == alone["weights"]


def test_many_microbatches_of_uneven_ranks_run(data, tmp_path):
    """64 microbatches on 4 workers with 6 shards, with masked tokens and in bf16; twice the same."""
    options = {
        "vocabulary_parallel": "6",
        "global_batch_size": "128",
        "train_iters": "3",
        "freeze_schedule": None,
        "schedule": "zero-bubble",
    }
    for name, workers in (("one", 1), ("four", 4)):
        train(data, tmp_path / name, workers, UNTIED, "--eod-mask-loss", "--bf16", "--mock-data", **options)
    assert figures(tmp_path / "four") == figures(tmp_path / "one")
