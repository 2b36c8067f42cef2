"""Released workers: the others continue with the same bits, on every kind of layout, and nobody waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

import dynmo_train.pipeline.migration as migration
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, all_gather_objects, set_parallel_dims
from dynmo_train.parallel.shrink import without_workers
from dynmo_train.pipeline.migration import MoveError
from dynmo_train.pipeline.partition import Partition
from tests.distributed.layouts import Layout, engine_on
from tests.distributed.scenario import Scenario, batch_of, digest
from tests.distributed.test_placement import NAMES, cut
from tests.distributed.workers import run_workers
from tests.levels import complete_but

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS = 7


@dataclass(frozen=True, kw_only=True)
class Release:
    """Pipeline ranks that are released after a step, and the stages of the others."""

    step: int
    released: tuple[int, ...]
    stages: Partition
    fails: bool = False


def fail_checksums(rank: int) -> None:
    """Let sender and receiver compute different checksums of the same bytes."""
    proper = migration.crc_after
    migration.crc_after = lambda block, crc: proper(block, crc) ^ (1 + rank)


def play(world: World, layout: Layout, releases: list[Release]) -> dict[str, Any] | None:
    """Train; None on released ranks."""
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
        remaining = tuple(p for p in range(engine.world.dims.pipeline) if p not in release.released)
        if release.fails:
            fail_checksums(engine.world.rank)
        try:
            engine.repartition(
                replace(release.stages, stage_ranks=tuple(remaining[r] for r in release.stages.stage_ranks))
            )
        except MoveError as error:
            errors.append(str(error))
            continue
        smaller = without_workers(engine.world, release.released, 60)
        if smaller is None:
            return None
        engine.set_world(smaller)
    own = {
        f"{name}@{engine.world.tensor_rank}.{engine.world.data_rank % layout.dims.expert}": digest(tensor)
        for item in engine.local_names
        for name, tensor in engine.item_store.export_unsharded(item).tensors.items()
    }
    weights: dict[str, str] = {}
    for local in all_gather_objects(engine.world, own):
        for name, value in local.items():
            assert weights.setdefault(name, value) == value, f"replicas differ in {name}"
    eval_loss = engine.evaluate([batch_of(9999)])
    return {"losses": losses, "eval_loss": eval_loss, "weights": weights, "errors": errors}


def play_releases(layout: Layout, releases: list[Release]) -> tuple[dict[str, Any], int]:
    """The result that all remaining ranks share, and the number of released ranks."""
    results = run_workers(play, layout.dims.size, layout, releases)
    remaining = [result for result in results if result is not None]
    for result in remaining:
        assert result == remaining[0]
    return remaining[0], len(results) - len(remaining)


LONG = Scenario(freeze=((4, 1),))
MIDDLE = cut(2, 5)
WHOLE = Partition.looped((NAMES,), 1)
CASES = {
    "pipeline": (ParallelDims(pipeline=4), LONG, {}, [Release(step=4, released=(1, 3), stages=MIDDLE)]),
    "twice, to one": (
        ParallelDims(pipeline=4),
        replace(LONG, schedule="gpipe"),
        {},
        [
            Release(step=3, released=(2,), stages=cut(3, 2, 5)),
            Release(step=6, released=(1, 2), stages=WHOLE),
        ],
    ),
    "interleaved": (
        ParallelDims(pipeline=3),
        replace(LONG, schedule="interleaved-1f1b", virtual=2),
        {},
        [Release(step=4, released=(1,), stages=cut(2, 2, 4, 7))],
    ),
    "pipeline x tensor": (
        ParallelDims(pipeline=2, tensor=2),
        LONG,
        {"sequence_parallel": True},
        [Release(step=4, released=(1,), stages=WHOLE)],
    ),
    "pipeline x shared": (
        ParallelDims(pipeline=2, data=2),
        LONG,
        {"zero_stage": 3, "overlap_reduction": True},
        [Release(step=4, released=(1,), stages=WHOLE)],
    ),
    "pipeline x copies of shards": (
        ParallelDims(pipeline=2, data=4, hsdp=2),
        LONG,
        {"zero_stage": 2, "zero_sync_microbatches": True},
        [Release(step=4, released=(1,), stages=WHOLE)],
    ),
    "pipeline x tensor x replicas": (
        ParallelDims(pipeline=2, tensor=2, data=2),
        replace(LONG, schedule="gpipe"),
        {"zero_stage": 1},
        [Release(step=4, released=(1,), stages=WHOLE)],
    ),
    "pipeline x experts": (
        ParallelDims(pipeline=2, data=2, expert=2),
        replace(LONG, prune=False, moe=MoeShape(num_experts=4, top_k=2)),
        {},
        [Release(step=4, released=(1,), stages=WHOLE)],
    ),
}


@pytest.mark.parametrize("name", complete_but(CASES, "pipeline", "twice, to one"))
def test_release_leaves_the_bits_of_the_others(name):
    dims, scenario, settings, releases = CASES[name]
    layout = Layout(dims=dims, scenario=scenario, settings=settings)
    remaining, num_released = play_releases(layout, releases)
    alone = Layout(
        dims=replace(dims, pipeline=1), scenario=replace(scenario, schedule="gpipe", virtual=1), settings=settings
    )
    expected, none = play_releases(alone, [])
    num_stages = sum(len(release.released) for release in releases)
    assert (num_released, none) == (num_stages * dims.tensor * dims.data, 0)
    assert remaining == expected


def test_failed_release_leaves_all_ranks_in_the_run():
    layout = Layout(dims=ParallelDims(pipeline=3), scenario=LONG)
    failing = Release(step=4, released=(2,), stages=cut(2, 3), fails=True)
    remaining, num_released = play_releases(layout, [failing])
    assert num_released == 0
    assert "CRC-32" in remaining.pop("errors")[0]
    expected, _ = play_releases(Layout(dims=ParallelDims(), scenario=LONG), [])
    assert expected.pop("errors") == []
    assert remaining == expected
