"""A frozen front: counted operations of its backward, gradients and moments, without a cache of its outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from dynmo_train.dynamics import freezing
from dynmo_train.dynamics.freezing import FreedBytes
from dynmo_train.parallel.dims import ParallelDims
from tests.distributed.scenario import Scenario, batch_of, engine_of

FROZEN = Scenario(prune=False, tied=False, dropout=0.0, schedule="gpipe", freeze=((1, 2),))
DENSE = replace(FROZEN, freeze=())
FRONT = ("embedding", "layers.0", "layers.1")
# Forward: qkv, dense, fc1, fc2. Backward: two products for each.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 4, 8


class Products(TorchDispatchMode):
    """Counts matrix products, and backward operations of attention."""

    def __init__(self):
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        self.products += name.split(".")[0] in ("mm", "addmm", "bmm", "baddbmm")
        self.attention += "attention" in name and "backward" in name
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counts:
    """Of the second step of a run, which is the first one with a frozen front."""

    products: int
    attention: int
    with_gradient: set[str]
    with_moments: set[str]


def is_front(name):
    return name.startswith(FRONT)


def counts(world, scenario):
    engine = engine_of(scenario, world)
    engine.train_step(scenario.batch(1), sampled=False)
    engine.after_step(1)
    found = set()
    prepare = engine.prepare_gradients

    def observed(step):
        found.update(name for _, name, parameter in engine.item_store.parameters() if parameter.grad is not None)
        return prepare(step)

    engine.prepare_gradients = observed
    with Products() as counted:
        engine.train_step(scenario.batch(2), sampled=False)
    moments = {name for _, name, _ in engine.item_store.parameters() if engine.item_store.optimizers.moments(name)}
    return Counts(counted.products, counted.attention, found, moments), engine


def test_frozen_front_runs_no_backward_product(world):
    (dense, _), (frozen, engine) = counts(world, DENSE), counts(world, FROZEN)
    microbatches = engine.settings.pipeline.microbatches
    assert dense.products - frozen.products == 2 * BACKWARD_PRODUCTS * microbatches
    assert dense.attention - frozen.attention == dense.attention / 2 > 0


def test_frozen_front_has_no_gradients_and_moments(world):
    (dense, _), (frozen, engine) = counts(world, DENSE), counts(world, FROZEN)
    front = {name for _, name, _ in engine.item_store.parameters() if is_front(name)}
    assert front
    assert front <= dense.with_gradient
    assert front <= dense.with_moments
    assert frozen.with_gradient == dense.with_gradient - front
    assert frozen.with_moments == dense.with_moments - front


def test_freeze_event_reports_gradients_and_moments_that_were_freed(world):
    engine = engine_of(FROZEN, world)
    engine.train_step(batch_of(1), sampled=False)
    store = engine.item_store
    front = {name: parameter for _, name, parameter in store.parameters() if is_front(name)}
    moments = sum(moment.nbytes for name in front for moment in store.optimizers.moments(name).values())
    [event] = engine.after_step(1)
    elements = sum(parameter.numel() for parameter in front.values())
    assert event.detail["freed_gradient_bytes"] == [4 * elements]
    assert event.detail["freed_optimizer_bytes"] == [moments]
    assert moments == 2 * 4 * elements
    assert event.freed_items == tuple(event.detail["frozen_items"])
    assert {item for item in store.modules if is_front(item)} == set(event.freed_items)
    assert f"{4 * elements / 1e3:.1f} kB + {moments / 1e3:.1f} kB on pipeline rank 0" in event.message
    assert engine.after_step(2) == []


def test_second_freeze_reports_what_it_frees_itself(world):
    engine = engine_of(replace(FROZEN, freeze=((1, 1), (2, 2))), world)
    for step in (1, 2):
        engine.train_step(batch_of(step), sampled=False)
        [event] = engine.after_step(step)
    block = sum(p.numel() for _, name, p in engine.item_store.parameters() if name.startswith("layers.1."))
    assert event.detail["freed_gradient_bytes"] == [4 * block]
    assert event.detail["freed_optimizer_bytes"] == [8 * block]
    assert event.freed_items == ("layers.1.attention", "layers.1.mlp")


def test_freed_bytes_of_a_pipeline_rank_are_those_of_its_largest_process(monkeypatch):
    found = [[0, 5_000_000, 70], [0, 6_000_000, 60], [1, 0, 0], [1, 0, 0]]
    monkeypatch.setattr(freezing, "all_gather_objects", lambda _world, _own: found)
    two = SimpleNamespace(pipeline_rank=0, dims=ParallelDims(pipeline=2, data=2))
    freed = FreedBytes.by_rank(two, 5_000_000, 70)
    assert freed == FreedBytes(gradients=[6_000_000, 0], optimizer=[70, 0])
    assert freed.text() == "freed gradients + optimizer state: 6.0 MB + 70 B on pipeline rank 0"
    assert FreedBytes(gradients=[0], optimizer=[0]).text() == "freed nothing"
    many = FreedBytes(gradients=[1] * 6, optimizer=[2] * 6).text()
    assert many.endswith("1 B + 2 B on pipeline rank 3, and on 2 more")


# What else the front's owners take with them, and a tied weight that later items own: it trains on.
SHARED_WITH_LATER = {
    "deepseek": ({"embedding.word.weight", "mtp.0.embedding.word.weight"}, {"head.weight", "head.norm.weight"}),
    "t5-relative": ({"head.weight", "decoder.embedding.word.weight"}, {"decoder.layers.0.attention.relative.weight"}),
    "capped": ({"embedding.word.weight", "head.weight"}, {"head.norm.weight"}),
}


@pytest.mark.parametrize("model", SHARED_WITH_LATER)
def test_tied_weights_freeze_with_their_owner_and_on_request(world, model):
    shared, later = SHARED_WITH_LATER[model]
    scenario = replace(FROZEN, model=model, freeze=((1, 1),))
    (training, _), (frozen, _) = (counts(world, replace(scenario, freeze_tied=tied)) for tied in (False, True))
    assert shared | later <= training.with_moments
    assert later <= frozen.with_moments
    assert not shared & frozen.with_moments


def test_frozen_table_in_shards_leaves_the_rows_of_the_output_layer(world):
    scenario = replace(FROZEN, model="deepseek", shards=2, freeze=((1, 1),), freeze_tied=True)
    (training, _), (frozen, _) = (counts(world, replace(scenario, freeze_tied=tied)) for tied in (False, True))
    assert training.with_moments - frozen.with_moments == {
        f"vocabulary.{shard}.embedding.word.weight" for shard in (0, 1)
    }
