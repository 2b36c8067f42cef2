"""Compiled items: placement and resuming change no bit, and compiled items compute the same as eager ones.

Most of this runs on the backend that traces, differentiates and runs torch's own kernels: code for each item would take
half a minute to build. It gives the bits of what is not compiled, dropout included.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from dynmo_train._common.errors import UsageError
from dynmo_train.models.blocks import Head, Mlp
from dynmo_train.models.compiled import check_compiler, compile_item, is_compiled
from dynmo_train.optim.item_state import ItemState
from dynmo_train.pipeline.partition import Partition
from dynmo_train.trainer.engine import Engine
from tests.distributed.scenario import Scenario, engine_of, fingerprint
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

PLAIN = Scenario(steps=6, prune=False, freeze=((3, 1),))
NAMES = tuple(item.name for item in PLAIN.family().items)
MOVED = Partition.looped((NAMES[:3], NAMES[3:]), 2)


def play(world, scenario, resume_at=None):
    """Losses, norms, a validation loss and weights; after step ``resume_at`` the run resumes in a new engine."""
    engine, figures = engine_of(scenario, world), []
    compiled = [name for name, module in engine.item_store.modules.items() if "forward" in vars(module)]
    assert compiled == ([name for name in engine.local_names if name != "head"] if scenario.compiled else [])
    for step in range(1, scenario.steps + 1):
        result = engine.train_step(scenario.batch(step), sampled=step == 3)
        figures.append((result.loss, result.grad_norm))
        engine.after_step(step)
        if step in dict(scenario.moves):
            engine.repartition(dict(scenario.moves)[step])
        if step == resume_at:
            engine = again(engine, scenario, step)
    figures.append((engine.evaluate([scenario.batch(99)]), 0.0))
    return figures, fingerprint(engine)


def again(engine, scenario, step):
    states = {name: engine.item_store.export(name) for name in engine.local_names}
    saved = {
        name: ItemState(tensors={key: t.clone() for key, t in state.tensors.items()}, steps=state.steps)
        for name, state in states.items()
    }
    fresh = Engine(engine.family, scenario.settings(), engine.partition, engine.world)
    fresh.restore(saved.__getitem__, step, advanced_samples=engine.advanced_samples)
    return fresh


CASES = {
    "two stages, moving": (2, {"moves": ((2, MOVED),)}, None),
    "zero-bubble, recomputing, resumed": (2, {"schedule": "zero-bubble", "recompute": True}, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_run_has_the_same_bits_on_any_partition(case):
    workers, changes, resume_at = CASES[case]
    scenario = replace(PLAIN, **changes)
    [(figures, weights)] = run_workers(play, 1, replace(scenario, moves=(), schedule="1f1b", recompute=False))
    results = run_workers(play, workers, replace(scenario, compiled="aot_eager"), resume_at)
    assert [metrics for metrics, _ in results] == [figures] * workers
    assert {name: each for _, part in results for name, each in part.items()} == weights


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_compiled_item_has_the_outputs_of_the_plain_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(3)
    plain = Mlp(width=16, inner=32, activation="gelu_tanh", norm=nn.LayerNorm(16), device=torch.device("cpu"))
    nn.init.normal_(plain.fc1.weight, std=0.2)
    nn.init.normal_(plain.fc2.weight, std=0.2)
    compiled = copy.deepcopy(plain)
    compile_item(compiled)
    inputs = torch.randn(2, 3, 16)
    results = []
    for module in (plain, compiled):
        x = inputs.clone().requires_grad_()
        module(x).square().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_compile_item_head_is_unchanged():
    head = Head(width=8, rows=16, vocabulary=16, norm=nn.LayerNorm(8), device=torch.device("cpu"))
    compile_item(head)
    assert not is_compiled(head)
    assert "forward" not in vars(head)


@pytest.mark.parametrize(
    ("device", "backend", "environment", "words"),
    [
        ("cpu", "inductor", {}, "needs a C++ compiler, and 'g++' is not on PATH"),
        ("cpu", "inductor", {"CXX": "clang++"}, "'clang++' is not on PATH"),
        ("cuda", "inductor", {}, "needs a C compiler, and 'gcc' is not on PATH"),
        ("cpu", "induct", {}, "--torch-compile-backend 'induct' is none of torch's: "),
    ],
)
def test_compiled_run_without_compiler_is_one_error_line(device, backend, environment, words):
    with pytest.raises(UsageError) as error:
        check_compiler(device, backend, environment, which=lambda _: None)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_compiled_run_without_header_files_is_one_error_line(tmp_path):
    with pytest.raises(UsageError, match=r"Python\.h is not there"):
        check_compiler("cpu", "inductor", {}, which=lambda name: name, headers=tmp_path)
    (tmp_path / "Python.h").touch()
    check_compiler("cpu", "inductor", {}, which=lambda name: name, headers=tmp_path)
