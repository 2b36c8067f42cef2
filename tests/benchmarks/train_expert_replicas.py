"""Load and step time of expert layers with replicas of hot experts: real on 4 processes, emulated on 32 ranks.

    python -m tests.benchmarks.train_expert_replicas real --text FILE [--width 256 --tokens 128]
    python -m tests.benchmarks.train_expert_replicas emulated --profile RUN/profile.jsonl [--ranks 32] [--slots 3 4]

``real`` trains a small GPT on the bytes of a text, on 4 processes that share 8 experts (top-2, no balance loss). After
12 steps the experts take the placement that ``dynmo-plan`` makes of the last 6; the next 8 are measured. A row has
the largest load of a rank over the mean, and the median processor time of a step: of the busiest rank, which is the
critical path where each rank has a core, and of all ranks together. The losses show that the bits are the same.

``emulated`` takes the tokens per expert of each recorded step (``x_counts.expert_tokens``), and distributes the chunks
of each step over the ranks as the trainer does (``host_ranges``), with placements from the tokens of ``age`` steps
before (a mean over 20). A rank takes the processor time of its chunks, forward and backward, as measured here for each
size of a chunk; the exchange of rows and the transfers of copies are not charged. All ranks wait for the slowest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynmo_balance._common.console import emit
from dynmo_balance.partition.experts import EVEN, FREE, ExpertProblem, contiguous, place
from dynmo_train.data.batch import Batch
from dynmo_train.models.experts.expert_sums import ExpertSums, chunk_linear
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.families.gpt import Gpt
from dynmo_train.models.layer_list import HIDDEN, LOSS
from dynmo_train.models.layers.feed_forward import FeedForward
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.expert_chunks import Hosts, host_ranges
from dynmo_train.parallel.process_groups import World, all_gather_objects, set_parallel_dims
from dynmo_train.pipeline.expert_migration import placements_of
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.trainer.engine import Engine
from tests.distributed.scenario import SHAPE, Scenario
from tests.distributed.workers import run_workers

WINDOW, AGES = 20, (0, 1, 10, 50, 100)
RANKS, EXPERTS = 4, 8
# Placement, slots of a rank (None: without copies), and slots of the plan (None: experts stay).
CASES = (
    ("in order, whole products", None, None),
    ("in order", 4, None),
    ("moved", 4, 2),
    ("replicas", 4, 3),
    ("replicas", 4, 4),
)
WARM, PLANNED, MEASURED = 12, 6, 8


def hosts_of(tokens: Sequence[int], ranks: int, slots: int, shares: str = EVEN) -> tuple[Hosts, ...]:
    """The ranks that a plan gives each expert."""
    problem = ExpertProblem(tokens=tuple(tokens), ranks=ranks, slots=slots, shares=shares)
    placed = place(problem, contiguous(problem)).ranks
    on: dict[int, dict[int, int]] = {}
    for rank, experts in enumerate(placed):
        for expert, count in experts:
            on.setdefault(expert, {})[rank] = count
    return tuple(tuple(sorted(on[e], key=lambda r, e=e: (-on[e][r], r))) for e in range(len(tokens)))


def chunks_of(tokens: Sequence[int], hosts: Sequence[Hosts], ranks: int, rows: int) -> list[list[int]]:
    """The sizes of the chunks of each rank."""
    sizes: list[list[int]] = [[] for _ in range(ranks)]
    for placed in host_ranges(tokens, hosts, rows, ranks):
        begin = 0
        for rank, end in placed:
            sizes[rank] += [min(rows, end - at) for at in range(begin, end, rows)]
            begin = max(begin, end)
    return sizes


class ChunkTimes:
    """Processor time of a chunk, forward and backward, by its rows: the least of 5 measurements of several calls."""

    def __init__(self, width: int, inner: int) -> None:
        torch.set_num_threads(1)
        self._expert = FeedForward(width=width, inner=inner, activation="gelu", device=torch.device("cpu"))
        torch.nn.init.normal_(self._expert.fc1.weight, std=0.02)
        torch.nn.init.normal_(self._expert.fc2.weight, std=0.02)
        self._width = width
        self._known: dict[int, float] = {0: 0.0}

    def of(self, rows: int) -> float:
        """Milliseconds of a chunk."""
        # In steps of 8 rows: a measurement of each number would take longer than all that follows.
        size = -(-rows // 8) * 8
        if size not in self._known:
            self._known[size] = min(self._measure(size) for _ in range(5))
        return self._known[size]

    def _measure(self, rows: int) -> float:
        x, sums = torch.randn(rows, self._width, requires_grad=True), ExpertSums()
        begin, calls = time.process_time(), 10

        def product(name: str, value: torch.Tensor) -> torch.Tensor:
            layer = getattr(self._expert, name)
            return chunk_linear(value, layer.weight, layer.bias, sums, 0, name)

        for _ in range(calls):
            self._expert.transform(x, product).sum().backward()
        return (time.process_time() - begin) * 1000 / calls


def recorded(profile: Path) -> list[dict[str, tuple[int, ...]]]:
    """The tokens of each expert, by layer, of each recorded step."""
    steps = []
    for line in profile.read_text(encoding="utf-8").splitlines():
        counts = (json.loads(line).get("x_counts") or {}).get("expert_tokens", {})
        if counts:
            steps.append({item: tuple(round(n) for n in tokens) for item, tokens in counts.items()})
    return steps


def emulated(options: argparse.Namespace) -> Iterator[str]:
    """Rows of the table of emulated ranks."""
    steps = recorded(options.profile)
    if len(steps) <= max(AGES) + WINDOW:
        raise SystemExit(
            f"{options.profile}: has {len(steps)} steps with tokens; record more than {max(AGES) + WINDOW}"
        )
    scaled = [{item: tuple(n * options.scale for n in tokens) for item, tokens in step.items()} for step in steps]
    experts = len(next(iter(steps[0].values())))
    base = experts // options.ranks
    yield "| planned shares | slots | age of the statistics, steps | max/mean load, mean (largest) | step, ms |"
    yield "|---|---|---|---|---|"
    cases: list[tuple[str, int, int | None]] = [("in order", base, None), *((EVEN, base, age) for age in AGES)]
    cases += [(shares, slots, age) for slots in options.slots for shares in (FREE, EVEN) for age in AGES]
    times = [ChunkTimes(options.width, options.inner) for _ in range(options.repeats)]
    for name, slots, age in cases:
        ratios: list[float] = []
        step_ms = [0.0] * len(times)
        measured = range(max(AGES) + WINDOW, len(scaled), options.every)
        for at in measured:
            for item, tokens in scaled[at].items():
                if age is None:
                    hosts: tuple[Hosts, ...] = tuple((e * options.ranks // experts,) for e in range(experts))
                else:
                    # Age 0 sees the tokens of the step itself: the best that a plan could be.
                    window = [scaled[at]] if age == 0 else scaled[at - age - WINDOW + 1 : at - age + 1]
                    mean = np.mean([each[item] for each in window], axis=0)
                    hosts = hosts_of([round(n) for n in mean], options.ranks, slots, name)
                chunks = chunks_of(tokens, hosts, options.ranks, options.rows)
                ratios.append(max(map(sum, chunks)) * options.ranks / sum(tokens))
                for repeat, each in enumerate(times):
                    step_ms[repeat] += max(sum(each.of(size) for size in sizes) for sizes in chunks)
        shown = ", ".join(f"{ms / len(measured):.1f}" for ms in step_ms)
        load = f"{np.mean(ratios):.2f} ({max(ratios):.2f})"
        yield f"| {name} | {slots} | {'-' if age is None else age} | {load} | {shown} |"


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """What the processes train: bytes of a text, and the sizes of model and microbatch, of which each rank has one.

    Attributes:
        text: the file.
        width: hidden size of the model.
        inner: hidden size of an expert.
        tokens: tokens of a sample.
        samples: samples of a microbatch.
    """

    text: Path
    width: int
    inner: int
    tokens: int
    samples: int


def batches(given: RealRun) -> Iterator[Batch]:
    """Steps of consecutive bytes of a text, a microbatch for each rank."""
    ids = torch.frombuffer(bytearray(given.text.read_bytes()), dtype=torch.uint8).long()
    samples, tokens = RANKS * given.samples, given.tokens
    size = samples * tokens
    for step in range(1, (len(ids) - 1) // size + 1):
        begin = (step - 1) * size
        yield Batch(
            inputs={
                "ids": ids[begin : begin + size].view(samples, tokens),
                "labels": ids[begin + 1 : begin + size + 1].view(samples, tokens),
            },
            first_microbatch=(step - 1) * RANKS,
            step=step,
        )


def play(world: World, given: RealRun, slots: int | None, place_with: int | None) -> dict[str, Any]:
    """Train on one rank: the processor time of the measured steps, and loads and losses, the same on all ranks.

    Args:
        world: 4 processes.
        given: text and sizes.
        slots: experts and copies of a rank; None is the trainer without copies.
        place_with: slots of the plan that is made of the steps before the measured ones; None leaves the experts.
    """
    torch.set_num_threads(1)
    dims = ParallelDims(data=RANKS, expert=RANKS)
    world = set_parallel_dims(world, dims, 300)
    family = Gpt(
        replace(
            SHAPE,
            num_layers=2,
            hidden_size=given.width,
            ffn_hidden_size=given.inner,
            max_position_embeddings=given.tokens,
            vocab_size=256,
            padded_vocab_size=256,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            moe=MoeShape(num_experts=EXPERTS),
        )
    )
    settings = Scenario(prune=False, freeze=(), dropout=0.0, clip=1.0).settings()
    boundary = replace(
        settings.pipeline.boundary, shapes={HIDDEN: (given.samples, given.tokens, given.width), LOSS: ()}
    )
    pipeline = replace(settings.pipeline, microbatches=1, boundary=boundary)
    settings = replace(settings, pipeline=pipeline, expert_slots=slots, expert_chunk_rows=128)
    engine = Engine(family, settings, uniform_partition(family.items, 1), world)
    engine.build()
    spent, losses, counts = [], [], []
    for batch in islice(batches(given), WARM + MEASURED):
        if batch.step == WARM + 1 and place_with is not None:
            sums = {item: np.sum([each[item] for each in counts[-PLANNED:]], axis=0) for item in counts[-1]}
            engine.place_experts(
                {item: hosts_of([round(n) for n in each], RANKS, place_with) for item, each in sums.items()}
            )
        begin = time.process_time()
        result = engine.train_step(batch, sampled=False)
        spent.append(time.process_time() - begin)
        losses.append(result.loss)
        counts.append({i: found["expert_tokens"] for i, found in result.metrics.items() if "expert_tokens" in found})
    hosts = placements_of(engine.item_store.sharding)
    ratios = [
        max(map(sum, chunks_of([round(n * RANKS) for n in each], hosts[item], RANKS, 128))) / sum(each)
        for step in counts[WARM:]
        for item, each in step.items()
    ]
    spent_ms = [1000 * float(np.median(spent[WARM:]))]
    by_rank = [each[0] for each in all_gather_objects(world, spent_ms)]
    return {"ratio": float(np.mean(ratios)), "busiest": max(by_rank), "all": sum(by_rank), "losses": losses}


def play_all(world: World, given: RealRun) -> list[dict[str, Any]]:
    """Every case of ``CASES``, on the same processes."""
    return [play(world, given, slots, place_with) for _, slots, place_with in CASES]


def real(options: argparse.Namespace) -> Iterator[str]:
    """Rows of the table of real processes."""
    yield "| placement | slots | max/mean load | busiest rank, processor ms of a step | all ranks, ms | last loss |"
    yield "|---|---|---|---|---|---|"
    # By its module's name: the processes cannot import what belongs to this one's ``__main__``.
    from tests.benchmarks.train_expert_replicas import RealRun as GivenRun
    from tests.benchmarks.train_expert_replicas import play_all as play_cases

    sizes = {name: getattr(options, name) for name in ("width", "inner", "tokens", "samples")}
    given = GivenRun(text=options.text, **sizes)
    # Cases take turns, as other programs may run at the same time.
    found = [run_workers(play_cases, RANKS, given)[0] for _ in range(options.repeats)]
    for at, (name, slots, _) in enumerate(CASES):
        runs = [each[at] for each in found]
        busiest, every = (", ".join(f"{run[key]:.0f}" for run in runs) for key in ("busiest", "all"))
        loss = runs[0]["losses"][-1]
        yield f"| {name} | {slots or '-'} | {runs[0]['ratio']:.2f} | {busiest} | {every} | {loss!r} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("real")
    one.add_argument("--text", type=Path, required=True)
    one.add_argument("--width", type=int, default=256)
    one.add_argument("--inner", type=int, default=1024)
    one.add_argument("--tokens", type=int, default=128, help="Tokens of a sample.")
    one.add_argument("--samples", type=int, default=16, help="Samples of a rank in each step.")
    one.set_defaults(table=real)
    other = kinds.add_parser("emulated")
    other.add_argument("--profile", type=Path, required=True)
    other.add_argument("--ranks", type=int, default=32)
    other.add_argument("--slots", type=int, nargs="+", default=[3, 4])
    other.add_argument("--rows", type=int, default=128, help="Rows of a chunk.")
    other.add_argument("--scale", type=int, default=32, help="Tokens of a step as a multiple of the recorded ones.")
    other.add_argument("--every", type=int, default=10, help="Every n-th recorded step.")
    other.add_argument("--width", type=int, default=256)
    other.add_argument("--inner", type=int, default=1024)
    other.set_defaults(table=emulated)
    options = parser.parse_args()
    for line in options.table(options):
        emit(line)


if __name__ == "__main__":
    main()
