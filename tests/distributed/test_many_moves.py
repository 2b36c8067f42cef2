"""Many moves under random plans: no drift from a run without moves, no growth of memory or open files."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from dynmo_train.parallel.process_groups import World
from tests.distributed.scenario import Scenario, batch_of, engine_of, fingerprint, merged
from tests.distributed.test_placement import NAMES, cut
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

LONG = Scenario(steps=120, freeze=((20, 1), (60, 2)))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wander(world: World, scenario: Scenario, every: int):
    """Train; every few steps move to a partition drawn with a seed that all workers share."""
    engine = engine_of(scenario, world)
    draw = random.Random(7)
    losses, open_after, moved = [], [], 0
    for step in range(1, scenario.steps + 1):
        losses.append(engine.train_step(batch_of(step), sampled=False).loss)
        engine.after_step(step)
        if step % every == 0:
            boundaries = sorted(draw.randint(1, len(NAMES) - 1) for _ in range(world.size - 1))
            if world.size > 1:
                moved += len(engine.repartition(cut(world.size, *boundaries)).moves)
            open_after.append(open_files())
    return {"losses": losses, "weights": fingerprint(engine)}, open_after, moved


def test_moves_every_other_step_do_not_drift_or_leak():
    alone, _, _ = run_workers(wander, 1, replace(LONG, schedule="gpipe"), 2)[0]
    results = run_workers(wander, 3, LONG, 2)
    together = merged([result for result, _, _ in results])
    assert together["losses"] == alone["losses"]
    assert together["weights"] == alone["weights"]
    for _, open_after, moved in results:
        assert moved > 100
        assert open_after[-1] <= open_after[5], f"open files grew from {open_after[5]} to {open_after[-1]}"
