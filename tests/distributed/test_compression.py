"""Compressed backpropagation and lazy error propagation on every schedule, with every axis, moving."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from dynmo_train.optim.compression.settings import NO_COMPRESSION, CompressionSettings
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, all_gather_objects, set_parallel_dims
from dynmo_train.trainer.engine import Engine
from tests.distributed.layouts import Layout, engine_on
from tests.distributed.scenario import MICRO_BATCH, MICROBATCHES, SHAPE, TOKENS, Scenario, batch_of, digest
from tests.distributed.test_placement import cut, vee
from tests.distributed.workers import run_workers
from tests.levels import complete_but

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

CB = CompressionSettings(boundary_rank=4)
LEP = replace(CB, feedback=True)
EPILOGUE = replace(LEP, epilogue_only=True)
ALL_RANKS = replace(LEP, boundary_rank=SHAPE.hidden_size)
WHOLE_BYTES = MICRO_BATCH * TOKENS * SHAPE.hidden_size * 4
FACTOR_BYTES = (MICRO_BATCH * TOKENS + SHAPE.hidden_size) * 4 * 4

TWO, FOUR = ParallelDims(pipeline=2), ParallelDims(pipeline=4)
BASE = Scenario(steps=3, prune=False, freeze=())
LAYOUTS = {
    "1f1b": (TWO, BASE),
    "gpipe, recompute": (TWO, replace(BASE, schedule="gpipe", recompute=True)),
    "interleaved": (TWO, replace(BASE, schedule="interleaved-1f1b", virtual=2)),
    "interleaved, moving": (
        TWO,
        replace(BASE, schedule="interleaved-1f1b", virtual=2, start=cut(2, 2, 5, 8), moves=((2, cut(2, 1, 5, 8)),)),
    ),
    "zero-bubble": (TWO, replace(BASE, schedule="zero-bubble")),
    "dualpipe-v": (TWO, replace(BASE, schedule="dualpipe-v", virtual=2)),
    "zb-v": (TWO, replace(BASE, schedule="zb-v", virtual=2, moves=((2, vee(cut(2, 1, 5, 8))),))),
    "bf16, selective recompute": (TWO, replace(BASE, precision="bf16", recompute=True, selective=True)),
    "fp16, overflowing": (TWO, replace(BASE, precision="fp16", steps=11)),
    "front frozen": (TWO, replace(BASE, freeze=((2, 3),), start=cut(2, 2))),
    "t5": (TWO, replace(BASE, model="t5")),
    "four workers, moving, an empty stage": (FOUR, replace(BASE, start=cut(4, 1, 4, 8), moves=((2, cut(4, 4, 8, 8)),))),
    "replicas": (ParallelDims(pipeline=2, data=2), BASE),
    "tensor": (ParallelDims(pipeline=2, tensor=2), BASE),
    "tensor, fp16": (ParallelDims(pipeline=2, tensor=2), replace(BASE, precision="fp16", steps=10)),
    "tensor, tokens cut, moving": (ParallelDims(pipeline=2, tensor=2), replace(BASE, moves=((2, cut(2, 3)),))),
}
SETTINGS = {"tensor, tokens cut, moving": {"sequence_parallel": True}}


def play(world: World, runs: list[tuple[Layout, CompressionSettings]]) -> list[dict[str, Any]]:
    """Train each; losses, final state, memories, and the bytes of the gradients."""
    return [_play(set_parallel_dims(world, layout.dims, 60), layout, compression) for layout, compression in runs]


def _play(world: World, layout: Layout, compression: CompressionSettings) -> dict[str, Any]:
    scenario = layout.scenario
    engine = engine_on(world, replace(layout, settings={**layout.settings, "compression": compression}))
    moves, losses, stats, remembered = dict(scenario.moves), [], [], []
    for step in range(1, scenario.steps + 1):
        result = engine.train_step(batch_of(step, scenario.model), sampled=False)
        losses.append(result.loss)
        stats.append(result.compression)
        engine.after_step(step)
        remembered.append(_memories(engine))
        if step in moves:
            engine.repartition(moves[step])
            remembered.append(_memories(engine))
    eval_loss = engine.evaluate([batch_of(9999, scenario.model)])
    state = {
        name: digest(tensor)
        for item in engine.local_names
        for name, tensor in engine.item_store.export(item).tensors.items()
    }
    everyone = all_gather_objects(world, [state, remembered])
    return {
        "losses": losses,
        "eval_loss": eval_loss,
        "states": [one for one, _ in everyone],
        "remembered": [one for _, one in everyone],
        "stats": stats,
    }


def _memories(engine: Engine) -> dict[str, str]:
    return {
        name: digest(tensor) for memories in engine.item_store.memories.values() for name, tensor in memories.items()
    }


KINDS = {
    "whole": NO_COMPRESSION,
    "all ranks": ALL_RANKS,
    "lep": replace(LEP, check_ratio=True),
    "lep again": LEP,
    "epilogue": replace(EPILOGUE, check_ratio=True),
}
IN_EPILOGUE = ("1f1b", "gpipe, recompute", "interleaved", "dualpipe-v")
GROUPS = [
    ("1f1b", "gpipe, recompute", "interleaved", "interleaved, moving"),
    ("zero-bubble", "dualpipe-v", "zb-v", "bf16, selective recompute"),
    ("fp16, overflowing", "front frozen", "t5"),
    ("four workers, moving, an empty stage", "replicas", "tensor", "tensor, tokens cut, moving"),
    ("tensor, fp16",),
]


@cache
def group_played(group: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Some layouts in one set of processes: whole, with full rank, and twice with each kind of compression."""
    names = GROUPS[group]
    pairs = [(name, kind) for name in names for kind in KINDS if kind != "epilogue" or name in IN_EPILOGUE]
    runs = [
        (Layout(dims=LAYOUTS[name][0], scenario=LAYOUTS[name][1], settings=SETTINGS.get(name, {})), KINDS[kind])
        for name, kind in pairs
    ]
    return dict(zip(pairs, run_workers(play, LAYOUTS[names[0]][0].size, runs)[0], strict=True))


