"""Replicas and cut products: the same bits on any pipeline at fixed sizes, and nearly one process's figures.

All layouts with the same number of processes run in one set of processes, in turn.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo_train.parallel.dims import ParallelDims
from tests.distributed.layouts import (
    BASE,
    CUT,
    D2,
    DE,
    E2,
    FAMILIES,
    OVERLAP,
    PLAIN,
    T2,
    TD,
    TE,
    ZERO,
    ZERO_1,
    ZERO_3,
    Layout,
    close,
    play_lists,
    play_named,
)
from tests.distributed.whole_runs import close_losses, figures, lines, tensors, train, verify, write_data
from tests.levels import complete_but, of_level

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

LONG = replace(BASE, steps=20)

ONE = {
    "dropping": Layout(dims=ParallelDims(), scenario=BASE),
    "plain": Layout(dims=ParallelDims(), scenario=PLAIN),
    **{model: Layout(dims=ParallelDims(), scenario=scenario) for model, scenario in FAMILIES.items()},
}
TWO = {
    "replicas": Layout(dims=D2, scenario=BASE),
    "replicas, overlapped": Layout(dims=D2, scenario=BASE, settings=OVERLAP),
    "zero 1": Layout(dims=D2, scenario=BASE, settings=ZERO_1),
    "zero 2": Layout(dims=D2, scenario=BASE, settings=ZERO),
    "zero 2, reduced per step": Layout(dims=D2, scenario=BASE, settings={"zero_stage": 2}),
    "zero 3": Layout(dims=D2, scenario=BASE, settings=ZERO_3 | OVERLAP),
    "replicas, long": Layout(dims=D2, scenario=LONG),
    **{
        f"zero {stage}, long": Layout(dims=D2, scenario=LONG, settings=each)
        for stage, each in enumerate((ZERO_1, ZERO, ZERO_3), 1)
    },
    "cut": Layout(dims=T2, scenario=BASE),
    "cut along tokens": Layout(dims=T2, scenario=BASE, settings=CUT),
    "plain, cut": Layout(dims=T2, scenario=PLAIN),
    "plain, cut along tokens": Layout(dims=T2, scenario=PLAIN, settings=CUT),
}
TWO_FAMILIES = {
    **{model: Layout(dims=T2, scenario=scenario) for model, scenario in FAMILIES.items()},
    "llama, cut along tokens": Layout(dims=T2, scenario=FAMILIES["llama"], settings=CUT),
    "decoder, cut along tokens": Layout(dims=T2, scenario=FAMILIES["decoder"], settings=CUT),
    "capped, cut along tokens": Layout(dims=T2, scenario=FAMILIES["capped"], settings=CUT),
    "sinks, cut along tokens": Layout(dims=T2, scenario=FAMILIES["sinks"], settings=CUT),
    "sinks, shared experts": Layout(dims=E2, scenario=FAMILIES["sinks"]),
    "deepseek, cut along tokens": Layout(dims=T2, scenario=FAMILIES["deepseek"], settings=CUT),
    "t5, cut along tokens": Layout(dims=T2, scenario=FAMILIES["t5"], settings=CUT),
    "mixtral, shared experts": Layout(dims=E2, scenario=FAMILIES["mixtral"]),
    **{
        f"{model}, shared experts": Layout(dims=E2, scenario=FAMILIES[model])
        for model in ("mixtral-padded", "mixtral-dropless")
    },
    "mixtral, replicas": Layout(dims=D2, scenario=FAMILIES["mixtral"], settings=ZERO_3),
}
FOUR_OTHERS = {
    "mixtral, shared experts otherwise": [Layout(dims=dims, scenario=FAMILIES["mixtral"]) for dims in (TE, DE)],
    "plain, both": [Layout(dims=TD, scenario=PLAIN, settings=OVERLAP | CUT)],
}


@pytest.fixture(scope="module")
def one(request):
    return play_named(1, of_level(request.config, ONE, "dropping", "plain", "decoder"))


@pytest.fixture(scope="module")
def two(request):
    claims = ("replicas", "zero 2", "zero 3", "plain, cut", "plain, cut along tokens")
    return play_named(2, of_level(request.config, TWO, *claims))


@pytest.fixture(scope="module")
def two_families(request):
    return play_named(2, of_level(request.config, TWO_FAMILIES, "decoder"))


@pytest.fixture(scope="module")
def four_others(request):
    return play_lists(4, of_level(request.config, FOUR_OTHERS, "plain, both"))


def test_replicas_have_nearly_the_losses_of_one_process(one, two):
    close(two["replicas"], one["dropping"])


@pytest.mark.complete
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stage_is_near_plain_replicas_after_20_steps(stage, two):
    close(two[f"zero {stage}, long"], two["replicas, long"])


@pytest.mark.complete
def test_zero_reduction_per_step_is_near_that_per_microbatch(two):
    close(two["zero 2, reduced per step"], two["zero 2"])


def test_zero_3_has_the_bits_of_zero_2(two):
    assert two["zero 3"] == two["zero 2"]


@pytest.mark.complete
def test_overlapped_gradient_reduction_has_the_same_bits(two):
    assert two["replicas, overlapped"] == two["replicas"]


def test_tensor_parallelism_has_nearly_the_losses_of_one_process(one, two, four_others):
    """Without dropout, whose draws differ by rank; pruned and frozen on the way."""
    for got in (two["plain, cut"], two["plain, cut along tokens"], four_others["plain, both"][0]):
        close(got, one["plain"])


@pytest.mark.parametrize(
    "name",
    complete_but(
        [
            *FAMILIES,
            "llama, cut along tokens",
            "decoder, cut along tokens",
            "deepseek, cut along tokens",
            "t5, cut along tokens",
            "mixtral, replicas",
            "mixtral, shared experts",
            "mixtral-padded, shared experts",
            "mixtral-dropless, shared experts",
        ],
        "decoder",
    ),
)
def test_family_on_two_processes_has_nearly_the_losses_of_one(name, one, two_families):
    # A token between two experts may go to the other one: a norm shows that before the mean loss does.
    close(two_families[name], one[name.partition(",")[0]], norms=1e-3 if "mixtral" in name else 1e-4)


@pytest.mark.complete
def test_dropout_with_tensor_parallelism_draws_other_numbers(one, two):
    assert two["cut"]["losses"] != pytest.approx(one["dropping"]["losses"], rel=1e-5)
    assert two["cut"]["losses"] != two["cut along tokens"]["losses"]


@pytest.mark.complete
def test_padded_capacity_has_nearly_the_losses_without_padding(one):
    close(one["mixtral-padded"], one["mixtral"])
    assert one["mixtral-dropless"]["losses"] != pytest.approx(one["mixtral"]["losses"], rel=1e-5)


@pytest.mark.complete
def test_expert_parallelism_with_other_axes_has_the_losses_without(one, four_others):
    for got in four_others["mixtral, shared experts otherwise"]:
        close(got, one["mixtral"], norms=1e-3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("parallel") / "data")


@pytest.mark.complete
def test_run_of_replicas_saves_resumes_and_is_profiled(data, tmp_path):
    """From the command line, with ZeRO 3: without a stop; resumed with a pipeline; resumed with one process."""
    whole, stopped, child = (tmp_path / name for name in ("whole", "stopped", "child"))
    train(data, whole, 2, pipeline_model_parallel_size="1", zero_stage="3")
    train(data, stopped, 2, pipeline_model_parallel_size="1", exit_interval="11", DDP_impl="torch", zero_stage="3")
    train(data, stopped, 4, pipeline_model_parallel_size="2", load=str(stopped), zero_stage="3")
    assert figures(stopped) == figures(whole)
    assert tensors(stopped, 24) == tensors(whole, 24)
    train(data, child, 1, load=str(stopped / "checkpoints" / "step-00000011"))
    close_losses(child, whole)
    header = [line for line in lines(stopped / "profile.jsonl") if line["record"] == "header"][-1]
    assert header["data_parallel_size"] == 2
    assert [worker["ranks"] for worker in header["workers"]] == [[0, 1], [2, 3]]
    step = [line for line in lines(stopped / "profile.jsonl") if line["record"] == "step"][-1]
    assert len(step["busy_ns"]) == 2
    assert min(step["forward_ns"]) > 0
    verify(stopped)


@pytest.mark.complete
def test_tensor_parallel_run_resumes_on_any_layout(data, tmp_path):
    """Slices in the checkpoint, the whole in any process that asks for it; and back."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    plain = {"attention_dropout": "0", "hidden_dropout": "0", "make_vocab_size_divisible_by": "64"}
    train(data, whole, 1, make_vocab_size_divisible_by="128", **{k: v for k, v in plain.items() if "dropout" in k})
    parts = {"tensor_model_parallel_size": "2", **plain}
    train(data, run, 2, "--sequence-parallel", exit_interval="9", **parts)
    train(data, run, 1, load=str(run), exit_interval="14", **plain | {"make_vocab_size_divisible_by": "128"})
    train(data, run, 4, load=str(run), pipeline_model_parallel_size="2", **parts)
    assert len(figures(run)) == 24
    close_losses(run, whole)
    manifest = lines_of_manifest(run, 9)
    assert manifest["topology"]["tensor_parallel_size"] == 2
    assert manifest["tensors"]["layers.0.mlp.fc2.weight"]["split_dim"] == 1
    assert manifest["tensors"]["embedding.word.weight"]["split_dim"] == 0
    assert manifest["tensors"]["layers.0.mlp.norm.weight"]["split_dim"] is None
    verify(run)


@pytest.mark.complete
def test_curriculum_shards_samples_by_their_tokens(data, tmp_path):
    growing = {"curriculum_shortest": "8", "curriculum_steps": "6", "train_iters": "8", "eval_interval": "4"}
    growing |= {"attention_dropout": "0", "hidden_dropout": "0", "lr_decay_iters": "24"}
    train(data, tmp_path / "one", 1, make_vocab_size_divisible_by="128", **growing)
    parts = {"tensor_model_parallel_size": "2", "make_vocab_size_divisible_by": "64"}
    train(data, tmp_path / "two", 2, "--sequence-parallel", **parts, **growing)
    close_losses(tmp_path / "two", tmp_path / "one")
    tokens = [line["tokens"] for line in lines(tmp_path / "two" / "metrics.jsonl") if "lm_loss" in line]
    assert len(set(tokens)) > 2


def lines_of_manifest(run: Path, step: int) -> dict:
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
