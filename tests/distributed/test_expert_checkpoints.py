"""Checkpoints of runs with biases and copies of experts, rewritten by dynmo-ckpt: all bits remain, and runs resume."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dynmo_train.formats.checkpoint import open_checkpoint
from dynmo_train.launch.find_command import program_path
from tests.distributed.scenario import digest
from tests.distributed.whole_runs import close_losses, events, figures, tensors, train, write_data

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS, SAVED = 8, 5
PLAIN = {
    "num_layers": "2",
    "num_experts": "8",
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": "0.01",
    "attention_dropout": "0",
    "hidden_dropout": "0",
    "train_iters": str(STEPS),
    "eval_interval": str(STEPS),
    "save_interval": str(SAVED),
    "global_batch_size": "8",
    "freeze_schedule": None,
    "granularity": "layer",
    "make_vocab_size_divisible_by": "64",
}
BIASES = "--moe-router-enable-expert-bias"
COPIES = {
    "expert_model_parallel_size": "2",
    "tensor_model_parallel_size": "2",
    "pipeline_model_parallel_size": "1",
    "moe_expert_slots": "6",
    "moe_expert_chunk_rows": "16",
    "expert_rebalance_interval": "2",
}


def rewrite(command: str, source: Path, target: Path, *options: str) -> Path:
    words = [program_path("dynmo-ckpt"), command, str(source), str(target), *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    checked = [program_path("dynmo-ckpt"), "verify", str(target), "--level", "full"]
    assert subprocess.run(checked, capture_output=True, check=False).returncode == 0
    return target


def contents(step: Path) -> dict[str, str]:
    checkpoint = open_checkpoint(step)
    return {name: digest(tensor) for name, tensor in checkpoint.load(checkpoint.names()).items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run of 4 ranks with biases and copies of experts, and its checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("experts")
    data, whole = write_data(folder / "data"), folder / "whole"
    train(data, whole, 4, BIASES, "--sequence-parallel", **PLAIN | COPIES)
    assert any(event["copies"] for event in events(whole, "experts_moved") if event["step"] < SAVED)
    return data, whole, whole / "checkpoints" / f"step-{SAVED:08d}"


@pytest.fixture(scope="module")
def rewritten(run, tmp_path_factory):
    """The checkpoint on one rank, on other numbers of tensor and pipeline ranks, and back on one."""
    _, _, step = run
    folder = tmp_path_factory.mktemp("rewritten")
    merged = rewrite("merge", step, folder / "merged")
    cut = rewrite("reshard", step, folder / "reshard", "--tp", "4", "--pp", "2", "--dp", "2")
    return {
        "merged": merged,
        "split": rewrite("split", merged, folder / "split", "--tp", "2", "--partition", "1,1", "--pp", "2"),
        "reshard": cut,
        "back": rewrite("merge", cut, folder / "back"),
    }


@pytest.mark.parametrize("name", ["merged", "split", "reshard", "back"])
def test_rewritten_checkpoint_has_every_bit_of_biases_and_experts(run, rewritten, name):
    _, _, step = run
    before, after = contents(step), contents(rewritten[name])
    assert after == before
    biases = {key for key in before if key.endswith(".router.expert_bias")}
    assert biases == {f"layers.{n}.mlp.router.expert_bias" for n in range(2)}
    entries = json.loads((rewritten[name] / "manifest.json").read_text())["tensors"]
    for key in biases:
        assert (entries[key]["role"], entries[key]["dtype"], entries[key]["shape"]) == ("buffer", "F32", [8])
    values = open_checkpoint(rewritten[name]).load(biases)
    assert all(bool(value.any()) for value in values.values())
    # Each expert once, from its owner.
    assert {key.split(".")[4] for key in before if key.startswith("layers.0.mlp.experts.")} == set(map(str, range(8)))


@pytest.mark.parametrize("name", ["merged", "reshard"])
def test_run_with_copies_resumes_from_rewritten_checkpoints_bit_for_bit(run, rewritten, tmp_path, name):
    data, whole, _ = run
    resumed = tmp_path / "resumed"
    train(data, resumed, 4, BIASES, "--sequence-parallel", **PLAIN | COPIES, load=str(rewritten[name]))
    expected = figures(whole)
    assert figures(resumed) == {step: expected[step] for step in range(SAVED + 1, STEPS + 1)}
    assert tensors(resumed, STEPS) == tensors(whole, STEPS)


def test_split_checkpoint_resumes_without_copies_on_other_ranks(run, rewritten, tmp_path):
    data, whole, _ = run
    resumed = tmp_path / "resumed"
    sizes = {"pipeline_model_parallel_size": "2", "expert_model_parallel_size": "2"}
    one = PLAIN | {"make_vocab_size_divisible_by": "128"}
    train(data, resumed, 4, BIASES, **one | sizes, load=str(rewritten["split"]))
    assert sorted(figures(resumed)) == list(range(SAVED + 1, STEPS + 1))
    close_losses(resumed, whole)
