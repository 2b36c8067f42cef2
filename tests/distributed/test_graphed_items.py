"""Items in CUDA graphs, without a device: static memory as ``torch.cuda.make_graphed_callables`` has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline import graphed_items
from tests.distributed.scenario import Scenario, engine_of, merged, play
from tests.distributed.static_memory import on_static_memory
from tests.distributed.test_placement import cut, vee
from tests.distributed.workers import run_workers
from tests.levels import complete_but

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

BASE = Scenario(steps=8, prune=False, freeze=((3, 1), (6, 2)), attention_dropout=0.0)


def graphed_play(world: World, scenario: Scenario):
    graphed_items.make_graphed_callables = on_static_memory
    return play(world, replace(scenario, cuda_graphs=True))


CASES = {
    "1 worker": (1, BASE),
    "1 worker, gpipe": (1, replace(BASE, schedule="gpipe")),
    "1 worker, bf16": (1, replace(BASE, precision="bf16")),
    "1 worker, t5": (1, replace(BASE, model="t5", freeze=())),
    "2 workers, moving": (2, replace(BASE, moves=((2, cut(2, 2)), (5, cut(2, 7))))),
    "2 workers, bf16, moving": (2, replace(BASE, precision="bf16", moves=((2, cut(2, 7)),))),
    "2 workers, interleaved": (2, replace(BASE, schedule="interleaved-1f1b", virtual=2)),
    "2 workers, zb-v, moving": (2, replace(BASE, schedule="zb-v", virtual=2, moves=((3, vee(cut(2, 1, 5, 8))),))),
    "2 workers, dualpipe-v": (2, replace(BASE, schedule="dualpipe-v", virtual=2)),
}


@pytest.mark.parametrize("name", complete_but(CASES, "1 worker, gpipe", "2 workers, moving"))
def test_items_on_static_memory_have_the_bits_of_plain_ones(name):
    workers, scenario = CASES[name]
    plain = replace(scenario, schedule="gpipe", virtual=1, moves=())
    expected = run_workers(play, 1, plain)[0]
    got = merged(run_workers(graphed_play, workers, scenario))
    for key in ("losses", "norms", "eval_loss", "weights"):
        assert got[key] == expected[key], key


def captured(world: World, scenario: Scenario):
    """How often items are captured, and what is not captured at the end."""
    calls = []

    def counted(functions, samples, **options):
        calls.append(len(functions))
        return on_static_memory(functions, samples, **options)

    graphed_items.make_graphed_callables = counted
    engine = engine_of(replace(scenario, cuda_graphs=True), world)
    for step in range(1, scenario.steps + 1):
        engine.train_step(scenario.batch(step), sampled=False)
        engine.after_step(step)
        for at, partition in scenario.moves:
            if at == step:
                engine.repartition(partition)
    return calls, engine.pipeline().graph_obstacles


def test_items_are_captured_per_slot_and_again_after_a_change():
    """Four layers of two items on two workers: 2 microbatches in flight on the first, 1 on the second."""
    scenario = replace(BASE, steps=4, freeze=((2, 1),), moves=((3, cut(2, 3)),))
    first, second = run_workers(captured, 2, scenario)
    # Before the freeze; after it, without the first layer; after the move, with no item of the first stage left.
    assert first[0] == [4] * 2 + [2] * 2
    assert second[0] == [4, 4, 6]
    assert first[1] == {
        "embedding": "only attention and MLP blocks of static shapes are captured",
        "layers.0.attention": "it is frozen, and runs without a backward",
        "layers.0.mlp": "it is frozen, and runs without a backward",
    }
    assert list(second[1]) == ["head"]


def test_items_with_attention_dropout_are_not_captured():
    _, obstacles = run_workers(captured, 1, replace(BASE, steps=1, attention_dropout=0.1))[0]
    assert {reason for name, reason in obstacles.items() if name.endswith("attention")} == {
        "attention dropout draws from torch's generator"
    }
    assert not [name for name in obstacles if name.endswith("mlp")]