def played(name: str, kind: str) -> dict[str, Any]:
    return group_played(next(at for at, names in enumerate(GROUPS) if name in names))[name, kind]


@pytest.mark.parametrize("name", complete_but(LAYOUTS, *GROUPS[0]))
def test_full_rank_compression_is_lossless(name):
    whole, full = played(name, "whole"), played(name, "all ranks")
    tolerance = 2e-2 if "16" in name else 1e-4
    assert full["losses"] == pytest.approx(whole["losses"], rel=tolerance)
    assert full["eval_loss"] == pytest.approx(whole["eval_loss"], rel=tolerance)


@pytest.mark.parametrize("name", complete_but(LAYOUTS, *GROUPS[0]))
def test_low_rank_compression_is_lossy_and_reproducible(name):
    whole, lossy, again = (played(name, kind) for kind in ("whole", "lep", "lep again"))
    assert lossy["losses"][0] == whole["losses"][0]
    assert lossy["losses"] != whole["losses"]
    assert {key: lossy[key] for key in lossy if key != "stats"} == {key: again[key] for key in again if key != "stats"}


def sent(name: str, kind: str, step: int) -> dict[str, tuple[int, int]]:
    """Boundary -> bytes of the gradients that crossed it in a step as factors, and what they would be whole."""
    boundaries = played(name, kind)["stats"][step - 1].get("boundaries", {})
    return {boundary: (one["sent_bytes"], one["uncompressed_bytes"]) for boundary, one in boundaries.items()}


@pytest.mark.complete
def test_compression_covers_all_microbatches_or_the_epilogue():
    every = (MICROBATCHES * FACTOR_BYTES, MICROBATCHES * WHOLE_BYTES)
    two = (2 * FACTOR_BYTES, 2 * WHOLE_BYTES)
    assert sent("1f1b", "lep", 1) == {"layers.2.attention": every}
    assert sent("1f1b", "epilogue", 1) == {"layers.2.attention": two}
    assert sent("gpipe, recompute", "epilogue", 1) == {"layers.2.attention": every}
    assert set(sent("interleaved", "lep", 1)) == {"layers.1.attention", "layers.2.attention", "layers.3.attention"}
    assert sum(one for one, _ in sent("interleaved", "epilogue", 1).values()) < 3 * every[0]
    # In a V the two stages at the turn are on one worker, and send nothing
    assert set(sent("zb-v", "lep", 1)) == {"layers.1.attention", "layers.3.attention"}
    # After the last forward of its worker: stage 0 receives three gradients, stage 2 two.
    epilogue = {name: one // FACTOR_BYTES for name, (one, _) in sent("dualpipe-v", "epilogue", 1).items()}
    assert epilogue == {"layers.1.attention": 3, "layers.3.attention": 2}
    assert set(sent("front frozen", "lep", 2)) == {"layers.0.mlp"}
    assert sent("front frozen", "lep", 3) == {}


def test_stage_without_items_forwards_the_factors():
    boundaries = sent("four workers, moving, an empty stage", "lep", 3)
    # The third stage is empty: the factors before the last one's first item are made once, and sent twice
    assert {name: one for name, (one, _) in boundaries.items()} == {
        "layers.1.mlp": MICROBATCHES * FACTOR_BYTES,
        "layers.3.mlp": MICROBATCHES * FACTOR_BYTES,
    }


def test_memories_move_with_the_item_after_the_boundary():
    """In a loop of two workers layers 2 and 3 keep their boundaries; that at layer 0's MLP is new, layer 1's gone."""
    steps = [
        {name: value for one in memories for name, value in one.items() if name.endswith("hidden.error")}
        for memories in zip(*played("interleaved, moving", "lep")["remembered"], strict=True)
    ]
    boundaries = [{name.partition(".memory")[0] for name in step} for step in steps]
    assert boundaries[0] == boundaries[1] == {"layers.0.mlp", "layers.2.attention", "layers.3.mlp"}
    assert boundaries[-1] == {"layers.0.attention", "layers.2.attention", "layers.3.mlp"}
    four = played("four workers, moving, an empty stage", "lep")["remembered"]
    name = "layers.1.mlp.memory.boundary.hidden.error"
    holders = [[worker for worker, steps in enumerate(four) if name in steps[at]] for at in range(4)]
    assert holders == [[2], [2], [1], [1]]
    before, moved, later = four[2][1][name], four[1][2][name], four[1][3][name]
    assert before == moved != later


@pytest.mark.complete
def test_memories_differ_by_replica_and_not_by_tensor_rank():
    name = "layers.2.attention.memory.boundary.hidden.error"
    replicas = [steps[-1][name] for steps in played("replicas", "lep")["remembered"] if name in steps[-1]]
    assert len(replicas) == len(set(replicas)) == 2
    tensor = [steps[-1][name] for steps in played("tensor", "lep")["remembered"] if name in steps[-1]]
    assert (len(tensor), len(set(tensor))) == (2, 1)
    # Where the tokens are cut every tensor rank sends, and owes, its own
    apart = [steps[0][name] for steps in played("tensor, tokens cut, moving", "lep")["remembered"] if name in steps[0]]
    assert (len(apart), len(set(apart))) == (2, 2)
    assert sent("tensor, tokens cut, moving", "lep", 1)["layers.2.attention"][1] == MICROBATCHES * WHOLE_BYTES
