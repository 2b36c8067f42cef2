"""What the engine costs beyond torch's bare schedule, and what a pipeline of two gains over one process, on CPU.

    python tests/benchmarks/train_engine_overhead.py operation
    python tests/benchmarks/train_engine_overhead.py pipeline

``operation``: one step of 1F1B on two processes, per operation of the schedule: the engine's stages next to plain
``PipelineStage``s over the same items and weights, in the same processes, in turns. ``pipeline``: whole training steps
of a GPT with 16 microbatches on two processes with a thread each, on one process with one thread, and on one with two.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from plain_engine import constant, engine_batch, gpt_of
from plain_engine import engine_of as plain_engine_of
from random_batches import random_rows
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

from dynmo_train.data.batch import Batch
from dynmo_train.parallel.process_groups import World, destroy_world, init_world
from dynmo_train.pipeline.partition import Partition
from dynmo_train.trainer.engine import Engine

Sizes = dict[str, int]
SMALL: Sizes = {"layers": 4, "width": 128, "heads": 4, "tokens": 128, "vocabulary": 512, "micro_batch": 2}
LARGE: Sizes = {"layers": 8, "width": 320, "heads": 8, "tokens": 256, "vocabulary": 4096, "micro_batch": 1}


def engine_of(world: World, sizes: Sizes, microbatches: int, partition: Partition | None = None) -> Engine:
    """A GPT of these sizes without dropout, under the engine."""
    names = ("layers", "width", "heads", "tokens", "vocabulary")
    return plain_engine_of(
        gpt_of(**{name: sizes[name] for name in names}),
        world,
        microbatches=microbatches,
        boundary=(sizes["micro_batch"], sizes["tokens"], sizes["width"]),
        rate=constant(1e-3),
        partition=partition,
        beta2=0.99,
    )


def batch_of(step: int, sizes: Sizes, microbatches: int) -> Batch:
    """Random tokens."""
    rows = microbatches * sizes["micro_batch"]
    drawn = random_rows(step, rows=rows, tokens=sizes["tokens"], vocabulary=sizes["vocabulary"])
    return engine_batch(drawn, step, microbatches)


class PlainStage(nn.Module):
    """The items in a row, as anybody would write them."""

    def __init__(self, items: list[nn.Module], *, last: bool) -> None:
        super().__init__()
        self.items, self.last = nn.ModuleList(items), last

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """One microbatch; the last stage gives the loss."""
        for item in self.items[:-1] if self.last else self.items:
            x = item(x)
        return self.items[-1](x, labels) if self.last else x


def bare_schedule(engine: Engine, world: World, sizes: Sizes, microbatches: int) -> Callable[[Batch], None]:
    """One step of torch's own stage and schedule over the engine's modules."""
    first, last = world.rank == 0, world.rank == world.size - 1
    shape = (sizes["micro_batch"], sizes["tokens"], sizes["width"])
    stream = torch.empty(shape, device="meta").requires_grad_(not first)
    stage = PipelineStage(
        PlainStage([engine.item_store.modules[name] for name in engine.local_names], last=last),
        world.rank,
        world.size,
        world.device,
        input_args=torch.empty(shape[:2], dtype=torch.int64, device="meta") if first else stream,
        output_args=torch.empty((), device="meta") if last else stream.clone().requires_grad_(),
        group=world.groups.pipeline,
    )
    schedule = Schedule1F1B(
        stage, microbatches, loss_fn=lambda output, _target: output / microbatches, scale_grads=False
    )

    def step(batch: Batch) -> None:
        arguments = (batch.inputs["ids"],) if first else ()
        labels = batch.inputs["labels"]
        keywords = {"labels": labels, "target": labels} if last else {}
        schedule.step(*arguments, losses=[], return_outputs=False, **keywords)

    return step


def zero_grad(engine: Engine) -> None:
    """As an optimizer step leaves them."""
    for _, _, parameter in engine.item_store.parameters():
        parameter.grad = None


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call, begun together."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - begin


def operation(world: World, sizes: Sizes, microbatches: int, rounds: int) -> tuple[float, float]:
    """Median microseconds of an operation: of the engine, of torch's bare schedule."""
    engine = engine_of(world, sizes, microbatches)
    engine.profiler.begin_step(False, 1)
    pipeline = engine.pipeline()
    bare = bare_schedule(engine, world, sizes, microbatches)
    ours: list[float] = []
    theirs: list[float] = []
    for index in range(rounds + 2):
        batch = batch_of(index + 1, sizes, microbatches)
        for run, times in ((lambda b: pipeline.train_step(b), ours), (bare, theirs)):
            times.append(timed(lambda run=run, batch=batch: run(batch)))  # type: ignore[misc]
            zero_grad(engine)
    operations = 2 * microbatches
    return tuple(statistics.median(times[2:]) / operations * 1e6 for times in (ours, theirs))  # type: ignore[return-value]


