"""What the code of compression costs where nothing is compressed: paired steps with and without that code.

Two processes, one pipeline. Two engines with the same weights alternate step by step, in an order that alternates too;
one has the stages of the trainer with compression off, the other stages without a line of compression
(``tests/distributed/plain_stage.py``). The result is the mean of the paired differences with its 95 % interval: of the
step by the clock of rank 0, and of its processor time. Losses must be the same bits.

python tests/benchmarks/train_compression_off.py [--pairs 60] [--width 128]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from dynmo_train._common.console import emit
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from dynmo_train.trainer.engine import Engine
from tests.distributed import scenario
from tests.distributed.layouts import Layout, engine_on
from tests.distributed.plain_stage import PlainEngine
from tests.distributed.workers import run_workers

WARM_UP_PAIRS = 4
NORMAL_95 = 1.96


def paired(world: World, pairs: int, width: int, swapped: bool) -> list[tuple[float, float, float, float]]:
    """(clock, processor) seconds of the step with and the step without the code, of each pair."""
    scenario.SHAPE = replace(scenario.SHAPE, hidden_size=width, ffn_hidden_size=4 * width)
    layout = Layout(dims=ParallelDims(pipeline=2), scenario=scenario.Scenario(prune=False, freeze=()))
    world = set_parallel_dims(world, layout.dims, 60)
    # Which of them is made first decides where its memory lies
    made = {kind: engine_on(world, layout, kind=kind) for kind in ((PlainEngine, Engine)[:: -1 if swapped else 1])}
    engines = [made[Engine], made[PlainEngine]]
    pairs_ns = []
    for pair in range(1, pairs + WARM_UP_PAIRS + 1):
        batch = scenario.batch_of(pair)
        times, losses = [(0.0, 0.0), (0.0, 0.0)], [0.0, 0.0]
        for at in (0, 1) if pair % 2 else (1, 0):
            begun, working = time.perf_counter(), time.process_time()
            losses[at] = engines[at].train_step(batch, sampled=False).loss
            times[at] = (time.perf_counter() - begun, time.process_time() - working)
        if losses[0] != losses[1]:
            raise SystemExit(f"losses differ in step {pair}: {losses}")
        if pair > WARM_UP_PAIRS:
            pairs_ns.append((*times[0], *times[1]))
    return pairs_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    emit("| run | figure | without the code ms | compression off ms | difference | 95 % interval |")
    emit("|---|---|---|---|---|---|")
    everything: list[tuple[float, float, float, float]] = []
    for repeat in range(given.repeats):
        found = run_workers(paired, 2, given.pairs, given.width, bool(repeat % 2))[0]
        report(found, str(repeat + 1))
        everything += found
    report(everything, "all")


def report(found: list[tuple[float, float, float, float]], run: str) -> None:
    for name, with_code, without in (("step", 0, 2), ("processor", 1, 3)):
        base = statistics.fmean(row[without] for row in found)
        differences = [(row[with_code] - row[without]) / base for row in found]
        mean = statistics.fmean(differences)
        half = NORMAL_95 * statistics.stdev(differences) / math.sqrt(len(differences))
        ours = statistics.fmean(row[with_code] for row in found)
        interval = f"{mean - half:+.2%} to {mean + half:+.2%}"
        emit(f"| {run} | {name} | {base * 1e3:.2f} | {ours * 1e3:.2f} | {mean:+.2%} | {interval} |")


if __name__ == "__main__":
    main()
