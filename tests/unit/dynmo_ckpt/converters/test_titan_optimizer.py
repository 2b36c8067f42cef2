"""The plan of torchtitan's optimizer state: what it lacks is refused, and the learning rate of the next update."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dynmo_ckpt.converters.torchtitan import plan_titan
from dynmo_ckpt.converters.write_titan_optimizer import learning_rate
from dynmo_ckpt.formats.choices import WriteOptions
from dynmo_ckpt.io.errors import UnsupportedError
from dynmo_ckpt.native.checkpoint import open_native
from dynmo_train.optim.lr_schedule import LearningRate
from tests.unit.dynmo_ckpt import families, native_checkpoints

LLAMA = families.llama(num_layers=2)
SCHEDULE = {"max_lr": 0.01, "min_lr": 0.001, "lr_warmup_steps": 40, "lr_decay_steps": 200, "num_steps": 100}
SCHEDULE |= {"lr_decay_style": "linear"}
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@pytest.fixture
def checkpoint(tmp_path):
    p = native_checkpoints.true_rows(LLAMA["vocab_size"], families.parameters(LLAMA))
    native_checkpoints.save(tmp_path / "native", p | native_checkpoints.optimizer_state(p), LLAMA)
    found = open_native(tmp_path / "native")
    return replace(found, manifest={**found.manifest, "x_adam": ADAM, "x_scheduler": SCHEDULE})


def changed(checkpoint, **fields):
    return replace(checkpoint, manifest={**checkpoint.manifest, **fields})


def objects_of(checkpoint):
    """The objects of the plan by name."""
    plan = plan_titan(checkpoint, WriteOptions(with_optimizer=True))
    return {part.tree if not part.tensors else None: part for part in plan.files[0].parts}


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warmup", [0, 40])
def test_learning_rate_is_that_of_the_trainer(style, warmup):
    """The trainer's own schedule, which equals Megatron's."""
    own = LearningRate(peak=0.01, floor=0.001, style=style, warmup_steps=warmup, decay_steps=200)
    for at in (0, 1, 20, 40, 41, 100, 200, 201, 500):
        fields = {**SCHEDULE, "lr_decay_style": style, "lr_warmup_steps": warmup, "num_steps": at}
        assert learning_rate(fields) == pytest.approx(own.at(at), rel=1e-12)


def test_learning_rate_of_other_schedules_is_unknown():
    assert learning_rate(SCHEDULE | {"lr_decay_style": "WSD"}) is None
    assert learning_rate({name: value for name, value in SCHEDULE.items() if name != "num_steps"}) is None
    assert learning_rate(SCHEDULE | {"max_lr": float("nan")}) is None


def test_plan_has_the_rate_of_the_schedule_and_the_recorded_one(checkpoint):
    values = objects_of(checkpoint)
    assert {0.01, learning_rate(SCHEDULE)} <= values.keys()
    assert learning_rate(SCHEDULE) == pytest.approx(0.001 + 0.009 * 0.625)
    recorded = {"lr": 0.25, "initial_lr": 0.5, "ntokens_seen": 777, "last_epoch": 55}
    values = objects_of(changed(checkpoint, x_torchtitan=recorded))
    assert {0.25, 0.5, 777, 55} <= values.keys()
    assert 0.01 not in values


REFUSED = {
    "no betas": ({"x_adam": None}, "no betas and epsilon"),
    "no learning rate": ({"x_scheduler": None}, "no learning rate of the next update"),
    "a broken learning rate": ({"x_scheduler": None, "x_torchtitan": {"lr": "x"}}, "no learning rate"),
    "no state": ({"optimizer": None}, "has no optimizer state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plan_without_a_part_of_the_state_is_refused(checkpoint, case):
    fields, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        plan_titan(changed(checkpoint, **fields), WriteOptions(with_optimizer=True))


@pytest.mark.parametrize("case", ["no moment", "no step", "no weight decay", "another optimizer"])
def test_plan_with_an_incomplete_state_is_refused(checkpoint, case):
    optimizer, tensors = json.loads(json.dumps(checkpoint.manifest["optimizer"])), dict(checkpoint.tensors)
    name = "layers.1.attention.qkv.weight"
    if case == "no moment":
        del tensors[f"{name}.exp_avg"]
        message = f"1 weights have no exp_avg: {name}"
    elif case == "no step":
        del optimizer["steps"][name]
        message = f"no step of {name}"
    elif case == "no weight decay":
        for group in optimizer["groups"]:
            group["parameters"] = [each for each in group["parameters"] if each != name]
        message = f"no weight decay of {name}"
    else:
        optimizer["type"] = "muon"
        message = "optimizer state of muon"
    with pytest.raises(UnsupportedError, match=message):
        plan_titan(
            replace(changed(checkpoint, optimizer=optimizer), tensors=tensors), WriteOptions(with_optimizer=True)
        )


def test_plan_of_equal_objects_shares_a_part(checkpoint):
    """True equals 1 and 0.0 equals 0 in Python; each keeps its type, and equal values have one part of the file."""
    plan = plan_titan(changed(checkpoint, step=1), WriteOptions(with_optimizer=True))
    trees = [part.tree for part in plan.files[0].parts if not part.tensors]
    assert len(trees) == len({(type(tree), tree) for tree in trees})
    assert {bool, int, float, tuple} == {type(tree) for tree in trees}
    assert any(tree is True for tree in trees)
    assert any(type(tree) is int and tree == 1 for tree in trees)
    assert np.isfinite([tree for tree in trees if isinstance(tree, float)]).all()
