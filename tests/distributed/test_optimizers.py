"""Every optimizer: the same bits on any partition, with moves, after a resume; other optimizers' state is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from dynmo_train.config import config_of
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.layer_list import parameters_of
from dynmo_train.optim.optimizers.protocol import Update
from dynmo_train.optim.optimizers.registry import OPTIMIZERS, optimizer_settings
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import set_parallel_dims
from tests.distributed.layouts import Layout, engine_on
from tests.distributed.scenario import Scenario, play
from tests.distributed.whole_runs import arguments, figures, lines, run_command, train, write_data
from tests.distributed.workers import run_workers
from tests.unit.dynmo_train.config.small_config import SMALL

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]
# AdamW is in test_placement.py and test_resume.py.
OTHERS = tuple(name for name in OPTIMIZERS if name != "adam")


def scenario(name, **changes):
    settings = optimizer_settings(config_of(**{**SMALL, "optimizer": name, "weight_decay": 0.1}).optimizer)
    return Scenario(optimizer=settings, decoupled_lr=1e-3, **changes)


@cache
def reference(name):
    return run_workers(play, 1, scenario(name))[0]


def test_optimizers_and_decoupled_lr_give_other_losses():
    plain = [run_workers(play, 1, replace(scenario(name), decoupled_lr=None))[0] for name in OTHERS]
    losses = [tuple(result["losses"]) for result in [*plain, *map(reference, OTHERS)]]
    assert len(set(losses)) == len(losses)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("optimizers") / "data")


SHARDED = {
    "zero 1": (ParallelDims(data=2), {"zero_stage": 1}),
    # The last replica has no rows of the router.
    "zero 2, 3 replicas": (ParallelDims(data=3), {"zero_stage": 2}),
    "zero 3": (ParallelDims(data=2), {"zero_stage": 3}),
    "tensor": (ParallelDims(tensor=2), {}),
    "tensor, zero 2": (ParallelDims(tensor=2, data=2), {"zero_stage": 2}),
    "experts, zero 2": (ParallelDims(data=4, expert=2), {"zero_stage": 2}),
}


def stepped(world, dims, settings, optimizer, whole):
    """Three updates with gradients that depend on the name only: digests of the local tensors.

    Args:
        whole: Tensors of one process after the same updates; each is cut to the part of this process. None on one
            process, which returns them.
    """
    layout = Layout(dims=dims, scenario=scenario(optimizer, moe=MoeShape(num_experts=4, top_k=2)), settings=settings)
    engine = engine_on(set_parallel_dims(world, dims, 60), layout)
    sharding = engine.item_store.sharding
    for step in (1, 2, 3):
        for item, name, parameter in engine.item_store.parameters():
            shape = parameters_of(item, engine.family.build(item, torch.device("meta")))[name].shape
            # ZeRO updates both copies of a tied weight; they have the same gradient.
            owner = engine.family.ties.get(name, name)
            generator = torch.Generator().manual_seed(sum(owner.encode()) * 10 + step)
            gradient = torch.randn(shape, generator=generator)
            parameter.grad = sharding.local_slice(name, gradient).clone()
        engine.item_store.step(Update(lr=1e-2, weight_decay=0.1))
    tensors = {n: t for i in engine.local_names for n, t in engine.item_store.export(i).tensors.items()}
    if whole is None:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    parts = {name: sharding.local_slice(name, whole[name]) for name in tensors}
    # torch's fused kernels round the last elements of a vector, less than a register, in another way.
    uneven = {name for name, tensor in tensors.items() if dims.data == 3 and tensor.dim() == 1}
    return sorted(
        name for name, tensor in tensors.items() if not torch.equal(tensor, parts[name]) and name not in uneven
    )


@pytest.mark.parametrize("layout", SHARDED)
@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_optimizer_sharded_update_has_the_bits_of_one_process(name, layout):
    dims, settings = SHARDED[layout]
    [whole] = run_workers(stepped, 1, ParallelDims(), {}, name, None)
    differing = run_workers(stepped, dims.size, dims, settings, name, whole)
    assert differing == [[]] * dims.size


def test_resume_with_another_optimizer_is_refused_with_remedy(data, tmp_path):
    run = tmp_path / "run"
    train(data, run, 1, train_iters="4", optimizer="sgd")
    words = arguments(data, tmp_path / "other", load=str(run), train_iters="6", lr_decay_iters="4")
    code, message = run_command(words)
    assert code == 2
    assert "has the optimizer state of --optimizer sgd, this run has --optimizer adam" in message
    assert "--no-load-optim" in message
    code, message = run_command([*words, "--no-load-optim"])
    assert code == 0, message
    assert set(figures(tmp_path / "other")) == {5, 6}


def test_decoupled_learning_rate_is_in_the_metrics(tmp_path):
    options = {"decoupled_lr": "1e-4", "lr_warmup_iters": "2", "train_iters": "4", "freeze_schedule": None}
    pruning = dict.fromkeys(("pruning_start_iter", "pruning_end_iter", "pruning_freq"))
    train(None, tmp_path / "run", 1, "--mock-data", **options, **pruning)
    rates = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if "lm_loss" in line]
    for line in rates:
        assert line["decoupled_learning_rate"] == pytest.approx(line["learning_rate"] * 1e-4 / 2e-3)
    assert {line["learning_rate"] for line in rates} > {0.0, 1e-3}
