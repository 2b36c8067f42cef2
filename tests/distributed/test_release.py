"""Workers that leave a run: the others go on with the same bits, on every kind of layout, and nobody waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from dynmo_train.models.moe import MoeShape
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, all_gather_objects, set_parallel_dims
from dynmo_train.parallel.shrink import without_workers
from dynmo_train.pipeline.migration import MoveError
from dynmo_train.pipeline.partition import Partition
from tests.distributed.layouts import Layout, engine_on
from tests.distributed.scenario import Scenario, batch_of, digest
from tests.distributed.test_placement import NAMES, cut
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS = 7


@dataclass(frozen=True, kw_only=True)
class Release:
    """After a step some pipeline positions leave; the others hold these stages."""

    step: int
    leaving: tuple[int, ...]
    stages: Partition
    spoil: bool = False


def flip(item: str, block) -> None:
    block[len(block) // 2] ^= 1


def play(world: World, layout: Layout, releases: list[Release]) -> dict[str, Any] | None:
    """Train; None at processes that left."""
    world = set_parallel_dims(world, layout.dims, 60)
    engine = engine_on(world, layout)
    due = {release.step: release for release in releases}
    losses, errors = [], []
    for step in range(1, STEPS + 1):
        losses.append(engine.train_step(batch_of(step), sampled=step % 2 == 0).loss)
        engine.after_step(step)
        if step not in due:
            continue
        release = due[step]
        staying = tuple(p for p in range(engine.world.dims.pipeline) if p not in release.leaving)
        try:
            engine.repartition(replace(release.stages, places=staying), flip if release.spoil else None)
        except MoveError as error:
            errors.append(str(error))
            continue
        left = without_workers(engine.world, release.leaving, 60)
        if left is None:
            return None
        engine.set_world(left)
    own = {
        f"{name}@{engine.world.tensor_rank}.{engine.world.data_rank % layout.dims.expert}": digest(tensor)
        for item in engine.local_names
        for name, tensor in engine.item_store.export_unsharded(item).tensors.items()
    }
    weights: dict[str, str] = {}
    for told in all_gather_objects(engine.world, own):
        for name, value in told.items():
            assert weights.setdefault(name, value) == value, f"replicas differ in {name}"
    held_out = engine.evaluate([batch_of(9999)])
    return {"losses": losses, "held_out": held_out, "weights": weights, "errors": errors}


def of_those_left(layout: Layout, releases: list[Release]) -> tuple[dict[str, Any], int]:
    """What the processes that stayed say in common, and how many left."""
    results = run_workers(play, layout.dims.size, layout, releases)
    stayed = [result for result in results if result is not None]
    for result in stayed:
        assert result == stayed[0]
    return stayed[0], len(results) - len(stayed)


LONG = Scenario(freeze=((4, 1),))
MIDDLE = cut(2, 5)
WHOLE = Partition(stages=(NAMES,), workers=1)
CASES = {
    "pipeline": (ParallelDims(pipeline=4), LONG, {}, [Release(step=4, leaving=(1, 3), stages=MIDDLE)]),
    "twice, to one": (
        ParallelDims(pipeline=4),
        replace(LONG, schedule="gpipe"),
        {},
        [
            Release(step=3, leaving=(2,), stages=cut(3, 2, 5)),
            Release(step=6, leaving=(1, 2), stages=WHOLE),
        ],
    ),
    "interleaved": (
        ParallelDims(pipeline=3),
        replace(LONG, schedule="interleaved-1f1b", virtual=2),
        {},
        [Release(step=4, leaving=(1,), stages=replace(cut(4, 2, 4, 7), workers=2))],
    ),
    "pipeline x tensor": (
        ParallelDims(pipeline=2, tensor=2),
        LONG,
        {"sequence_parallel": True},
        [Release(step=4, leaving=(1,), stages=WHOLE)],
    ),
    "pipeline x shared": (
        ParallelDims(pipeline=2, data=2),
        LONG,
        {"zero_stage": 3, "overlap_reduction": True},
        [Release(step=4, leaving=(1,), stages=WHOLE)],
    ),
    "pipeline x tensor x replicas": (
        ParallelDims(pipeline=2, tensor=2, data=2),
        replace(LONG, schedule="gpipe"),
        {"zero_stage": 1},
        [Release(step=4, leaving=(1,), stages=WHOLE)],
    ),
    "pipeline x experts": (
        ParallelDims(pipeline=2, data=2, expert=2),
        replace(LONG, prune=False, moe=MoeShape(num_experts=4, top_k=2)),
        {},
        [Release(step=4, leaving=(1,), stages=WHOLE)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_others_go_on_with_the_same_bits(name):
    dims, scenario, settings, releases = CASES[name]
    layout = Layout(dims=dims, scenario=scenario, settings=settings)
    stayed, left = of_those_left(layout, releases)
    alone = Layout(
        dims=replace(dims, pipeline=1), scenario=replace(scenario, schedule="gpipe", virtual=1), settings=settings
    )
    expected, nobody = of_those_left(alone, [])
    gone = sum(len(release.leaving) for release in releases)
    assert (left, nobody) == (gone * dims.tensor * dims.data, 0)
    assert stayed == expected


def test_a_failed_release_leaves_everybody_where_he_was():
    layout = Layout(dims=ParallelDims(pipeline=3), scenario=LONG)
    spoiled = Release(step=4, leaving=(2,), stages=cut(2, 3), spoil=True)
    stayed, left = of_those_left(layout, [spoiled])
    assert left == 0
    assert "CRC-32" in stayed.pop("errors")[0]
    expected, _ = of_those_left(Layout(dims=ParallelDims(), scenario=LONG), [])
    assert expected.pop("errors") == []
    assert stayed == expected
