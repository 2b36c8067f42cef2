"""A long run that moves all the time: no drift from the run that never moved, nothing that grows.

    nice python tests/benchmarks/train_soak.py [--steps 2000 --every 20 --workers 3]

A tiny GPT with dropout, clipping and all techniques on (gradual pruning, freezing, mixture of experts, mixture of
depths, early exit, hashed sparse attention) on ``--workers`` processes moves to a partition drawn at random every
``--every`` steps; another run of the same steps stays on one process. Losses, gradient norms and the held-out loss must
be the same bits. Memory is the resident set of rank 0 after the first fifth of the steps and at
the end; groups are torch's process groups.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from train_engine_overhead import log, processes

from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicSettings, SparseAttentionSettings
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.partition import Partition

sys.path.insert(0, str(Path(__file__).parents[2]))
import itertools

from tests.distributed.scenario import Scenario, batch_of, engine_of


def scenario(steps: int) -> Scenario:
    """All techniques."""
    dynamic = DynamicSettings(
        depths=DepthSettings(capacity=0.5, every=2, aux_weight=0.01),
        exits=ExitSettings(layers=(0, 2), loss_weight=0.3, threshold=0.003, measure="softmax"),
        sparse_attention=SparseAttentionSettings(buckets=4, block=4),
    )
    freeze = ((steps // 4, 1), (steps // 2, 2))
    return Scenario(steps=steps, dynamic=dynamic, moe=MoeShape(num_experts=4, top_k=2), freeze=freeze)


def open_resources() -> dict[str, int]:
    """Resources of this process: file descriptors, process groups, resident bytes."""
    with open("/proc/self/statm", encoding="ascii") as pages:
        resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    groups = dist.distributed_c10d._world.pg_map
    return {"files": len(os.listdir("/proc/self/fd")), "groups": len(groups), "resident": resident}


def play(world: World, steps: int, every: int) -> dict[str, Any]:
    """Train; every few steps move to a partition that all workers draw alike."""
    engine = engine_of(scenario(steps), world)
    items = engine.family.items
    names = tuple(item.name for item in items)
    cuts = [at for at, item in enumerate(items) if at and item.cut_before]
    draw = random.Random(7)
    figures = hashlib.sha256()
    moved = moved_bytes = 0
    before: dict[str, int] = {}
    for step in range(1, steps + 1):
        result = engine.train_step(batch_of(step), sampled=step % 10 == 0)
        figures.update(f"{result.loss!r} {result.grad_norm!r}\n".encode())
        engine.after_step(step)
        if step % every == 0 and world.size > 1:
            ends = [0, *sorted(draw.choice(cuts) for _ in range(world.size - 1)), len(names)]
            stages = tuple(names[begin:end] for begin, end in itertools.pairwise(ends))
            report = engine.repartition(Partition.looped(stages, world.size))
            moved, moved_bytes = moved + len(report.moves), moved_bytes + report.total_bytes
        if step == steps // 5:
            before = open_resources()
    validation = engine.evaluate([batch_of(10**6)])
    figures.update(repr(validation).encode())
    return {
        "digest": figures.hexdigest(),
        "loss": result.loss,
        "moved": moved,
        "bytes": moved_bytes,
        "before": before,
        "after": open_resources(),
    }


def main() -> None:
    """Print what both runs gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("steps", 2000), ("every", 20), ("workers", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    results = {}
    for workers in (1, given.workers):
        started = time.perf_counter()
        results[workers] = processes(play, workers, 1, given.steps, given.every)
        seconds = time.perf_counter() - started
        result = results[workers]
        log(f"{workers} workers: {given.steps} steps in {seconds:.0f} s, last loss {result['loss']!r},")
        log(f"  {result['moved']} items, {result['bytes'] / 1e6:.1f} MB moved; digest {result['digest'][:16]}")
        for name in ("files", "groups", "resident"):
            log(f"  {name}: {result['before'][name]} after a fifth of the steps, {result['after'][name]} at the end")
    same = results[1]["digest"] == results[given.workers]["digest"]
    log(f"losses and gradient norms {'identical, bit for bit' if same else 'DIFFER'}")


if __name__ == "__main__":
    main()
