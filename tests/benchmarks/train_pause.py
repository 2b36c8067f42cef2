"""Pause of a migration, against a bare gloo transfer of the same bytes over the same link.

    python tests/benchmarks/train_pause.py [--layers 8 --width 512 --moved 4 --rounds 3]

Two processes hold a GPT with Adam's moments; some blocks move from worker 0 to worker 1 and back, as at a step
boundary: announcement, transfer, checksums, commit, new stages and schedule. The pause is the longer of both processes'
times; the bare transfer is one isend and irecv of the same number of bytes between the same processes, in memory that
both have used before.
Goal: 1.2 x the bare transfer + 50 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from train_engine_overhead import Sizes, batch_of, engine_of, log, processes

from dynmo_train.launch.elastic.node_agent import KEEP_MEMORY
from dynmo_train.parallel.process_groups import World, all_gather_objects
from dynmo_train.pipeline.partition import Partition

Row = tuple[int, float, float]


def pauses(world: World, sizes: Sizes, moved: int, rounds: int) -> list[Row]:
    """(bytes, seconds of the pause, seconds of the bare transfer) of each move."""
    engine = engine_of(world, sizes, 2)
    names = tuple(item.name for item in engine.family.items)
    middle = len(engine.partition.stages[0])
    for step in (1, 2):
        engine.train_step(batch_of(step, sizes, 2), sampled=False)
    for name in names:
        engine.item_store.blueprint(name)  # as a run does for the profile's header
    rows: list[Row] = []
    for number in range(2 * rounds):
        cut = middle - 2 * moved if number % 2 == 0 else middle
        reports = []

        def move(cut: int = cut) -> None:
            partition = Partition.looped((names[:cut], names[cut:]), 2)
            reports.append(engine.repartition(partition))  # noqa: B023 - called at once
            engine.pipeline()

        pause = together(world, move)
        total = reports[0].total_bytes
        rows.append((total, pause, bare(world, total, backwards=number % 2 == 1)))
        engine.train_step(batch_of(number + 3, sizes, 2), sampled=False)
    return rows


def bare(world: World, size: int, *, backwards: bool) -> float:
    """Seconds that this number of bytes takes from one process to the other; median of 3 after a warm-up."""
    block = torch.ones(size, dtype=torch.uint8)
    sends = world.rank == (1 if backwards else 0)

    def transfer() -> None:
        operation = dist.P2POp(dist.isend if sends else dist.irecv, block, 1 - world.rank)
        for work in dist.batch_isend_irecv([operation]):
            work.wait()

    return statistics.median([together(world, transfer) for _ in range(4)][1:])


def together(world: World, act: Callable[[], None]) -> float:
    """Seconds until the slower of both processes has done it."""
    dist.barrier()
    started = time.perf_counter()
    act()
    return float(max(all_gather_objects(world, time.perf_counter() - started)))


def main() -> None:
    """Print a table row for each move."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 8), ("width", 512), ("moved", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    for name, text in KEEP_MEMORY.items():
        os.environ.setdefault(name, text)
    sizes = {"layers": given.layers, "width": given.width, "heads": 8}
    sizes |= {"tokens": 16, "vocabulary": 1024, "micro_batch": 1}
    log("| MB | pause ms | bare transfer ms | goal ms | |")
    log("|---|---|---|---|---|")
    for size, pause, plain in processes(pauses, 2, 1, sizes, given.moved, given.rounds):
        goal = 1.2 * plain + 0.05
        verdict = "reached" if pause <= goal else "not reached"
        log(f"| {size / 1e6:.1f} | {pause * 1e3:.1f} | {plain * 1e3:.1f} | {goal * 1e3:.1f} | {verdict} |")


if __name__ == "__main__":
    main()