def whole_steps(
    world: World, sizes: Sizes, microbatches: int, rounds: int, boundary: int | None
) -> tuple[float, list[int]]:
    """Median seconds of a training step, and nanoseconds of each item a microbatch."""
    names = tuple(item.name for item in engine_of(world, sizes, 1).family.items)
    partition = None
    if boundary is not None:
        partition = Partition.looped((names[:boundary], names[boundary:]), world.size)
    engine = engine_of(world, sizes, microbatches, partition)
    times: list[float] = []
    costs: list[int] = []
    for index in range(rounds + 1):
        batch = batch_of(index + 1, sizes, microbatches)
        results: list[Any] = []
        times.append(timed(lambda batch=batch, r=results: r.append(engine.train_step(batch, sampled=True))))  # type: ignore[misc]
        costs_of_ranks = results[0].costs
        costs = [
            ns for one in costs_of_ranks for ns in map(sum, zip(one["forward_ns"], one["backward_ns"], strict=True))
        ]
    return statistics.median(times[1:]), costs


def _enter(function: Callable[..., Any], rank: int, size: int, port: int, threads: int, given: Any, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(threads)
    world = init_world("cpu")
    try:
        pipe.send(function(world, *given))
    finally:
        destroy_world()


def processes(function: Callable[..., Any], size: int, threads: int, *given: Any) -> Any:
    """What the first of some processes gives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    _, nobody = context.Pipe(duplex=False)
    started = [
        context.Process(target=_enter, args=(function, r, size, port, threads, given, nobody if r else sender))
        for r in range(size)
    ]
    for process in started:
        process.start()
    result = receiver.recv()
    for process in started:
        process.join(60)
    return result


def log(line: str) -> None:
    """A line of the result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def best_cut(costs: list[int]) -> int:
    """Where to cut a list of costs in two so that the larger sum is least."""
    return min(range(1, len(costs)), key=lambda at: max(sum(costs[:at]), sum(costs[at:])))


def main() -> None:
    """Print a table row for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("operation", "pipeline"))
    parser.add_argument("--rounds", type=int, default=0)
    what = parser.parse_args()
    if what.what == "operation":
        for label, sizes in (("small", SMALL), ("large", LARGE)):
            rounds = what.rounds or (25 if label == "small" else 4)
            ours, bare = processes(operation, 2, 1, sizes, 8, rounds)
            log(f"{label}: engine {ours:.0f} us, bare schedule {bare:.0f} us an operation, ratio {ours / bare:.3f}")
        return
    rounds = what.rounds or 3
    one, costs = processes(whole_steps, 1, 1, LARGE, 16, rounds, None)
    cut = best_cut(costs)
    two, _ = processes(whole_steps, 2, 1, LARGE, 16, rounds, cut)
    threads, _ = processes(whole_steps, 1, 2, LARGE, 16, rounds, None)
    ideal = sum(costs) / max(sum(costs[:cut]), sum(costs[cut:])) * 16 / 17
    log(f"one process, one thread {one:.3f} s; two processes {two:.3f} s: {one / two:.2f} x (ideal {ideal:.2f});")
    log(f"one process, two threads {threads:.3f} s: {one / threads:.2f} x")


if __name__ == "__main__":
    main()
