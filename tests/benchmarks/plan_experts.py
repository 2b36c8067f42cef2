"""Largest load of a rank: our expert placement, EPLB's, and the lower bound, on random and recorded routing.

    python -m tests.benchmarks.plan_experts [--traces 1000] [--profile RUN/profile.jsonl ...] [--seed 7]

A trace is the tokens of each expert of one layer. Random ones are draws of 100 to 65,536 tokens from a power law or a
Dirichlet distribution, on 2 to 8 ranks with 1 to 8 slots. Recorded ones are ``x_counts.expert_tokens`` of each layer in
each recorded step of a profile, on 4 and 8 ranks with 0 and 4 spare slots. Each trace is placed with even and with
free shares; EPLB shares evenly. Traces are separated by their spare slots: none, fewer than ranks - 1, and enough for
free shares to reach the mean load. A trace on which EPLB is better counts as ``worse``; none is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dynmo_balance._common.console import emit
from dynmo_balance.partition.experts import EVEN, FREE, ExpertProblem, contiguous, loads_of, place
from tests.unit.dynmo_balance.partition.eplb import eplb, eplb_load
from tests.unit.dynmo_balance.partition.test_experts import random_tokens

SPARE = ("none", "fewer", "enough")
Shape = tuple[tuple[int, ...], int, int]
"""Tokens of each expert, number of ranks, slots of each."""


def spare_slots(experts: int, ranks: int, slots: int) -> str:
    """Whether spare slots are none, fewer than ranks - 1, or enough for free shares to reach the mean load."""
    spare = ranks * slots - experts
    return SPARE[0] if not spare else SPARE[1] if spare < ranks - 1 else SPARE[2]


def random_traces(number: int, seed: int) -> Iterator[Shape]:
    """Random tokens on random numbers of ranks and slots."""
    generator = np.random.default_rng(seed)
    for _ in range(number):
        ranks, slots = int(generator.integers(2, 9)), int(generator.integers(1, 9))
        experts = int(generator.integers(max(1, ranks * slots // 2), ranks * slots + 1))
        yield random_tokens(generator, experts), ranks, slots


def recorded_traces(profile: Path) -> Iterator[Shape]:
    """The tokens of each layer in each recorded step, on 4 and 8 ranks with 0 and 4 spare slots."""
    for line in profile.read_text(encoding="utf-8").splitlines():
        counts = (json.loads(line).get("x_counts") or {}).get("expert_tokens", {})
        for tokens in counts.values():
            for ranks in (4, 8):
                for slots in {-(-(len(tokens) + spare) // ranks) for spare in (0, 4)}:
                    yield tuple(round(n) for n in tokens), ranks, slots


def rows(name: str, traces: Sequence[Shape]) -> Iterator[str]:
    """Table rows: one for each number of spare slots and kind of shares."""
    for spare in SPARE:
        chosen = [(t, r, s) for t, r, s in traces if spare_slots(len(t), r, s) == spare and sum(t)]
        kinds = (EVEN, FREE) if spare != SPARE[0] else (EVEN,)
        for shares in kinds if chosen else ():
            first, other, ours, worse = [], [], [], 0
            for tokens, ranks, slots in chosen:
                problem = ExpertProblem(tokens=tokens, ranks=ranks, slots=slots, shares=shares)
                found, opponent = place(problem), eplb_load(tokens, eplb(tokens, ranks * slots, 1, 1, ranks))
                first.append(max(loads_of(contiguous(problem))) / found.lower_bound)
                other.append(opponent / found.lower_bound)
                ours.append(found.max_tokens / found.lower_bound)
                worse += found.max_tokens > opponent
            within = sum(ratio <= 1.02 for ratio in ours)
            kind = f"{name} | {spare} | {shares} | {len(ours):,} | {np.mean(first):.3f}"
            ratios = f"{np.mean(other):.3f}, {max(other):.3f} | {np.mean(ours):.4f}, {max(ours):.3f}"
            yield f"| {kind} | {ratios} | {within:,} | {worse} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=1000, help="number of random traces")
    parser.add_argument("--profile", type=Path, nargs="*", default=[], help="profiles of runs with experts")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    columns = ("traces", "spare slots", "shares", "number", "in order", "EPLB: mean, max", "ours: mean, max")
    emit(f"| {' | '.join(columns)} | within 1.02 | worse |")
    emit("|---|---|---|---|---|---|---|---|---|")
    sources = [("random", list(random_traces(options.traces, options.seed)))]
    sources += [(path.parent.name, list(recorded_traces(path))) for path in options.profile]
    for name, traces in sources:
        for row in rows(name, traces):
            emit(row)


if __name__ == "__main__":
    main()
