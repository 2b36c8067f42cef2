"""Every optimizer: the same bits on any partition, with moves, after a resume; other optimizers' state is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from dynmo_train.config import config_of
from dynmo_train.optim.optimizers.registry import OPTIMIZERS, optimizer_settings
from tests.distributed.scenario import Scenario, merged, play
from tests.distributed.test_placement import WANDER
from tests.distributed.whole_runs import arguments, figures, run_command, tensors, train, write_data
from tests.distributed.workers import run_workers
from tests.unit.dynmo_train.config.small_config import SMALL

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
# AdamW is in test_placement.py and test_resume.py.
OTHERS = tuple(name for name in OPTIMIZERS if name != "adam")
RATES = {"sgd": "3e-2"}


def scenario(name, **changes):
    settings = optimizer_settings(config_of(**{**SMALL, "optimizer": name, "weight_decay": 0.1}).optimizer)
    return Scenario(optimizer=settings, decoupled_lr=1e-3, **changes)


@cache
def reference(name):
    return run_workers(play, 1, scenario(name))[0]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("changes", [{"moves": WANDER}, {"schedule": "zero-bubble", "recompute": True}])
def test_optimizer_partition_has_the_bits_of_one_worker(name, changes):
    expected, got = reference(name), merged(run_workers(play, 2, scenario(name, **changes)))
    for key in ("losses", "norms", "eval_loss", "weights"):
        assert got[key] == expected[key], key


def test_optimizers_and_decoupled_lr_give_other_losses():
    plain = [run_workers(play, 1, replace(scenario(name), decoupled_lr=None))[0] for name in OTHERS]
    losses = [tuple(result["losses"]) for result in [*plain, *map(reference, OTHERS)]]
    assert len(set(losses)) == len(losses)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("optimizers") / "data")


@pytest.mark.parametrize("name", OTHERS)
def test_optimizer_resumed_run_has_the_same_bits(data, tmp_path, name):
    options = {"optimizer": name, "train_iters": "16", "lr": RATES.get(name, "2e-3"), "decoupled_lr": "1e-3"}
    train(data, tmp_path / "whole", 2, **options)
    run = tmp_path / "stopped"
    train(data, run, 1, exit_interval="7", **options)
    train(data, run, 2, load=str(run), **options)
    assert figures(run) == figures(tmp_path / "whole")
    assert tensors(run, 16) == tensors(tmp_path / "whole", 16)


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
