"""Six recipes, one for each dynamic technique: what balancing gives, and what technique and balancing give together.

    python tests/benchmarks/plan_recipes.py [--layers 24,32,40,48] [--granularity layer]

Assumptions: GPT, hidden size 1024, 16 heads, 2048 tokens, vocabulary 50257, microbatch 2, bfloat16, selective
recomputation, 32 microbatches, 8 workers, 1F1B, by the analytic model of an H100; each technique at the end of its
trajectory as ``dynmo_balance/trajectories.py`` states it, at its own strength. The static pipeline is Megatron's
uniform split.

* balancing only: the technique on the static pipeline against the technique on the exact partition;
* technique and balancing: the dense model on the static pipeline against the technique on the exact partition;
* searched: the same as the last with schedule, granularity and virtual stages searched, and how far it is from the
  bound.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from dynmo_balance.auto import search
from dynmo_balance.build import BuildOptions, build_costs, build_header, header_of
from dynmo_balance.console import emit
from dynmo_balance.devices import PRESETS
from dynmo_balance.modelspec import from_config
from dynmo_balance.partition import solve, uniform
from dynmo_balance.planning import chain_of
from dynmo_balance.problem import Problem, places_of
from dynmo_balance.schedules import SCHEDULES
from dynmo_balance.simulate import predict
from dynmo_balance.trajectories import DEFAULT_STRENGTH, Script, moments

PUBLISHED = {
    "moe": 1.23,
    "pruning": 3.18,
    "freezing": 2.23,
    "sparse-attention": 4.02,
    "early-exit": 4.52,
    "mod": 1.17,
}
DEVICE = PRESETS["h100"]


def row(technique: str, layers: int, granularity: str) -> str:
    config = {"model_type": "gpt2", "n_layer": layers, "n_embd": 1024, "n_head": 16, "n_positions": 2048}
    spec = from_config({**config, "vocab_size": 50257}, "recipe")
    options = BuildOptions(workers=8, microbatches=32, micro_batch_size=2, recompute="selective")
    header = header_of(build_header(spec, DEVICE, options, "recipe"))
    dense = build_costs(spec, header, DEVICE, options)
    script = Script(steps=400, strength=DEFAULT_STRENGTH[technique], seed=1)
    last = list(moments(technique, header, dense, script))[-1].costs
    link = header.link
    before = Problem(
        chain=chain_of(header, dense, granularity),
        places=places_of(header),
        schedule=header.schedule,
        microbatches=header.microbatches,
        link_bandwidth=link.bandwidth_bytes_per_s if link else None,
        link_latency_ns=link.latency_ns if link else 0,
    )
    after = replace(before, chain=chain_of(header, last, granularity))
    static = predict(before, uniform.boundaries(before)).step_ns
    unbalanced = predict(after, uniform.boundaries(after)).step_ns
    balanced = predict(after, solve(after).boundaries).step_ns
    found = search(header, after, tuple(SCHEDULES), ("layer", "sublayer"))
    best = found.best.timeline.step_ns
    return (
        f"| {technique} | {layers} | {unbalanced / balanced:.2f} | {static / balanced:.2f} | {static / best:.2f} |"
        f" {best / found.bounds.step_ns:.3f} | {found.best.label} | {PUBLISHED[technique]:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="24,32,40,48")
    parser.add_argument("--granularity", default="layer", choices=("layer", "sublayer"))
    options = parser.parse_args()
    emit("| technique | layers | balancing only | technique and balancing | searched | x bound | found | published |")
    emit("|---|---|---|---|---|---|---|---|")
    for technique in PUBLISHED:
        for layers in options.layers.split(","):
            emit(row(technique, int(layers), options.granularity))


if __name__ == "__main__":
    main()
