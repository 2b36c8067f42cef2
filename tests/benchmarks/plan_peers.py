"""The exact balancer against what other programs would do, on seven families of profiles.

    python tests/benchmarks/plan_peers.py [--instances 60] [--seed 0]

Each instance: a GPT of 24 to 96 layers (hidden size 1024, 2048 tokens, vocabulary 50257, microbatch 2) by the analytic
model of an H100 with fused attention, under one technique at a random strength and moment of its trajectory, on 4, 8
or 16 workers. Embedding and head are items of their own. Weights are forward plus backward times in ns, by layer.

Peers are called by their own code where it is installed (``pip install deepspeed torchgpipe fairscale``), and are left
out with the reason where it is not:

* DeepSpeed ``partition_balanced`` by time and by parameters, and ``partition_uniform`` over all items;
* torchgpipe and fairscale ``balance.blockpartition.solve`` by time.

Layout rules that are a line of arithmetic are restated here: Megatron's even split of the layers, and the same with
embedding and loss counted as a layer each, which is torchtitan's split with its default weights too. ``DynMo
diffusion`` is the published program's rule (the lightest layer of each worker above the mean goes to the least loaded
worker, as long as the variance falls, five rounds at most); it does not keep the order of the layers, so it computes
another network, and may beat every contiguous partition.

The number is bottleneck over that of ``exact``; below 1 would be a peer's win.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from dynmo_balance._common.console import emit, print_message
from dynmo_balance.costs.devices import PRESETS
from dynmo_balance.formats.profile import Header
from dynmo_balance.inputs.analytic_profile import BuildOptions, build_costs, build_header, header_of
from dynmo_balance.inputs.model_config import from_config
from dynmo_balance.inputs.scenarios import TrajectorySettings, scenario_steps
from dynmo_balance.partition.balance import bottleneck_ns
from dynmo_balance.partition.exact import solve
from dynmo_balance.partition.problem import PartitionProblem, worker_slots
from dynmo_balance.partition.registry import run_balancer
from dynmo_balance.planning.plan_builder import chain_of

FAMILIES = {
    "dense": ("static", 0.0, 0.0),
    "pruned": ("pruning", 0.85, 0.95),
    "frozen": ("freezing", 0.2, 0.7),
    "early exit": ("early-exit", 0.5, 0.99),
    "mixture of experts": ("moe", 0.2, 0.8),
    "mixture of depths": ("mod", 0.6, 0.99),
    "sparse attention": ("sparse-attention", 0.5, 0.95),
}
Weights = Sequence[int]
Cutter = Callable[[PartitionProblem, Header], list[int] | int]
"""Unit boundaries, or the bottleneck itself where the parts are not contiguous."""


def from_sizes(sizes: Sequence[int]) -> list[int]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def units(problem: PartitionProblem, values: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(problem.chain.prefix_at_cuts(values))]


def even(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]


def layers_even(problem: PartitionProblem, first_less: int, last_less: int) -> list[int]:
    """Layers evenly, as if the ends had that many more; embedding on the first stage, head on the last."""
    count = len(problem.chain.cuts) - 3
    sizes = even(count + first_less + last_less, problem.num_stages)
    sizes[0] += 1 - first_less
    sizes[-1] += 1 - last_less
    return from_sizes(sizes)


def diffused(problem: PartitionProblem) -> int:
    """The bottleneck of the published diffusion, from the even split."""
    work = units(problem, problem.chain.work_ns)
    cuts = layers_even(problem, 0, 0)
    stages = [work[a:b] for a, b in pairwise(cuts)]
    for _ in range(5):
        before = statistics.pvariance([sum(part) for part in stages])
        mean = sum(work) / len(stages)
        for at, part in enumerate(stages):
            target = min(range(len(stages)), key=lambda p: sum(stages[p]))
            if sum(part) <= mean or target == at or len(part) < 2:
                continue
            light = min(part)
            part.remove(light)
            stages[target].append(light)
            if statistics.pvariance([sum(part) for part in stages]) >= before:
                stages[target].remove(light)
                part.append(light)
            before = statistics.pvariance([sum(part) for part in stages])
    return max(map(sum, stages))


def own_code() -> dict[str, Cutter]:
    """The peers that are installed, by their own code."""
    found: dict[str, Cutter] = {}

    def add(name: str, module: str, make: Callable[[object], Cutter]) -> None:
        try:
            found[name] = make(importlib.import_module(module))
        except ImportError as error:
            print_message(f"{name}: left out, {error}")

    def times(problem: PartitionProblem) -> list[int]:
        return units(problem, problem.chain.work_ns)

    add(
        "DeepSpeed by time",
        "deepspeed.runtime.utils",
        lambda m: lambda p, _: list(map(int, m.partition_balanced(times(p), p.num_stages))),
    )
    add(
        "DeepSpeed by parameters",
        "deepspeed.runtime.utils",
        lambda m: (
            lambda p, _: list(
                map(int, m.partition_balanced(units(p, [item.param_count for item in p.chain.items]), p.num_stages))
            )
        ),
    )
    add(
        "DeepSpeed uniform",
        "deepspeed.runtime.utils",
        lambda m: lambda p, _: list(map(int, m.partition_uniform(len(p.chain.cuts) - 1, p.num_stages))),
    )
    for name, module in (("torchgpipe", "torchgpipe.balance"), ("fairscale", "fairscale.nn.pipe.balance")):
        add(
            name,
            f"{module}.blockpartition",
            lambda m: lambda p, _: from_sizes([len(part) for part in m.solve(times(p), p.num_stages)]),
        )
    return found


RULES: dict[str, Cutter] = {
    "Megatron even": lambda p, _: layers_even(p, 0, 0),
    "Megatron, ends counted; torchtitan": lambda p, _: layers_even(p, 1, 1),
    "DynMo diffusion": lambda p, _: diffused(p),
}


def instances(family: str, count: int, seed: int) -> list[tuple[PartitionProblem, Header]]:
    technique, least, most = FAMILIES[family]
    rng = random.Random(f"{family} {seed}")
    found = []
    for _ in range(count):
        layers, workers = rng.choice((24, 32, 48, 64, 96)), rng.choice((4, 8, 16))
        config = {"model_type": "gpt2", "n_layer": layers, "n_embd": 1024, "n_head": 16, "n_positions": 2048}
        spec, device = from_config({**config, "vocab_size": 50257}, family), PRESETS["h100"]
        options = BuildOptions(workers=workers, microbatches=32, micro_batch_size=2, fused_attention=True)
        header = header_of(build_header(spec, device, options, family))
        dense = build_costs(spec, header, device, options)
        trajectory = TrajectorySettings(
            steps=40, strength=rng.uniform(least, most), noise=0.02, seed=rng.randrange(10**6)
        )
        path = list(scenario_steps(technique, header, dense, trajectory))
        costs = path[rng.randrange(len(path) * 3 // 4, len(path))].costs
        problem = PartitionProblem(
            chain=chain_of(header, costs, "layer"), slots=worker_slots(header), schedule="1f1b", microbatches=32
        )
        free = tuple(replace(slot, memory_bytes=None) for slot in problem.slots)
        found.append((replace(problem, slots=free), header))
    return found


def partition_bottleneck_ns(problem: PartitionProblem, header: Header, cutter: Cutter) -> int:
    cuts = cutter(problem, header)
    if isinstance(cuts, int):
        return cuts
    return bottleneck_ns(problem, tuple(problem.chain.cuts[cut] for cut in cuts))


def ours() -> dict[str, Cutter]:
    """The other balancers of this package."""

    def cutter(name: str) -> Cutter:
        return lambda p, _: [p.chain.cuts.index(position) for position in run_balancer(p, name)]

    return {f"our {name}": cutter(name) for name in ("parameters", "diffusion")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    peers = {**own_code(), **RULES, **ours()}
    emit(f"| family | {' | '.join(peers)} |")
    emit(f"|---|{'---|' * len(peers)}")
    worst = 99.0
    for family in FAMILIES:
        problems = instances(family, options.instances, options.seed)
        best = [solve(problem).bottleneck_ns for problem, _ in problems]
        cells = []
        for name, cutter in peers.items():
            ratios = [
                partition_bottleneck_ns(problem, header, cutter) / least
                for (problem, header), least in zip_longest(problems, best)
            ]
            cells.append(f"{statistics.mean(ratios):.3f} / {max(ratios):.2f}")
            if name != "DynMo diffusion":
                worst = min(worst, *ratios)
        emit(f"| {family} | {' | '.join(cells)} |")
    emit(f"\nmean / worst of bottleneck over the exact one; the least of any contiguous peer is {worst:.6f}")


if __name__ == "__main__":
    main()
